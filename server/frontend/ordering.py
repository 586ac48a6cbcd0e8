"""Puts the outputs of a moved request in order.

Every engine sends its outputs over its own connection. When a request moves, the first tokens of
its new unit can reach a busy front end before the last tokens of its old unit. The first output of
the new unit says how long the prompt was that the unit computed: the original prompt and every
token before the move. So the front end knows which tokens it must have received, and waits for
them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock, monotonic

Standing = Callable[[str], tuple[int, int] | None]
"""Returns how many prompt and received output tokens a request has; None if unknown."""


class EngineOutput(Protocol):
    """The fields of vLLM's ``EngineCoreOutput`` that are read here."""

    request_id: str
    new_token_ids: Sequence[int]
    prefill_stats: Any


class _Held(msgspec.Struct):
    """Outputs of a request's new unit that came too early."""

    unit: Unit | None
    after: int
    """How many output tokens must come first."""
    outputs: list[Any]
    since: float


class InOrder:
    """Holds outputs back until the outputs that precede them have come.

    Args:
        standing: tells how far a request is.
        clock: monotonic seconds.
    """

    def __init__(self, standing: Standing, clock: Clock = monotonic) -> None:
        self._standing = standing
        self._clock = clock
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, unit: Unit | None, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of one message that are due, and earlier ones that waited for them.

        Args:
            unit: the unit that made them; None: the controller.
            outputs: ``EngineCoreOutput`` of the message, at most one per request.
        """
        if not self._held and all(output.prefill_stats is None for output in outputs):
            return list(outputs)  # nothing has moved: nearly every message of a busy node
        due: list[Any] = []
        for output in outputs:
            due += self._take(unit, output)
        return due

    def drop(self, request_id: str) -> None:
        """Forget the held-back outputs of a request."""
        self._held.pop(request_id, None)

    def overdue(self, seconds: float) -> list[str]:
        """Return the requests whose missing outputs have been awaited for ``seconds`` or more."""
        before = self._clock() - seconds
        return [request_id for request_id, held in self._held.items() if held.since <= before]

    def _take(self, unit: Unit | None, output: EngineOutput) -> list[Any]:
        standing = self._standing(output.request_id)
        held = self._held.get(output.request_id)
        if standing is None:
            self._held.pop(output.request_id, None)
            return [output]
        prompt, seen = standing
        if held is None:
            stats = output.prefill_stats
            after = stats.num_prompt_tokens - prompt if stats is not None else 0
            if after <= seen:
                return [output]
            self._held[output.request_id] = _Held(unit, after, [output], self._clock())
            return []
        if held.unit == unit:
            held.outputs.append(output)
            return []
        if seen + len(output.new_token_ids) < held.after:
            return [output]
        del self._held[output.request_id]
        return [output, *held.outputs]
