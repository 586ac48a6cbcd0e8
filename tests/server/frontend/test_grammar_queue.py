"""The order in which grammars are compiled, by a compiler that ends them when a test says so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shoal.server.frontend.grammar_queue import (
    BYTES_PER_PLACE,
    FIRST_SECONDS,
    GrammarQueue,
    QueueFullError,
)
from shoal.server.frontend.sandbox import KilledError, RefusedError

LIMIT = 5
PER_CALLER = 20


class Bench:
    """A queue, and the hands that compile its grammars. A grammar is its name and some padding."""

    def __init__(self, cpu_seconds: int = LIMIT, per_caller: int = PER_CALLER) -> None:
        self.queue = GrammarQueue(self.compile, cpu_seconds=cpu_seconds, per_caller=per_caller)
        self.running: dict[str, asyncio.Future[None]] = {}
        self.requests: list[asyncio.Task[None]] = []
        self._started: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def compile(self, job: bytes, cpu_seconds: int) -> None:
        name = job.decode().strip()
        assert len(self.running) < 2
        self.running[name] = asyncio.get_running_loop().create_future()
        self._started.put_nowait((name, cpu_seconds))
        try:
            await self.running[name]
        finally:
            del self.running[name]

    async def started(self) -> tuple[str, int]:
        """Return the grammar that is compiled next, and the seconds that it is given."""
        return await self._started.get()

    def nothing_started(self) -> bool:
        return self._started.empty()

    def end(self, name: str, error: Exception | None = None) -> None:
        """End a compilation."""
        if error is None:
            self.running[name].set_result(None)
        else:
            self.running[name].set_exception(error)

    def kill(self, name: str) -> None:
        """End a compilation that has used up its time."""
        self.end(name, KilledError("it took too long"))

    async def ask(self, caller: str | None, name: str, size: int = 0) -> asyncio.Task[None]:
        """Bring a grammar, and return the request that waits for it when it stands in line."""
        request = asyncio.create_task(self.queue.run(caller, name.ljust(size).encode()))
        self.requests.append(request)
        await asyncio.sleep(0)  # the event loop gives the request its turn
        return request

    async def fill(self, caller: str) -> None:
        """Have both places taken by grammars of a caller."""
        for name in ("one", "two"):
            await self.ask(caller, name)
            assert await self.started() == (name, FIRST_SECONDS)


@asynccontextmanager
async def bench(cpu_seconds: int = LIMIT, per_caller: int = PER_CALLER) -> AsyncIterator[Bench]:
    made = Bench(cpu_seconds, per_caller)
    yield made
    for request in made.requests:
        request.cancel()
    await asyncio.gather(*made.requests, return_exceptions=True)


async def leave(request: asyncio.Task[None]) -> None:
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


# --- fairness ---


async def test_sixteen_heavy_grammars_of_one_caller_delay_another_s_by_one_first_try() -> None:
    async with bench() as b:
        for k in range(16):
            await b.ask("greedy", f"heavy{k}", 1000)
        small = await b.ask("modest", "small")
        assert [await b.started(), await b.started()] == [("heavy0", 1), ("heavy1", 1)]
        b.kill("heavy0")
        assert await b.started() == ("small", FIRST_SECONDS)
        b.end("small")
        await small


async def test_second_tries_hold_up_no_first_one() -> None:
    async with bench() as b:
        await b.fill("greedy")
        b.kill("one")
        b.kill("two")
        assert await b.started() == ("one", LIMIT)
        for k in range(5):
            request = await b.ask("modest", f"small{k}")
            assert await b.started() == (f"small{k}", FIRST_SECONDS)
            b.end(f"small{k}")
            await request
        assert b.nothing_started()  # the other second try has to wait
        b.end("one")
        assert await b.started() == ("two", LIMIT)


async def test_callers_take_turns() -> None:
    async with bench() as b:
        await b.fill("x")
        for name in ("a1", "a2", "a3"):
            await b.ask("a", name)
        for name in ("b1", "b2"):
            await b.ask("b", name)
        await b.ask(None, "c1")
        order = []
        b.end("one")
        for _ in range(6):
            name, _ = await b.started()
            order.append(name)
            b.end(name)
        assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_so_they_do_with_what_is_tried_again() -> None:
    async with bench() as b:
        for caller, name in (("a", "a1"), ("a", "a2"), ("b", "b1")):
            await b.ask(caller, name)
        for name in ("a1", "a2"):
            assert await b.started() == (name, FIRST_SECONDS)
        b.kill("a1")
        assert await b.started() == ("b1", FIRST_SECONDS)
        b.kill("a2")
        assert await b.started() == ("a1", LIMIT)
        b.kill("b1")
        b.end("a1")
        assert await b.started() == ("b1", LIMIT)  # the other has had a turn
        b.end("b1")
        assert await b.started() == ("a2", LIMIT)


@pytest.mark.parametrize(("later", "overtakes"), [(1, True), (2, True), (3, False)])
async def test_of_one_caller_s_the_small_come_first_but_not_for_ever(
    later: int, overtakes: bool
) -> None:
    async with bench() as b:
        await b.fill("a")
        await b.ask("a", "large", 2 * BYTES_PER_PLACE + 500)
        for k in range(1, later + 1):
            await b.ask("a", f"small{k}", 100)
        order = []
        b.end("one")
        for _ in range(later + 1):
            name, _ = await b.started()
            order.append(name)
            b.end(name)
        assert (order.index(f"small{later}") < order.index("large")) == overtakes


# --- what is tried again ---


async def test_a_grammar_that_needs_all_its_time_gets_it() -> None:
    async with bench() as b:
        request = await b.ask("a", "g")
        assert await b.started() == ("g", FIRST_SECONDS)
        b.kill("g")
        assert await b.started() == ("g", LIMIT)
        b.end("g")
        await request


async def test_one_that_needs_more_is_refused() -> None:
    async with bench() as b:
        request = await b.ask("a", "g")
        for _ in range(2):
            await b.started()
            b.kill("g")
        with pytest.raises(KilledError):
            await request


async def test_a_limit_as_short_as_a_first_try_allows_no_second() -> None:
    async with bench(cpu_seconds=FIRST_SECONDS) as b:
        request = await b.ask("a", "g")
        await b.started()
        b.kill("g")
        with pytest.raises(KilledError):
            await request
        assert b.nothing_started()


@pytest.mark.parametrize("error", [RefusedError("wrong"), OSError("the sandbox is gone")])
async def test_another_error_is_final_and_told_to_all_who_wait(error: Exception) -> None:
    async with bench() as b:
        requests = [await b.ask(caller, "g") for caller in ("a", "a", "b")]
        await b.started()
        b.end("g", error)
        for request in requests:
            with pytest.raises(type(error), match=str(error)):
                await request
        await b.ask("a", "next")
        assert await b.started() == ("next", FIRST_SECONDS)


# --- bounds ---


async def test_a_caller_has_so_many_and_the_others_are_not_concerned() -> None:
    async with bench(per_caller=3) as b:
        for name in ("g1", "g2", "g3"):
            await b.ask("greedy", name)
        with pytest.raises(QueueFullError, match="3 grammars of this API key wait"):
            await b.queue.run("greedy", b"g4")
        await b.ask("greedy", "g3")  # which is there
        await b.ask("modest", "m1")
        for name in ("k1", "k2", "k3"):
            await b.ask(None, name)
        with pytest.raises(QueueFullError, match="callers without an API key"):
            await b.queue.run(None, b"k4")
        await b.started()
        b.end("g1")
        await b.requests[0]
        await b.ask("greedy", "g4")


async def test_two_at_once_whoever_leaves() -> None:
    async with bench() as b:
        await b.fill("a")
        for request in b.requests:
            await leave(request)
        await b.ask("a", "next")
        assert b.nothing_started()  # what nobody waits for any more still runs
        b.kill("one")
        assert await b.started() == ("next", FIRST_SECONDS)


async def test_what_nobody_waits_for_is_not_begun_and_not_tried_again() -> None:
    async with bench(per_caller=3) as b:
        await b.fill("a")
        await leave(await b.ask("a", "gone"))
        await leave(b.requests[0])
        b.kill("one")
        await b.ask("a", "next")
        assert await b.started() == ("next", FIRST_SECONDS)
        b.end("next")
        await b.requests[-1]
        assert b.nothing_started()


async def test_a_grammar_that_two_callers_ask_for_is_compiled_once_for_whoever_stays() -> None:
    async with bench() as b:
        await b.fill("x")
        await b.ask("a", "first")
        left = await b.ask("a", "shared")
        stays = await b.ask("b", "shared")
        await leave(left)
        order = []
        b.end("one")
        for _ in range(2):
            name, _ = await b.started()
            order.append(name)
            b.end(name)
        await stays
        assert order == ["first", "shared"]
