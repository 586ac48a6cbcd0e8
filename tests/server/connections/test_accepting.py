"""Front ends that share a listener, here in one event loop: who accepts which connection."""

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from shoal.server.connections import accepting
from shoal.server.connections.accepting import Acceptor, Tally

PATIENCE_SECONDS = 60.0


class FrontEnds:
    """Acceptors of one listener, each with a file descriptor of its own as processes have."""

    def __init__(self, count: int) -> None:
        self.sockets = ExitStack()
        listener = self.own(socket.create_server(("127.0.0.1", 0)))
        self.address = listener.getsockname()
        self.tally = Tally(count)
        self.accepted: list[list[socket.socket]] = [[] for _ in range(count)]
        self.news = asyncio.Event()
        self.acceptors = [
            Acceptor(
                self.own(listener.dup()),
                self.tally,
                index,
                self.accepted[index].__len__,
                lambda accepted, index=index: self._take(index, accepted),
            )
            for index in range(count)
        ]

    def own(self, sock: socket.socket) -> socket.socket:
        return self.sockets.enter_context(sock)

    def _take(self, index: int, accepted: socket.socket) -> None:
        self.accepted[index].append(self.own(accepted))
        self.news.set()

    @property
    def counts(self) -> list[int]:
        return [len(accepted) for accepted in self.accepted]

    async def connect(self) -> None:
        """Connect, and wait until somebody has accepted."""
        self.news.clear()
        client = self.own(socket.socket())
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, self.address)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.news.wait()

    def close(self) -> None:
        for acceptor in self.acceptors:
            acceptor.stop()
        self.sockets.close()


@pytest.fixture
async def three() -> "Iterator[FrontEnds]":
    fronts = FrontEnds(3)
    yield fronts
    fronts.close()


async def test_connections_are_spread_evenly(three: FrontEnds) -> None:
    for acceptor in three.acceptors:
        acceptor.start(64)
    for _ in range(30):
        await three.connect()
    assert three.counts == [10, 10, 10]


async def test_who_has_lost_connections_gets_the_next_ones(three: FrontEnds) -> None:
    for acceptor in three.acceptors:
        acceptor.start(64)
    for _ in range(12):
        await three.connect()
    three.accepted[1].clear()
    three.acceptors[1].note()
    for _ in range(4):
        await three.connect()
    assert three.counts == [4, 4, 4]


@pytest.mark.parametrize(
    ("counts", "is_far"),
    [((5, 0, 9), True), ((4, 0, 9), False), ((40, 31, 31), False), ((40, 29, 31), True)],
)
async def test_far_ahead_is_who_has_many_more_than_another(
    three: FrontEnds, counts: tuple[int, ...], is_far: bool
) -> None:
    for front_end, count in enumerate(counts):
        three.tally.note(front_end, count)
    assert three.acceptors[0].is_far_ahead() == is_far


async def test_who_accepts_no_more_is_neither_ahead_nor_compared_with(three: FrontEnds) -> None:
    three.tally.note(0, 40)
    assert not three.acceptors[0].is_far_ahead()
    three.tally.note(1, 0)
    assert three.acceptors[0].is_far_ahead()
    three.tally.leave(0)
    assert not three.acceptors[0].is_far_ahead()


async def test_a_front_end_that_does_not_come_is_not_waited_for(three: FrontEnds) -> None:
    three.acceptors[0].start(64)
    three.tally.note(1, 0)  # it is there, and busy: all that comes would be its own
    for _ in range(5):
        await three.connect()
    assert three.counts == [5, 0, 0]


async def test_those_that_do_not_accept_do_not_count(
    three: FrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "DEFER_SECONDS", 2 * PATIENCE_SECONDS)
    three.acceptors[0].start(64)
    three.acceptors[1].start(64)
    three.acceptors[1].stop()
    for _ in range(5):
        await three.connect()
    assert three.counts == [5, 0, 0]


async def test_without_file_descriptors_it_tries_again_later(
    three: FrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "RETRY_SECONDS", 0.0)
    failures = 3

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    acceptor = three.acceptors[0]
    listener = acceptor._listener
    acceptor._listener = three.own(Exhausted(fileno=listener.detach()))
    acceptor.start(64)
    await three.connect()
    assert (failures, three.counts) == (0, [1, 0, 0])
