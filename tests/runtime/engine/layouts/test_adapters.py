"""What engines do with LoRA adapters beside serving them: numbers, errors and memory."""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest

from shoal.runtime.config import Adapter, NodeConfig
from shoal.runtime.engine.layouts.adapters import (
    UnreadableAdapter,
    adapter_bytes,
    adapter_requests,
    load_adapters,
)

NODE = NodeConfig(2, 2, "manual", "x", adapters=(Adapter("poet", "/poet"), Adapter("clerk", "/c")))


class Worker:
    """Stands in for a ``LayoutWorker`` that reads adapters, but not the one called ``fails``."""

    def __init__(self, fails: str = "") -> None:
        self.read: list[tuple[int, str, str]] = []
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


def test_slots_are_counted_though_they_are_no_parameters() -> None:
    model, layer = nn.Module(), BaseLayerWithLoRA()
    layer.lora_a_stacked = (torch.zeros(3, 1, 8, 16),)
    layer.lora_b_stacked = (torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, 4, 8))
    layer.base_layer = nn.Linear(16, 8)
    model.layer, model.norm = layer, nn.LayerNorm(4)
    assert adapter_bytes(model) == 4 * 3 * 8 * (16 + 4 + 4)
