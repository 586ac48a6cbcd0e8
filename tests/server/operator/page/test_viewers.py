"""How many pages may watch a node, though they come at once."""

import asyncio
from types import SimpleNamespace
from typing import Any

from starlette.types import Message

from shoal.server.operator.page.live_page import EventsResponse
from shoal.server.operator.page.page_feed import MOST_VIEWERS, Feed


async def test_no_more_viewers_than_allowed_come_in_at_once() -> None:
    async def never(**_: Any) -> Any:
        await asyncio.Event().wait()

    async def receive() -> Message:
        await never()
        raise AssertionError

    statuses: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    control: Any = SimpleNamespace(get_layout=never, get_metrics=never)
    about: Any = None
    feed = Feed(control, about)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    over = 3
    viewers = [
        asyncio.ensure_future(EventsResponse(feed)(scope, receive, send))
        for _ in range(MOST_VIEWERS + over)
    ]
    await asyncio.gather(*viewers[-over:])
    assert len(feed) == MOST_VIEWERS
    while len(statuses) < len(viewers):
        await asyncio.sleep(0)
    assert sorted(statuses) == [200] * MOST_VIEWERS + [503] * over
    for viewer in viewers:
        viewer.cancel()
    await asyncio.gather(*viewers, return_exceptions=True)
    assert len(feed) == 0
