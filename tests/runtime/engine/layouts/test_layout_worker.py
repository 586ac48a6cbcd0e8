"""A layout's worker runs each step in its mode, and tells who answers."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from shoal.policies.values.layouts import Layout, Unit, alone, tensor_parallel
from shoal.runtime.engine.kv.kv_cache import BlockMap, SharedKVBuffer
from shoal.runtime.engine.layouts.layout_worker import LayoutWorker
from shoal.runtime.protocol.messages import Mode


class Stock:
    """vLLM's worker, which computes nothing and says what it was asked for."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def execute_model(self, output: SchedulerOutput) -> None:
        self._log.append(f"zeroes {output.new_block_ids_to_zero}")

    def compile_or_warm_up_model(self) -> None:
        self._log.append("captures")

    def determine_available_memory(self) -> int:
        return 1000


def made(log: list[str], unit: Unit, engine: int, config: Any = Any) -> LayoutWorker:
    communicators: Any = SimpleNamespace(active=nullcontext)
    worker = LayoutWorker(
        unit, config, communicators, SharedKVBuffer("kv"), engine, reserved_bytes=0, agree=int
    )
    stock: Any = Stock(log)
    stock.worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: "model"))
    worker._worker = stock
    return worker


@contextmanager
def noted(log: list[str], name: str) -> Iterator[None]:
    log.append(f"{name} begins")
    yield
    log.append(f"{name} ends")


def step() -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.new_block_ids_to_zero = [1]
    return output


def test_a_step_runs_within_its_modes_execution() -> None:
    log = list[str]()
    worker = made(log, tensor_parallel([0, 1]), 0)
    worker.executions[Mode.SP] = noted(log, "SP")
    worker.execute(step(), Mode.TP)
    assert log == ["zeroes [1]"]
    worker.execute(step(), Mode.SP)
    assert log[1:] == ["SP begins", "zeroes [1]", "SP ends"]


def test_a_mode_that_the_layout_was_not_started_for_is_an_error() -> None:
    log = list[str]()
    with pytest.raises(RuntimeError, match=r"^tp2 was not started to run steps of mode sp$"):
        made(log, tensor_parallel([0, 1]), 0).execute(step(), Mode.SP)
    assert log == []


def test_a_groups_step_names_this_members_blocks() -> None:
    log = list[str]()
    worker = made(log, tensor_parallel([0, 1]), 0)
    worker.block_map = BlockMap()
    worker.block_map.extend([1], [9])
    worker.execute(step())
    assert log == ["zeroes [9]"]


@pytest.mark.parametrize(("asked", "available"), [(None, 1024), (1000, 1000)])
def test_weights_that_other_engines_keep_are_no_memory_of_this_one(
    asked: int | None, available: int
) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=asked))
    worker = made([], alone(0), 0, config)
    worker.borrowed_bytes = 24  # mapped, so vLLM counted them as used
    assert worker.call("determine_available_memory") == available


def test_captures_are_watched_while_vllm_warms_up() -> None:
    log = list[str]()
    worker = made(log, tensor_parallel([0, 1]), 0)
    worker.watch_captures = lambda model: noted(log, f"watching {model}")
    worker.call("compile_or_warm_up_model")
    assert log == ["watching model begins", "captures", "watching model ends"]


@pytest.mark.parametrize(
    ("unit", "answering"),
    [
        pytest.param(tensor_parallel([2, 3]), 2, id="the first member"),
        pytest.param(Unit((4, 5, 6, 7), Layout(tp=2, pp=2)), 6, id="the first of the last stage"),
    ],
)
def test_one_member_answers(unit: Unit, answering: int) -> None:
    assert [e for e in unit.engines if made([], unit, e).answers] == [answering]
