"""What engines do with LoRA adapters beside serving them: numbers and errors."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from shoal.runtime.config import Adapter, NodeConfig
from shoal.runtime.engine.layouts.adapters import (
    LAYERS,
    UnreadableAdapter,
    adapter_requests,
    limit_adapters,
    load_adapters,
)

NODE = NodeConfig(2, 2, "manual", "x", adapters=(Adapter("poet", "/poet"), Adapter("clerk", "/c")))


class Worker:
    """Stands in for a ``LayoutWorker`` that reads adapters, but not the one called ``fails``."""

    def __init__(self, fails: str = "") -> None:
        self.read: list[tuple[int, str, str]] = []
        self.config = SimpleNamespace(lora_config=SimpleNamespace(target_modules=None))
        self._fails = fails

    def call(self, method: str, args: tuple[LoRARequest]) -> None:
        assert method == "add_lora"
        (request,) = args
        if request.lora_name == self._fails:
            raise ValueError("LoRA rank 64 is greater than max_lora_rank 16.\nmore")
        self.read.append((request.lora_int_id, request.lora_name, request.lora_path))


def test_a_layout_reads_all_adapters_with_the_numbers_that_front_ends_give_them() -> None:
    worker: Any = Worker()
    load_adapters(NODE, worker)
    assert worker.read == [(1, "poet", "/poet"), (2, "clerk", "/c")]
    assert [each.lora_int_id for each in adapter_requests(NODE)] == [1, 2]


def test_an_adapter_that_cannot_be_read_is_named_in_one_line() -> None:
    worker: Any = Worker(fails="clerk")
    with pytest.raises(UnreadableAdapter) as caught:
        load_adapters(NODE, worker)
    assert str(caught.value) == "adapter clerk: LoRA rank 64 is greater than max_lora_rank 16."


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize(
    ("is_moe", "speculation", "share", "targets"),
    [
        (True, None, 1, [*LAYERS]),
        (False, "ngram", 1, [*LAYERS]),
        (False, None, 2, [*LAYERS]),
        (False, None, 1, None),
    ],
)
def test_routed_experts_heads_of_drafts_and_shared_vocabularies_have_no_slots(
    is_moe: bool, speculation: str | None, share: int, targets: list[str] | None, lora: bool
) -> None:
    adapters = SimpleNamespace(target_modules=None)
    config: Any = SimpleNamespace(
        lora_config=adapters if lora else None,
        model_config=SimpleNamespace(is_moe=is_moe),
        speculative_config=speculation,
    )
    limit_adapters(config, share)
    assert adapters.target_modules == (targets if lora else None)
