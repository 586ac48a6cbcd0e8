"""Whether the engines' loops run: each is asked again and again, and given up when it is silent."""

from collections.abc import Iterator

from shoal.runtime.clock import Clock
from shoal.runtime.controller.books.book import Book, EngineState
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import ControllerTransport

PINGS = 4
"""An engine is asked so often before it is given up."""


class Pulse:
    """Asks the engines for a sign of life.

    Silence is counted only while the controller's own loop runs: after a long turn, or when the
    whole machine was suspended, every engine has time to answer.

    Args:
        timeout: seconds of silence that an engine is given up after; None: never.
        book: which engines there are.
        transport: the way to them.
        clock: monotonic seconds.
    """

    def __init__(
        self, timeout: float | None, book: Book, transport: ControllerTransport, clock: Clock
    ) -> None:
        self._timeout = timeout
        self._book = book
        self._transport = transport
        self._clock = clock
        self._checked_at = clock()
        self._unanswered: dict[int, int] = {}
        """Engines that were asked, and how often in vain."""

    @property
    def deadline(self) -> float | None:
        """When the engines are to be asked next."""
        return None if self._timeout is None else self._checked_at + self._timeout / PINGS

    def feel(self, engine: int) -> None:
        """Take an engine's answer."""
        self._unanswered.pop(engine, None)

    def check(self) -> Iterator[tuple[int, str]]:
        """Ask every engine if it is time; yield those that are given up, and why."""
        now, due = self._clock(), self.deadline
        if due is None or now < due:
            return
        self._checked_at = now
        alive = self._book.in_state(EngineState.SERVING, EngineState.SILENT)
        self._unanswered = {e: n for e, n in self._unanswered.items() if e in alive}
        for engine in sorted(alive):
            asked = self._unanswered.get(engine, 0)
            if asked >= PINGS:
                yield engine, f"engine {engine} did not answer for {self._timeout:g} s"
                continue
            self._unanswered[engine] = asked + 1
            self._transport.to_engine(engine, m.Ping())
