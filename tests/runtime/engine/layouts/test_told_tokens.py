"""The tokens that a scheduler tells the first stages of a pipeline."""

import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.gpu.model_runner as v2_runner
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.worker.gpu.pp_utils import PPHandler

from shoal.runtime.engine.layouts.told_tokens import ToldTokens, in_stages

OF_DRAFTS = {"broadcast_drafts", "configure_aux_hidden_state_relay"}
"""What vLLM calls where it speculates alone."""


def running(**requests: tuple[int, list[int]]) -> CachedRequestData:
    """Return a step's requests: how many tokens each has computed, and which it computes next."""
    return CachedRequestData(
        req_ids=list(requests),
        resumed_req_ids=set(),
        new_token_ids=[tokens for _, tokens in requests.values()],
        all_token_ids={},
        new_block_ids=[None] * len(requests),
        num_computed_tokens=[computed for computed, _ in requests.values()],
        num_output_tokens=[0] * len(requests),
    )


def runner(*, is_last: bool = False, **rows: tuple[int, int]) -> Any:
    """Return a model runner with the row of each request, and the tokens that it began with."""
    lengths = np.zeros(8, dtype=np.int32)
    for row, length in rows.values():
        lengths[row] = length
    indices = {name: row for name, (row, _) in rows.items()}
    states = SimpleNamespace(req_id_to_index=indices, prefill_len=SimpleNamespace(np=lengths))
    return SimpleNamespace(is_last_pp_rank=is_last, req_states=states)


@pytest.fixture
def told() -> ToldTokens:
    return ToldTokens(max_num_reqs=8, num_speculative_steps=0, device=torch.device("cpu"))


def test_rows_get_the_tokens_that_were_sampled(told: ToldTokens) -> None:
    """Not those of a prompt, which the rows have: its next chunk, or the end of a carried one."""
    step = running(first=(6, [70]), chunk=(4, [1, 2, 3]), carried=(8, [9]), later=(12, [80]))
    told.tell(step, runner(first=(5, 6), chunk=(0, 9), carried=(3, 9), later=(2, 10)))
    found = told.get_prev_sampled_outputs()
    assert found is not None
    assert {name: values.tolist() for name, values in found.items()} == {
        "idx_mapping": [5, 2],
        "sampled_tokens": [[70], [80]],
        "num_sampled": [1, 1],
        "num_rejected": [0, 0],
    }
    wanted = inspect.signature(v2_runner.GPUModelRunner.postprocess_sampled).parameters
    assert found.keys() <= wanted.keys()
    assert told.get_prev_sampled_outputs() is None, "each once"


def test_a_last_stage_is_told_nothing(told: ToldTokens) -> None:
    told.tell(running(first=(6, [70])), runner(is_last=True, first=(5, 6)))
    assert told.get_prev_sampled_outputs() is None


@pytest.mark.parametrize(("is_last", "warmed"), [(False, [[-1]]), (True, [])])
def test_a_warm_up_writes_to_no_row(told: ToldTokens, is_last: bool, warmed: list[Any]) -> None:
    model_runner, seen = runner(is_last=is_last), []
    model_runner.postprocess_sampled = lambda **outputs: seen.append(outputs["idx_mapping"])
    told.warm_up(model_runner)
    assert [rows.tolist() for rows in seen] == warmed


def test_more_than_one_token_is_no_step_of_a_pipeline(told: ToldTokens) -> None:
    with pytest.raises(ValueError, match="too many values"):
        told.tell(running(first=(6, [70, 71])), runner(first=(5, 6)))


def test_it_has_what_vllms_model_runner_calls() -> None:
    source = inspect.getsource(v2_runner.GPUModelRunner)
    called = set(re.findall(r"self\.pp_handler\.(\w+)\(", source)) - OF_DRAFTS
    assert len(called) >= 5, "the model runner calls it in another way now"
    for name in ["__init__", *sorted(called)]:
        theirs = inspect.signature(getattr(PPHandler, name)).parameters
        ours = inspect.signature(getattr(ToldTokens, name))
        ours.bind(*theirs)  # as many arguments
        ours.bind(*[name for name, each in theirs.items() if each.default is inspect._empty])


@pytest.mark.parametrize(
    ("stages", "v2", "replaced"), [(2, True, True), (1, True, False), (2, False, False)]
)
def test_only_stages_have_it(stages: int, v2: bool, replaced: bool) -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages), use_v2_model_runner=v2
    )
    with in_stages(config):
        assert (v2_runner.PPHandler is ToldTokens) == replaced
    assert v2_runner.PPHandler is PPHandler
