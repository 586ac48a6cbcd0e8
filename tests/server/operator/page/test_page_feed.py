"""One look at the node serves all who watch it, and nobody holds up the others."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal.runtime.clock import ManualClock
from shoal.runtime.protocol.controller_client import CallError
from shoal.runtime.protocol.messages import Switching
from shoal.server.operator.page.page_feed import QUEUED, Feed, Viewer
from tests.runtime.loopback_node import LoopbackNode
from tests.server.operator.page.parts import ABOUT, Control


@pytest.fixture
def node() -> LoopbackNode:
    node = LoopbackNode(2)
    node.settle()
    return node


@pytest.fixture
def control(node: LoopbackNode) -> Control:
    return Control(node)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def feed(control: Control, clock: ManualClock) -> Feed:
    return Feed(control, ABOUT, clock=clock, wall=lambda: 1000 + clock())  # type: ignore[arg-type]


async def look(feed: Feed) -> None:
    feed.look()
    while feed.is_looking:
        await asyncio.sleep(0)


async def following(events: AsyncIterator[bytes]) -> tuple[str, Any]:
    head, data, *_ = (await anext(events)).decode().split("\n")
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_nobody_is_asked_while_nobody_watches(feed: Feed, control: Control) -> None:
    await look(feed)
    feed.switching(Switching([0, 1], over=True))
    assert control.asked == 0
    with feed.watched():
        await look(feed)
    asked = control.asked
    assert asked > 0
    await look(feed)
    assert (control.asked, len(feed)) == (asked, 0)


async def test_all_viewers_share_one_look(feed: Feed, control: Control, clock: ManualClock) -> None:
    with feed.watched() as one, feed.watched() as other:
        streams = feed.events(one), feed.events(other)
        await look(feed)
        for stream in streams:
            name, told = await following(stream)
            assert name == "history"
            assert told["now"]["trace"]["at"] == 1000
        asked = control.asked
        clock.advance(1)
        await look(feed)
        assert control.asked == asked + 1
        first, second = [await following(stream) for stream in streams]
        assert first == second
        assert first[0] == "moment"
        assert first[1]["trace"]["at"] == 1001


async def test_looks_that_meet_a_look_become_one_more(feed: Feed, control: Control) -> None:
    with feed.watched():  # looks
        for _ in range(50):
            feed.look()
        await look(feed)
    assert control.asked <= 3


async def test_a_switch_is_told_at_once_and_only_once(feed: Feed, node: LoopbackNode) -> None:
    node.switch((0, 1))
    with feed.watched() as viewer:
        events = feed.events(viewer)
        name, told = await following(events)
        assert (name, len(told["switches"])) == ("history", 1)
        node.switch((0,), (1,))
        feed.switching(Switching([0, 1], over=False))
        assert not feed.is_looking
        feed.switching(Switching([0, 1], over=True))
        name, told = await following(events)
        assert (name, told["after"]) == ("switch", [[0], [1]])
        assert (await following(events))[0] == "moment"
        await look(feed)
        assert (await following(events))[0] == "moment"


async def test_a_new_page_has_the_last_five_minutes(feed: Feed, clock: ManualClock) -> None:
    with feed.watched():
        for _ in range(400):
            await look(feed)
            clock.advance(1)
        with feed.watched() as late:
            _, told = await following(feed.events(late))
    times = [trace["at"] for trace in told["past"]]
    assert times == sorted(times)
    assert times[-1] - times[0] == 300
    assert told["about"]["model"] == "demo"


async def test_a_slow_viewer_misses_moments_and_then_gets_the_history(
    feed: Feed, clock: ManualClock
) -> None:
    with feed.watched() as slow, feed.watched() as quick:
        slowly, quickly = feed.events(slow), feed.events(quick)
        await look(feed)
        assert (await following(slowly))[0] == (await following(quickly))[0] == "history"
        for _ in range(3 * QUEUED):
            clock.advance(1)
            await look(feed)
            assert (await following(quickly))[0] == "moment"
            assert len(slow.events) <= QUEUED
        name, told = await following(slowly)
        assert name == "history"
        assert told["now"]["trace"]["at"] == 1000 + 3 * QUEUED
        clock.advance(1)
        await look(feed)
        assert (await following(slowly))[0] == "moment"


async def test_a_viewer_hears_that_the_controller_does_not_answer(
    feed: Feed, control: Control
) -> None:
    control.error = CallError(504, "the controller did not answer")
    with feed.watched() as viewer:
        events = feed.events(viewer)
        told = "trouble", {"error": "the controller did not answer"}
        assert await following(events) == told
        control.error = None
        await look(feed)
        assert (await following(events))[0] == "history"
        control.error = CallError(504, "the controller did not answer")
        await look(feed)
        assert await following(events) == told


async def test_the_end_of_the_node_ends_every_stream(feed: Feed) -> None:
    with feed.watched() as viewer:
        events = feed.events(viewer)
        assert (await following(events))[0] == "history"
        waiting = asyncio.ensure_future(anext(events, None))
        await asyncio.sleep(0)
        feed.close()
        assert await waiting is None


async def test_time_and_slow_viewers_take_no_memory(feed: Feed, clock: ManualClock) -> None:
    async def memory_after(looks: int) -> int:
        for _ in range(looks):
            await look(feed)
            clock.advance(2)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with feed.watched(), feed.watched() as reader:
        events = feed.events(reader)
        tracemalloc.start()
        try:
            full = await memory_after(180)  # longer than what is kept
            assert (await following(events))[0] == "history"
            grown = await memory_after(120) - full
        finally:
            tracemalloc.stop()
    assert grown < 40_000  # of 120 events, each of 1200 bytes and more in memory


def test_an_offer_too_many_empties_the_queue() -> None:
    viewer = Viewer(needs_history=False)
    for _ in range(QUEUED):
        viewer.offer(b"x")
    assert (len(viewer.events), viewer.needs_history) == (QUEUED, False)
    viewer.offer(b"x")
    assert (len(viewer.events), viewer.needs_history) == (0, True)
