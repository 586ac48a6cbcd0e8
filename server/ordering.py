"""The outputs of a moved request, in order.

Every engine pushes its outputs over its own connection. When a request moves, the last tokens of
its old unit and the first of its new one can overtake each other in front of a busy front end. A
moved request's first output says how long the prompt was that its new unit computed: the original
prompt and every token before. So the front end knows what it must have seen, and waits for it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

Standing = Callable[[str], tuple[int, int] | None]
"""Returns a request's prompt tokens and the output tokens that were taken in; None if unknown."""


class EngineOutput(Protocol):
    """What is looked at of vLLM's ``EngineCoreOutput``."""

    request_id: str
    new_token_ids: Sequence[int]
    prefill_stats: Any


class _Held(msgspec.Struct):
    """The outputs of a request's new unit that are early."""

    engine: int
    after: int
    """Output tokens that come first."""
    outputs: list[Any]


class InOrder:
    """Holds outputs back that came before those they follow.

    Args:
        standing: how far requests are.
    """

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, engine: int, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of one message that are due, and those that had waited for them.

        Args:
            engine: leader of the unit that made them.
            outputs: ``EngineCoreOutput`` of the message, at most one per request.
        """
        due: list[Any] = []
        for output in outputs:
            due += self._take(engine, output)
        return due

    def _take(self, engine: int, output: EngineOutput) -> list[Any]:
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
            self._held[output.request_id] = _Held(engine, after, [output])
            return []
        if held.engine == engine:
            held.outputs.append(output)
            return []
        if seen + len(output.new_token_ids) < held.after:
            return [output]
        del self._held[output.request_id]
        return [output, *held.outputs]
