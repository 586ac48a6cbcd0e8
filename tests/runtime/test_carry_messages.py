"""Whichever message of a carry is the last before something happens, each request ends once.

One switch, which copies KV ahead, is lived through again and again. Each time something happens
just after another message was sent: the engine dies that was to get it or has sent it, or clients
go. ``test_carry_moments.py`` does the same after turns of processes.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from shoal.runtime.config import FakeSettings
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import Channel, Frames, parse_engine_identity
from tests.depth import how_many
from tests.runtime.test_carry_moments import AHEAD, PROMPTS, SLOW, TIGHT_AHEAD, Life

EACH = how_many("SHOAL_MESSAGES_EACH", few=1, many=4)
"""How many messages of each type something happens after; with 99 all, which takes minutes."""

Type = type[m.Message]
CARRY: set[Type] = {m.Expect, m.Export, m.Leaving, m.Exported, m.Import, m.Imported, m.Drop}
PRECOPY: set[Type] = {m.Pin, m.Pinned, m.Reserve, m.Reserved, m.CopyAhead, m.CopiedAhead}
PRECOPY |= {m.Settle, m.Unpin}
LEASE: set[Type] = {m.Lend, m.Lent, m.Grow}
SHRINK: set[Type] = {m.Shrink, m.Returning, m.TakeBack}
BIND: set[Type] = {m.Prepare, m.Prepared, m.Commit, m.Committed}
RELEASE: set[Type] = {m.Release, m.Released, m.Resume, m.Resumed}
SWITCHES: list[tuple[str, FakeSettings, set[Type]]] = [
    ("dp-tp4", AHEAD, CARRY | PRECOPY | LEASE | BIND),
    ("tp4-dp", AHEAD, CARRY | PRECOPY | RELEASE | SHRINK - {m.Shrink}),
    ("tp2-tp4", AHEAD, CARRY | PRECOPY | LEASE | SHRINK | BIND | RELEASE),
    ("tp4-tp2", TIGHT_AHEAD, CARRY | PRECOPY | LEASE | SHRINK | BIND | RELEASE),
    ("dp-tp4", SLOW, CARRY | {m.Allot} | BIND),
    ("tp4-tp2", SLOW, CARRY | {m.Allot} | BIND | RELEASE),
]
"""Each with what it consists of."""
EVERY_SWITCH = pytest.mark.parametrize(
    ("way", "settings", "parts"),
    SWITCHES,
    ids=["dp-tp4", "tp4-dp", "tp2-tp4", "tp4-tp2", "dp-tp4 foretold", "tp4-tp2 foretold"],
)

Heard = Callable[[m.Message, int], None]
"""Gets each message with the engine that gets it or has sent it."""
Event = Callable[[Life, int], None]


def listen(life: Life, heard: Heard) -> None:
    """Let a function hear of each message between the controller and the engines."""
    network = life.node.network
    to_engine, to_controller = network.post_to_engine, network.post

    def post_to_engine(engine: int, frames: Frames) -> None:
        to_engine(engine, frames)
        heard(m.decode_to_engine(frames[0]), engine)

    def post(channel: Channel, peer: str, frames: Frames) -> None:
        to_controller(channel, peer, frames)
        if channel is Channel.ENGINE:
            heard(m.decode_to_controller(frames[0]), parse_engine_identity(peer)[0])

    network.post_to_engine = post_to_engine  # type: ignore[method-assign]
    network.post = post  # type: ignore[method-assign]


def counted(way: str, settings: FakeSettings) -> Counter[Type]:
    """Return how many messages of each type a switch takes that nothing disturbs."""
    life, seen = Life(way, settings), Counter[Type]()
    listen(life, lambda message, _: seen.update([type(message)]))
    life.go_on()
    life.assert_sound()
    return seen


def chosen(count: int) -> list[int]:
    """Return which of so many messages something happens after."""
    some = min(EACH, count)
    return [(2 * nth + 1) * count // (2 * some) for nth in range(some)]


class Disturbed(Life):
    """A life in which something happens after the turn that sends a certain message.

    Args:
        way: see ``Life``.
        settings: see ``Life``.
        last: the type of that message, and how many of that type come before it.
        event: what happens; it gets the engine that the message is of.
    """

    def __init__(
        self, way: str, settings: FakeSettings, last: tuple[Type, int], event: Event
    ) -> None:
        super().__init__(way, settings)
        self._due, self._event = list[int](), event
        self._kind, self._before = last
        self.happened = False
        listen(self, self._hear)

    def _hear(self, message: m.Message, engine: int) -> None:
        if isinstance(message, self._kind):
            if self._before == 0:
                self._due.append(engine)
            self._before -= 1

    def turn(self) -> None:
        super().turn()
        while getattr(self, "_due", None):  # the first turns come before there is one
            self._event(self, self._due.pop())
            self.happened = True


def whatever_is_last(way: str, settings: FakeSettings, parts: set[Type], event: Event) -> None:
    """Let something happen after one message after another; check what comes of it."""
    counts = counted(way, settings)
    for kind in sorted(parts, key=lambda each: each.__name__):
        for nth in chosen(counts[kind]):
            life = Disturbed(way, settings, (kind, nth), event)
            life.go_on()
            assert life.happened, (kind, nth)
            life.assert_sound()


@EVERY_SWITCH
def test_a_switch_has_all_these_messages(
    way: str, settings: FakeSettings, parts: set[Type]
) -> None:
    assert parts <= counted(way, settings).keys()


@EVERY_SWITCH
def test_an_engine_dies(way: str, settings: FakeSettings, parts: set[Type]) -> None:
    whatever_is_last(way, settings, parts, lambda life, engine: life.node.kill(engine))


@EVERY_SWITCH
@pytest.mark.parametrize("clients", [1, 2], ids=["half", "all"])
def test_clients_go(way: str, settings: FakeSettings, parts: set[Type], clients: int) -> None:
    def leave(life: Life, _engine: int) -> None:
        for number in range(len(PROMPTS)):
            if number % 2 < clients:
                life.node.abort(f"r{number}", client=number % 2)

    whatever_is_last(way, settings, parts, leave)
