"""Requests with rows before their step: a V2 model runner knows what the step would have said."""

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.buffer_utils as cpu_buffers
import vllm.v1.worker.gpu.buffer_utils as buffers
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from shoal.runtime.engine.layouts import seats as seats_module
from shoal.runtime.engine.layouts.introductions import Introductions
from shoal.runtime.engine.link.instructions import Begun, Rest, Seated
from tests.runtime.engine.layouts.test_token_table import Kernel

ROWS, LENGTH, BLOCK, CPU = 4, 64, 4, torch.device("cpu")
PROMPT = [11, 12, 13, 14, 15, 16]
SAMPLING = SamplingParams(temperature=0.5, top_p=0.9, seed=3, min_tokens=2)


class Runner(GPUModelRunner):  # type: ignore[misc]
    """What a V2 model runner keeps of requests. Writes are counted."""

    def __init__(self) -> None:
        self.device = CPU
        self.req_states = RequestState(ROWS, LENGTH, 8, 0, 100, CPU)
        self.block_tables = BlockTables([BLOCK], ROWS, 8, [LENGTH], CPU)
        config = VllmConfig()
        self.sampler = Sampler(config, ROWS, 100, CPU, self.req_states)
        self.prompt_logprobs_worker = PromptLogprobsWorker(ROWS, CPU)
        self.lora_state = LoraState(ROWS)
        self.model_state = SimpleNamespace(
            add_request=lambda *_: None,
            apply_staged_writes=lambda: None,
            remove_request=lambda _: None,
        )
        self.adaptive_verification = self.pooling_runner = self.encoder_cache = None
        self.pp_handler, self.is_last_pp_rank = None, True
        self.writes = 0

    def step(self, scheduled: SchedulerOutput) -> None:
        """Do what ``execute_model`` does first."""
        self.finish_requests(scheduled)
        self.add_requests(scheduled)
        self.update_requests(scheduled)
        self.block_tables.apply_staged_writes()

    def table(self, name: str) -> dict[str, Any]:
        """Return what the device and the host know of a request."""
        states = self.req_states
        row = states.req_id_to_index[name]
        blocks = int(self.block_tables.num_blocks.gpu[0, row])
        return {
            "tokens": states.all_token_ids.gpu[row].tolist(),
            "lengths": [int(each.gpu[row]) for each in (states.prompt_len, states.prefill_len)],
            "total": int(states.total_len.gpu[row]),
            "computed": int(states.num_computed_tokens.gpu[row]),
            "hosts": (states.num_computed_tokens_np[row], states.num_computed_prefill_tokens[row]),
            "longest": states.max_seq_len[row],
            "blocks": self.block_tables.block_tables[0].gpu[row][:blocks].tolist(),
            "seed": self.sampler.sampling_states.seeds.np[row],
            "top_p": self.sampler.sampling_states.top_p.np[row],
        }


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "UvaBuffer", cpu_buffers.UvaBuffer)
    monkeypatch.setattr(buffers, "_apply_write_kernel", Kernel())


def new(name: str, outputs: Sequence[int] = (), blocks: Sequence[int] = ()) -> NewRequestData:
    tokens: Any = array("i", [*PROMPT, *outputs])
    prompt: Any = array("i", PROMPT)
    of_groups = ([*blocks],)
    computed = len(tokens) - 1
    return NewRequestData(
        name, prompt, [], SAMPLING, None, of_groups, computed, None, prefill_token_ids=tokens
    )


def step_of(*begins: NewRequestData) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = list(begins)
    return step


def told(name: str, outputs: Sequence[int], blocks: Sequence[int]) -> Runner:
    """Return a runner that a step tells all of a request."""
    runner = Runner()
    runner.step(step_of(new(name, outputs, blocks)))
    return runner


def seated(
    runner: Runner,
    *names: str,
    first: int = 1,
    again: Introductions | None = None,
    ahead: bool = False,
) -> Introductions:
    """Introduce requests and seat them: with one output, and two blocks each."""
    introductions = again or Introductions()
    for number, name in enumerate(names):
        introductions.add(new(name))
        blocks = [first + 2 * number, first + 1 + 2 * number]
        introductions.seat([Rest(name, array("i", [21]), 6, (blocks,))], runner, ahead=ahead)
    return introductions


def begin(
    introductions: Introductions, runner: Runner, name: str, *others: NewRequestData, more: Any
) -> None:
    """Run the step in which a seated request has two more outputs."""
    step = step_of(*others)
    cached = step.scheduled_cached_reqs
    cached.req_ids, cached.num_computed_tokens = [name], [8]
    cached.new_block_ids, cached.num_output_tokens = [more], [3]
    begun = Begun(seated=Seated([name], [2], [8], array("i", [22, 23])))
    runner.step(introductions.complete(step, begun))


@pytest.mark.parametrize("more", [None, ([9],)])
def test_a_seated_request_is_known_as_if_its_step_had_told_all(more: Any) -> None:
    runner = Runner()
    begin(seated(runner, "r"), runner, "r", more=more)
    whole = told("r", [21, 22, 23], [1, 2] if more is None else [1, 2, 9])
    assert runner.table("r") == whole.table("r")


@pytest.mark.parametrize("more", [None, ([9],)])
def test_what_is_written_ahead_is_known_as_if_its_step_had_told_all(more: Any) -> None:
    runner = Runner()
    begin(seated(runner, "r", "other", ahead=True), runner, "r", more=more)
    whole = told("r", [21, 22, 23], [1, 2] if more is None else [1, 2, 9])
    assert runner.table("r") == whole.table("r")


def test_what_is_written_ahead_is_all_but_what_the_step_says() -> None:
    runner = Runner()
    introductions = seated(runner, "r", ahead=True)
    before, states = runner.table("r"), runner.req_states
    assert before["tokens"][: len(PROMPT) + 1] == [*PROMPT, 21]
    assert before["blocks"] == [1, 2]
    assert not states.all_token_ids._staged_write_indices
    assert not runner.block_tables.block_tables[0]._staged_write_indices
    gone = Begun(forgotten=["r"])
    runner.step(introductions.complete(step_of(), gone))
    runner.step(step_of(new("next", [5], [7, 8])))
    assert runner.table("next") == told("next", [5], [7, 8]).table("next")


@pytest.mark.parametrize("computed", [8, 7, 9])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("more", [None, ([9],)])
def test_a_request_begins_as_its_step_says_whatever_was_foreseen(
    monkeypatch: pytest.MonkeyPatch, computed: int, beside: bool, more: Any
) -> None:
    monkeypatch.setattr(buffers, "_apply_write_kernel", Backwards())
    runner = Runner()
    introductions = seated(runner, "r", "other", ahead=True)
    introductions.foresee({"r": computed, "unknown": 5})
    others = [new("another", [5], [7, 8])] if beside else []
    begin(introductions, runner, "r", *others, more=more)
    whole = told("r", [21, 22, 23], [1, 2] if more is None else [1, 2, 9])
    assert runner.table("r") == whole.table("r")
    if beside:
        assert runner.table("another") == told("another", [5], [7, 8]).table("another")


def test_what_was_foreseen_is_written_before_the_step() -> None:
    runner = Runner()
    introductions = seated(runner, "r", ahead=True)
    introductions.foresee({"r": 8})
    assert (runner.table("r")["total"], runner.table("r")["computed"]) == (9, 8)


def test_a_request_of_which_less_was_foreseen_than_of_others_begins_as_they_do() -> None:
    runner = Runner()
    introductions = seated(runner, "r", "other", ahead=True)
    introductions.foresee({"r": 8})
    step, tokens = step_of(), array("i", [22, 23, 24])
    cached = step.scheduled_cached_reqs
    cached.req_ids, cached.num_computed_tokens = ["r", "other"], [8, 7]
    cached.new_block_ids, cached.num_output_tokens = [None, None], [3, 2]
    begun = Begun(seated=Seated(["r", "other"], [2, 1], [8, 7], tokens))
    runner.step(introductions.complete(step, begun))
    assert runner.table("r") == told("r", [21, 22, 23], [1, 2]).table("r")
    assert runner.table("other") == told("other", [21, 24], [3, 4]).table("other")


def test_nothing_is_foreseen_while_the_layout_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps may be in flight, and the next one writes all at once."""
    monkeypatch.setattr(buffers, "_apply_write_kernel", Backwards())
    runner = Runner()
    introductions = seated(runner, "r")
    introductions.ahead.go_on()
    introductions.foresee({"r": 8})
    assert runner.table("r")["total"] == 0
    begin(introductions, runner, "r", more=None)
    assert runner.table("r") == told("r", [21, 22, 23], [1, 2]).table("r")


def test_what_was_foreseen_is_forgotten_with_the_row() -> None:
    runner = Runner()
    introductions = seated(runner, "r", ahead=True)
    introductions.foresee({"r": 9})
    introductions.add(new("r"))
    seated(runner, "r", first=5, again=introductions, ahead=True)
    begin(introductions, runner, "r", more=None)
    assert runner.table("r") == told("r", [21, 22, 23], [5, 6]).table("r")


def test_a_request_whose_row_was_written_ahead_may_be_seated_again() -> None:
    runner = Runner()
    introductions = seated(runner, "r", ahead=True)
    seated(runner, "r", first=5, again=introductions, ahead=True)
    begin(introductions, runner, "r", more=None)
    assert runner.table("r") == told("r", [21, 22, 23], [5, 6]).table("r")


def test_nothing_is_written_before_the_step_comes_where_the_layout_runs() -> None:
    runner = Runner()
    seated(runner, "r")
    row = runner.req_states.req_id_to_index["r"]
    assert not runner.req_states.all_token_ids.gpu[row].any()
    assert not runner.block_tables.block_tables[0].gpu[row].any()


@pytest.mark.parametrize("beside", [False, True])
def test_a_step_writes_once(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """The model runner has buffers for one write in each step."""
    runner, writes = Runner(), list[int]()
    table = runner.req_states.all_token_ids
    apply = table.apply_write
    monkeypatch.setattr(table, "apply_write", lambda: (writes.append(1), apply()))
    introductions = seated(runner, "r")
    others = [new("other", [5], [7, 8])] if beside else []
    begin(introductions, runner, "r", *others, more=None)
    assert len(writes) == 1
    assert runner.table("r") == told("r", [21, 22, 23], [1, 2]).table("r")
    if beside:
        assert runner.table("other") == told("other", [5], [7, 8]).table("other")


def test_what_is_staged_twice_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write in any order: where a number is staged twice, the first may come last."""
    monkeypatch.setattr(buffers, "_apply_write_kernel", Backwards())
    monkeypatch.setattr(seats_module, "_unstage", lambda _: None)
    runner = Runner()
    begin(seated(runner, "r"), runner, "r", more=None)
    assert runner.table("r") != told("r", [21, 22, 23], [1, 2]).table("r")


def test_the_order_of_writes_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_apply_write_kernel", Backwards())
    runner = Runner()
    begin(seated(runner, "r"), runner, "r", more=([9],))
    assert runner.table("r") == told("r", [21, 22, 23], [1, 2, 9]).table("r")


class Backwards(Kernel):
    """Writes the last first."""

    @staticmethod
    def _write(
        table: Any, _: int, rows: Any, starts: Any, contents: Any, ends: Any, *__: Any, **___: Any
    ) -> None:
        if table.dim() == 1:
            table = table[:, None]
        begins = [0, *ends.tolist()[:-1]]
        writes = list(zip(rows.tolist(), starts.tolist(), begins, ends.tolist(), strict=True))
        for row, start, begin, end in reversed(writes):
            table[row, start : start + end - begin] = contents[begin:end]


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_request_that_does_not_begin_leaves_its_row(forgotten: bool) -> None:
    runner = Runner()
    introductions = seated(runner, "r", "gone")
    gone = Begun(forgotten=["gone"]) if forgotten else Begun(unseated=["gone"])
    runner.step(introductions.complete(step_of(), gone))
    assert "gone" not in runner.req_states.req_id_to_index
    # Its row is the next one that is given away.
    runner.step(step_of(new("next", [5], [7, 8])))
    assert runner.table("next") == told("next", [5], [7, 8]).table("next")
    begin(introductions, runner, "r", more=None)
    assert runner.table("r") == told("r", [21, 22, 23], [1, 2]).table("r")


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_was_seated_in_vain_begins_as_others_do(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """It has got other blocks since; it may have been expected again."""
    monkeypatch.setattr(buffers, "_apply_write_kernel", Backwards())
    runner = Runner()
    introductions = seated(runner, "r")
    if again:
        introductions.add(new("r"))
    tokens = [22, 23] if not again else [21, 22, 23]
    begun = Begun(requests=[Rest("r", array("i", tokens), 8, ([5, 6],))])
    runner.step(introductions.complete(step_of(), begun))
    assert runner.table("r") == told("r", [21, 22, 23], [5, 6]).table("r")


def test_a_request_may_be_seated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_apply_write_kernel", Backwards())
    runner = Runner()
    introductions = seated(runner, "r")
    seated(runner, "r", first=5, again=introductions)
    begin(introductions, runner, "r", more=None)
    assert runner.table("r") == told("r", [21, 22, 23], [5, 6]).table("r")


def test_members_draw_the_same_seed_for_a_request_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do so before they are bound, when their generators are in different states."""
    monkeypatch.setattr(SAMPLING, "seed", None)
    seeds, drawn = list[dict[str, int]](), list[int]()
    for member in range(2):
        np.random.seed(member)
        undisturbed = np.random.RandomState(member).randint(1 << 30)
        runner = Runner()
        seated(runner, "r", "other")
        drawn.append(np.random.randint(1 << 30))
        assert drawn[-1] == undisturbed, "the layout's own numbers"
        seeds.append({name: runner.table(name)["seed"] for name in ("r", "other")})
    assert drawn[0] != drawn[1]
    assert seeds[0] == seeds[1]
    assert seeds[0]["r"] != seeds[0]["other"]
