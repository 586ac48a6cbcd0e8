"""The LoRA adapters of a step by sequence, in the layout whose model runs.

Before each step vLLM's model runner tells its LoRA manager which adapter each token has
(``LoRAModelRunnerMixin._set_active_loras``). The manager puts these adapters into its model's slots
and the tokens' slots to where that model's layers read them. In a step by sequence the layers of
the base layout's model run, which have slots of their own, on this member's share of the tokens. So
the base's manager is told of that share.
"""

from dataclasses import replace
from typing import Any

from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest

NO_ADAPTER = 0
"""What vLLM's model runners write for a token of a request without an adapter."""


class StepAdapters:
    """Stands in for a TP layout's LoRA manager while a step runs by sequence.

    Args:
        own: the TP layout's manager (vLLM's ``WorkerLoRAManager``).
        base: the manager of the layout whose model runs. Like ``own`` it has read all adapters.
    """

    def __init__(self, own: Any, base: Any) -> None:
        self._own = own
        self._base = base
        self._requests: set[LoRARequest] = set()
        self._mapping = LoRAMapping((), ())

    def __getattr__(self, name: str) -> Any:
        """Answer as the TP layout's manager."""
        return getattr(self._own, name)

    def set_active_adapters(self, requests: set[LoRARequest], mapping: LoRAMapping) -> None:
        """Do as the TP layout's manager, whose head may have adapters, and keep both for the base.

        Args:
            requests: the step's adapters.
            mapping: the number of the adapter of each of the step's tokens.
        """
        self._own.set_active_adapters(requests, mapping)
        self._requests, self._mapping = requests, mapping

    @property
    def kinds(self) -> int:
        """How many kinds of tokens the step may have: one for each adapter, and those without one.

        It is 0 in a step without adapters. Members agree, whatever their shares are.
        """
        return len(self._requests) + 1 if self._requests else 0

    def activate(self, rows: range) -> None:
        """Let the base compute the step's adapters for a member's share.

        Args:
            rows: the share. Those that the step has no tokens for are padding, without an adapter.
        """
        numbers = self._mapping.index_mapping[rows.start : rows.stop]
        padding = (NO_ADAPTER,) * (len(rows) - len(numbers))
        mapping = replace(self._mapping, index_mapping=numbers + padding)
        self._base.set_active_adapters(self._requests, mapping)
