"""Puts the outputs of a moved request in order.

Every engine sends its outputs over its own connection. When a request moves, the first tokens of
its new unit can reach a busy front end before the last tokens of its old unit. The first output of
the new unit says how many tokens the request had when it came there: its prompt and every output
before the move. So the front end knows which tokens it must have received, and waits for them. A
busy front end may even wait for the outputs of several units, if the request has moved on since.
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


class _Early(msgspec.Struct):
    """Outputs of one stay of a request in a unit that came too early."""

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
        self._held: dict[str, list[_Early]] = {}
        """By request: its stays in units, in their order."""

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
        return [name for name, stays in self._held.items() if stays[0].since <= before]

    def _take(self, unit: Unit | None, output: EngineOutput) -> list[Any]:
        standing = self._standing(output.request_id)
        if standing is None:
            self.drop(output.request_id)
            return [output]
        prompt, seen = standing
        stays = self._held.get(output.request_id, [])
        if output.prefill_stats is not None:
            after = output.prefill_stats.num_prompt_tokens - prompt
            if after > seen:
                stays.append(_Early(unit, after, [output], self._clock()))
                stays.sort(key=lambda stay: stay.after)
                self._held[output.request_id] = stays
                return []
        else:
            # Each unit sends in order: if some of its outputs wait, this one comes after them.
            same = next((stay for stay in reversed(stays) if stay.unit == unit), None)
            if same is not None:
                same.outputs.append(output)
                return []
        return self._follow(stays, output, seen)

    def _follow(self, stays: list[_Early], output: EngineOutput, seen: int) -> list[Any]:
        """Return an output that is due, and what has waited for it."""
        due: list[Any] = [output]
        while stays and stays[0].after <= seen + sum(len(each.new_token_ids) for each in due):
            due += stays.pop(0).outputs
        if not stays:
            self.drop(output.request_id)
        return due
