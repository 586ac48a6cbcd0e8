"""What a V2 model runner writes to its table of tokens, from arrays and from lists."""

from array import array
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.cpu.buffer_utils as cpu_buffers
import vllm.v1.worker.gpu.buffer_utils as buffers
from vllm.v1.worker.gpu.states import RequestState

from shoal.runtime.engine.layouts.token_table import take_arrays

LENGTH = 16


class Kernel:
    """vLLM's kernel that writes to a table, in Python."""

    def __getitem__(self, _grid: object) -> Any:
        return self._write

    @staticmethod
    def _write(
        table: Any, _: int, rows: Any, starts: Any, contents: Any, ends: Any, *__: Any, **___: Any
    ) -> None:
        if table.dim() == 1:
            table = table[:, None]
        begin = 0
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            table[row, start : start + end - begin] = contents[begin:end]
            begin = end


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RequestState]:
    monkeypatch.setattr(buffers, "UvaBuffer", cpu_buffers.UvaBuffer)
    monkeypatch.setattr(buffers, "_apply_write_kernel", Kernel())
    return partial(RequestState, 4, LENGTH, 8, 0, 100, torch.device("cpu"))


@pytest.fixture
def states(make: Callable[..., RequestState]) -> RequestState:
    return make()


def row(states: RequestState, name: str) -> list[int]:
    tokens: list[int] = states.all_token_ids.gpu[states.req_id_to_index[name]].tolist()
    return tokens[: tokens.index(0)]


@pytest.mark.parametrize("taken", [False, True])
def test_tokens_are_written_where_they_belong(states: RequestState, taken: bool) -> None:
    if taken:
        take_arrays(SimpleNamespace(req_states=states))
    states.add_request("a", 2, array("i", [7, 8, 9]), 0, max_tokens=5)
    states.add_request("b", 2, [5, 6], 0, max_tokens=5)
    states.apply_staged_writes()
    states.add_request("c", 1, array("i", [3]), 0, max_tokens=5)
    states.apply_staged_writes()
    assert [row(states, name) for name in "abc"] == [[7, 8, 9], [5, 6], [3]]


def test_arrays_are_not_unpacked(states: RequestState) -> None:
    states.add_request("before", 2, array("i", [7, 8]), 0, max_tokens=5)
    with pytest.raises(TypeError, match="bytes-like"):
        memoryview(states.all_token_ids._staged_write_contents)  # vLLM's own is a list
    states.apply_staged_writes()
    take_arrays(SimpleNamespace(req_states=states))
    states.add_request("after", 2, array("i", [7, 8]), 0, max_tokens=5)
    assert memoryview(states.all_token_ids._staged_write_contents).tolist() == [7, 8]


def test_a_table_of_the_device_stays_as_it_is(make: Callable[..., RequestState]) -> None:
    states = make(use_dense_all_token_ids=True)
    take_arrays(SimpleNamespace(req_states=states))
    assert type(states.all_token_ids._staged_write_contents) is list


def test_v1_model_runners_have_no_table() -> None:
    take_arrays(SimpleNamespace(requests={}))
