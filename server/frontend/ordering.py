"""The outputs of a moved request, in order.

Every engine pushes its outputs over its own connection. When a request moves, the last tokens of
its old unit and the first of its new one can overtake each other in front of a busy front end. A
moved request's first output says how long the prompt was that its new unit computed: the original
prompt and every token before. So the front end knows what it must have seen, and waits for it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.clock import Clock, monotonic

Standing = Callable[[str], tuple[int, int] | None]
"""Returns a request's prompt tokens and the output tokens that were taken in; None if unknown."""


class EngineOutput(Protocol):
    """What is looked at of vLLM's ``EngineCoreOutput``."""

    request_id: str
    new_token_ids: Sequence[int]
    prefill_stats: Any


class _Held(msgspec.Struct):
    """The outputs of a request's new unit that are early."""

    unit: Unit | None
    after: int
    """Output tokens that come first."""
    outputs: list[Any]
    since: float


class InOrder:
    """Holds outputs back that came before those they follow.

    Args:
        standing: how far requests are.
        clock: monotonic seconds.
    """

    def __init__(self, standing: Standing, clock: Clock = monotonic) -> None:
        self._standing = standing
        self._clock = clock
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, unit: Unit | None, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of one message that are due, and those that had waited for them.

        Args:
            unit: who made them; None: the controller.
            outputs: ``EngineCoreOutput`` of the message, at most one per request.
        """
        if not self._held and all(output.prefill_stats is None for output in outputs):
            return list(outputs)  # nothing has moved: nearly every message of a busy node
        due: list[Any] = []
        for output in outputs:
            due += self._take(unit, output)
        return due

    def drop(self, request_id: str) -> None:
        """Forget the outputs of a request that are held back."""
        self._held.pop(request_id, None)

    def overdue(self, seconds: float) -> list[str]:
        """Return the requests whose missing outputs have not come for so long."""
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
