"""Whether the engines' loops run: each is pinged regularly, and given up when it stays silent."""

from collections.abc import Iterator

from shoal.runtime.controller.books.engine_book import EngineBook, EngineState
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.protocol import messages as m

PINGS = 4
"""Number of unanswered pings after which an engine is given up."""


class Pulse:
    """Pings the engines.

    Silence counts only while the controller's own loop runs. So after a long turn, or after the
    whole machine was suspended, every engine still has time to answer.

    Args:
        env: how long an engine may be silent, the transport to engines, and the time.
        engines: the engines of the node.
    """

    def __init__(self, env: Environment, engines: EngineBook) -> None:
        self._timeout = env.config.engine_timeout_seconds
        self._transport = env.transport
        self._clock = env.clock
        self._engines = engines
        self._checked_at = env.clock()
        self._unanswered: dict[tuple[int, int], int] = {}
        """The number of unanswered pings, by engine and incarnation: an engine that is back does
        not owe the answers of its former life."""

    @property
    def deadline(self) -> float | None:
        """When the engines are pinged next."""
        return None if self._timeout is None else self._checked_at + self._timeout / PINGS

    def feel(self, engine: int) -> None:
        """Take an engine's answer."""
        self._unanswered.pop(self._life(engine), None)

    def check(self) -> Iterator[tuple[int, str]]:
        """Ping every engine if a ping is due; yield the engines that are given up, and why."""
        now, due = self._clock(), self.deadline
        if due is None or now < due:
            return
        self._checked_at = now
        numbers = sorted(self._engines.in_state(EngineState.SERVING, EngineState.SILENT))
        alive = {engine: self._life(engine) for engine in numbers}
        self._unanswered = {life: self._unanswered.get(life, 0) for life in alive.values()}
        for engine, life in alive.items():
            if self._unanswered[life] >= PINGS:
                yield engine, f"engine {engine} did not answer for {self._timeout:g} s"
                continue
            self._unanswered[life] += 1
            self._transport.to_engine(engine, m.Ping())

    def _life(self, engine: int) -> tuple[int, int]:
        return engine, self._engines[engine].incarnation
