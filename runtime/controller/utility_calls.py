"""vLLM's utility calls, which the controller passes on to engines; each gets exactly one answer.

Every engine that serves does what a call asks for, and so does one that is silent, as soon as it
goes on. One that serves is asked for the answer. If that one dies first, another one is.
"""

import msgspec

from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire


class _Asked(msgspec.Struct, frozen=True):
    """A call whose answer an engine owes."""

    frames: list[bytes]
    engine: int
    incarnation: int


class UtilityCalls:
    """Passes calls on, and their answers back to the front ends.

    Args:
        env: the transport to engines and front ends.
        books: engines, and what is known of their prefix caches.
    """

    def __init__(self, env: Environment, books: Books) -> None:
        self._transport = env.transport
        self._engines = books.engines
        self._prefixes = books.prefixes
        self._asked: dict[int, _Asked] = {}
        """Calls that have no answer yet, by the controller's number of the call."""
        self._calls = 0

    def take(self, frames: list[bytes]) -> None:
        """Pass on a call of a front end.

        Raises:
            msgspec.DecodeError: the frames hold no utility call.
        """
        if wire.decode_utility(frames).method == "reset_prefix_cache":
            self._prefixes.clear()
        self._calls += 1
        asked = self._ask(self._calls, frames)
        for engine in sorted(self._engines.in_state(EngineState.SERVING, EngineState.SILENT)):
            if engine != asked:
                self._transport.to_engine(engine, m.Utility(None), frames)

    def answered(self, message: m.UtilityDone) -> bool:
        """Pass on an engine's answer; return False if nobody waits for it."""
        asked = self._asked.pop(message.call, None)
        if asked is not None:
            self._answer(asked.frames, message.frames)
        return asked is not None

    def tick(self) -> None:
        """Ask another engine in the place of each that has died since it was asked."""
        for call, asked in list(self._asked.items()):
            engine = self._engines[asked.engine]
            if engine.is_gone or engine.incarnation != asked.incarnation:
                del self._asked[call]
                self._ask(call, asked.frames)

    def _ask(self, call: int, frames: list[bytes]) -> int | None:
        """Ask one engine for the answer and return it; None: there is none, as the caller hears."""
        engine = min(self._engines.in_state(EngineState.SERVING), default=None)
        if engine is None:
            asked = wire.decode_utility(frames)
            self._answer(frames, [wire.encode_utility_failure(asked.call_id, "no engine is left")])
            return None
        self._asked[call] = _Asked(frames, engine, self._engines[engine].incarnation)
        self._transport.to_engine(engine, m.Utility(call), frames)
        return engine

    def _answer(self, frames: list[bytes], answer: list[bytes]) -> None:
        self._transport.to_front(wire.decode_utility(frames).client_index, answer)
