"""What steps by sequence need of the workers of layouts, as far as it takes no members."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from shoal.policies.values.layouts import DP, Layout, layouts_up_to, unit_of
from shoal.runtime.engine.sequence import enabling
from shoal.runtime.engine.sequence.enabling import BySequence, SequenceParallelism
from shoal.runtime.engine.sequence.sequence_plan import SequencePlan
from shoal.runtime.protocol.messages import Mode

TP2 = Layout(tp=2)
CONFIG: Any = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
    compilation_config=SimpleNamespace(
        cudagraph_capture_sizes=[1, 512], cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    ),
)


class Worker:
    """What of a layout's worker is asked for."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.config, self.model = layout, CONFIG, "model"
        self.model_runner = "model runner"
        self.executions: dict[Mode, Any] = {Mode.TP: "as it is"}
        self.watch_captures: Any = "nobody watches"


def expecting(max_sp: int) -> SequenceParallelism:
    """Return what a node of two engines has, before its layouts are made."""
    plan = SequencePlan(layouts_up_to(2), max_sp, sizes_are_chosen=False)
    by_sequence = SequenceParallelism(plan)
    for layout in layouts_up_to(2):
        by_sequence.expect(unit_of(0, layout), CONFIG)
    return by_sequence


def prepared(by_sequence: SequenceParallelism, layout: Layout) -> Any:
    worker: Any = Worker(layout)
    by_sequence.prepare(worker)
    return worker


@pytest.mark.parametrize("own", [{"model": "own"}, {"model": "own", "lora_manager": "own manager"}])
def test_the_model_is_another_while_a_step_runs_by_sequence(own: dict[str, str]) -> None:
    """And so is the LoRA manager, where there is one."""
    runner, adapters = SimpleNamespace(**own), "step's" if "lora_manager" in own else None
    model: Any = SimpleNamespace(adapters=adapters)
    by_sequence = BySequence(runner, model)
    for _ in range(2):
        with by_sequence:
            assert runner.model is model
            assert getattr(runner, "lora_manager", None) is adapters
        assert vars(runner) == own
    with pytest.raises(MemoryError), by_sequence:
        raise MemoryError
    assert vars(runner) == own


def test_graphs_of_a_base_are_captured_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    also: list[tuple[Any, ...]] = []
    monkeypatch.setattr(enabling, "capture_also", lambda *args: also.append(args))
    by_sequence = expecting(2)
    base, group = prepared(by_sequence, DP), prepared(by_sequence, TP2)
    assert also == [("model runner", by_sequence.captures[DP].larger)]
    assert also[0][1][-1] == 1024
    assert base.watch_captures == by_sequence.captures[DP].recorded
    assert group.watch_captures == "nobody watches"


def test_without_sp_workers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enabling, "check_exchangeable", None)
    by_sequence = expecting(1)
    workers = {layout: prepared(by_sequence, layout) for layout in layouts_up_to(2)}
    for worker in workers.values():
        by_sequence.enable(worker, workers)
        assert worker.executions == {Mode.TP: "as it is"}
        assert worker.watch_captures == "nobody watches"


def test_what_cannot_be_exchanged_is_found_with_dps_model(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(
        enabling, "check_exchangeable", lambda *args, reorders: checked.append((*args, reorders))
    )
    expecting(2).enable(Worker(DP), {})  # type: ignore[arg-type]
    assert checked == [(CONFIG, "model", False)]


def test_captures_of_a_layout_that_is_gone_are_let_go() -> None:
    by_sequence = expecting(2)
    by_sequence.forget(TP2)
    assert set(by_sequence.captures) == {DP}


class Communicators:
    """A layout's, on engine 0 of a node of eight; its groups are numbered as they are made."""

    def __init__(self, layout: Layout) -> None:
        self.group, self.place = tuple(range(layout.tp)), 0
        self.process_groups: dict[Any, Any] = {self.group: layout.name}
        self._name = layout.name

    def new_process_group(self, members: tuple[int, ...]) -> str:
        self.process_groups[members] = f"new of {self._name}"
        return self.process_groups[members]


def test_groups_of_members_belong_to_the_layout_that_exchanges_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a layout with stages end with engines that the other layout's unit may lack."""
    layouts = layouts_up_to(8, 2)
    plan = SequencePlan(layouts, 2, sizes_are_chosen=False)
    by_sequence = SequenceParallelism(plan)
    found: dict[str, Any] = {}
    exchange: Any = SimpleNamespace(connect=lambda _: None)
    monkeypatch.setattr(enabling, "check_exchangeable", lambda *_, **__: None)
    monkeypatch.setattr(enabling, "exchanged_layers", lambda *_: {})
    monkeypatch.setattr(enabling, "SequenceParallelModel", lambda *_: None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 8),
        lora_config=None,
        **vars(CONFIG),
    )
    workers: dict[Layout, Any] = {}
    for layout in layouts:
        workers[layout] = worker = Worker(layout)
        by_sequence.expect(unit_of(0, layout), CONFIG)
        worker.config, worker.active = config, None
        worker.communicators = Communicators(layout)
        worker.model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device="cpu")]))
    for layout, worker in workers.items():

        def exchange_in(groups: Any, name: str = layout.name) -> Any:
            found[name] = groups.sp
            return exchange

        monkeypatch.setattr(enabling, "HeadExchange", exchange_in)
        by_sequence.enable(worker, workers)
    assert found == {"tp2": "tp2", "tp4": "new of tp4", "tp8": "new of tp8"}
