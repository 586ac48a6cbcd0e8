"""Looks at the node once a second for all who watch the live page, and tells all of them."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal.runtime.clock import Clock, monotonic
from shoal.runtime.protocol.controller_client import CallError, ControlClient
from shoal.runtime.protocol.messages import Switching
from shoal.runtime.protocol.messages.views import SwitchView
from shoal.server.observers import Observer
from shoal.server.operator.page.page_events import (
    About,
    Moment,
    Rates,
    Trace,
    event,
    moment,
    switch_event,
    switch_json,
)

LOOK_SECONDS = 1.0
HISTORY_SECONDS = 300
HISTORY_LENGTH = 600
"""The most moments that are kept: one for each second, and as many more for switches."""
NAMED_REQUESTS = 48
"""The most requests of each unit that a moment names."""
MOST_VIEWERS = 32
QUEUED = 8
"""The most events that wait for one viewer."""


@dataclass(eq=False)
class Viewer:
    """One page that watches. It first needs the history, and again if it has missed an event."""

    events: deque[bytes] = field(default_factory=deque)
    needs_history: bool = True
    trouble: bytes | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, told: bytes) -> None:
        """Queue an event, or note that the viewer has missed it."""
        if self.needs_history or len(self.events) >= QUEUED:
            self.events.clear()
            self.needs_history = True
        else:
            self.events.append(told)
        self.woken.set()

    def warn(self, trouble: bytes) -> None:
        """Tell the viewer next that the node could not be looked at."""
        self.trouble = trouble
        self.woken.set()


class Feed(Observer):
    """The live page's events. It asks the controller only while somebody watches.

    Args:
        control: the link to the controller.
        about: what does not change.
        clock: monotonic seconds.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        control: ControlClient,
        about: About,
        *,
        clock: Clock = monotonic,
        wall: Clock = time.time,
    ) -> None:
        self._control = control
        self._about = about
        self._clock = clock
        self._wall = wall
        self._viewers: set[Viewer] = set()
        self._past: deque[Trace] = deque(maxlen=HISTORY_LENGTH)
        self._switches: list[SwitchView] = []
        self._now: Moment | None = None
        self._rates = Rates()
        self._looking: asyncio.Task[None] | None = None
        self._again = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._viewers)

    @property
    def is_full(self) -> bool:
        """Whether no more viewers can watch."""
        return len(self._viewers) >= MOST_VIEWERS

    @property
    def is_looking(self) -> bool:
        """Whether an answer of the controller is awaited."""
        return self._looking is not None and not self._looking.done()

    # --- looking ------------------------------------------------------------------------------

    def switching(self, note: Switching) -> None:
        """Look at once when a switch has ended."""
        if note.over:
            self.look()

    def look(self) -> None:
        """Look at the node if somebody watches. Call it every ``LOOK_SECONDS``."""
        if not self._viewers or self._closed:
            return
        if self.is_looking:
            self._again = True
            return
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        self._again = True
        while self._again and self._viewers:
            self._again = False
            try:
                layout = await self._control.get_layout(named=NAMED_REQUESTS)
                metrics = await self._control.get_metrics()
            except CallError as error:
                trouble = event("trouble", {"error": str(error)})
                for viewer in self._viewers:
                    viewer.warn(trouble)
            else:
                at, now = self._wall(), self._clock()
                seen = moment(layout, metrics, now=now, at=at, rates=self._rates)
                self._show(seen, layout.switches)

    def _show(self, now: Moment, switches: list[SwitchView]) -> None:
        known = max((switch.epoch for switch in self._switches), default=0)
        self._now, self._switches = now, switches
        self._past.append(now.trace)
        while self._past[0].at < now.trace.at - HISTORY_SECONDS:
            self._past.popleft()
        for switch in switches:
            if switch.epoch > known:
                self._tell(switch_event(switch))
        self._tell(event("moment", now))

    def _tell(self, told: bytes) -> None:
        for viewer in self._viewers:
            viewer.offer(told)

    # --- viewers ------------------------------------------------------------------------------

    def close(self) -> None:
        """End all streams, and take no more viewers."""
        self._closed = True
        for viewer in self._viewers:
            viewer.woken.set()

    @contextmanager
    def watched(self) -> Iterator[Viewer]:
        """Add a viewer for as long as the context lasts."""
        if not self._viewers:
            # Rates over the time in which nobody watched would say nothing of the present.
            self._now, self._rates = None, Rates()
        self._viewers.add(viewer := Viewer())
        self.look()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    async def events(self, viewer: Viewer) -> AsyncIterator[bytes]:
        """Yield the events of one viewer: first the history, then one each second and switch."""
        while not self._closed:
            if viewer.trouble is not None:
                trouble, viewer.trouble = viewer.trouble, None
                yield trouble
            elif viewer.needs_history and self._now is not None:
                viewer.needs_history = False
                yield self._history(self._now)
            elif viewer.events:
                yield viewer.events.popleft()
            else:
                viewer.woken.clear()
                await viewer.woken.wait()

    def _history(self, now: Moment) -> bytes:
        switches = [switch_json(switch) for switch in self._switches]
        past = list(self._past)
        return event(
            "history", {"about": self._about, "past": past, "switches": switches, "now": now}
        )
