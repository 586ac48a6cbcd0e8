"""What a V1 model runner knows of requests that come from other units."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from shoal.runtime.engine.link.instructions import Arrival
from shoal.runtime.engine.runner.arrivals import draw, introduce

VOCABULARY = 48


def model_runner(*, fp64: bool = False) -> Any:
    """Return what is used of V1's model runner."""
    batch = InputBatch(
        max_num_reqs=4,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=torch.device("cpu"),
        vocab_size=VOCABULARY,
        block_sizes=[32],
        max_num_blocks_per_req=[2],
    )
    return SimpleNamespace(
        requests={},
        num_prompt_logprobs={},
        uses_mrope=False,
        input_batch=batch,
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        sampler=SimpleNamespace(topk_topp_sampler=TopKTopPSampler(use_fp64_gumbel=fp64)),
    )


def arrival(tokens: list[int], computed: int, **sampling: Any) -> Arrival:
    return Arrival("a", [1, 2, 3], tokens, computed, SamplingParams(**sampling))


def state(tokens: list[int]) -> CachedRequestState:
    return CachedRequestState("a", [1, 2, 3], [], SamplingParams(), None, ([5],), 2, tokens)


# --- generators ---


def sampled(generator: torch.Generator, tokens: int, *, fp64: bool) -> list[int]:
    """Let vLLM's sampler draw tokens for a request in a batch of others."""
    sampler, found = TopKTopPSampler(use_fp64_gumbel=fp64), []
    for _ in range(tokens):
        logits = torch.zeros(3, VOCABULARY)
        tokens_of_all, _ = sampler(logits, {1: generator}, None, None)
        found.append(int(tokens_of_all[1]))
    return found


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2, 9])
def test_a_seeded_request_goes_on_as_without_a_break(tokens: int, fp64: bool) -> None:
    whole = torch.Generator().manual_seed(5)
    expected = sampled(whole, tokens + 6, fp64=fp64)
    runner = model_runner(fp64=fp64)
    introduce(runner, arrival(expected[:tokens], 3, temperature=1.0, seed=5))
    generator = runner.requests["a"].generator
    assert sampled(generator, 6, fp64=fp64) == expected[tokens:]


def test_one_draw_more_or_less_would_be_found() -> None:
    """What the comparison above says of a generator that is not where it has to be."""
    expected = sampled(torch.Generator().manual_seed(5), 12, fp64=False)
    for drawn in (3, 5):
        generator = torch.Generator().manual_seed(5)
        draw(model_runner(), generator, drawn)
        assert sampled(generator, 8, fp64=False) != expected[4:]


def test_nothing_is_drawn_from_the_generators_of_all_requests() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    draw(model_runner(), torch.Generator().manual_seed(5), 7)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0, "seed": 5}])
def test_other_requests_have_no_generator(sampling: dict[str, Any]) -> None:
    runner = model_runner()
    introduce(runner, arrival([7], 3, **sampling))
    assert runner.requests["a"].generator is None


# --- what is known ---


def test_a_request_is_known_with_all_its_tokens() -> None:
    runner = model_runner()
    coming = arrival([7, 8], 4)
    introduce(runner, coming)
    known = runner.requests["a"]
    assert (known.prompt_token_ids, known.output_token_ids) == ([1, 2, 3], [7, 8])
    assert (known.num_tokens, known.num_computed_tokens) == (5, 4)
    known.output_token_ids.append(9)
    assert coming.tokens == [7, 8]


def test_what_was_known_from_before_is_forgotten() -> None:
    """A request may return to a unit in whose latest step it was."""
    runner = model_runner()
    runner.requests["a"] = state([6])
    runner.input_batch.add_request(runner.requests["a"])
    runner.input_batch.prev_req_id_to_index = {"a": 0, "b": 1}
    introduce(runner, arrival([6, 7, 8], 5))
    assert runner.requests["a"].output_token_ids == [6, 7, 8]
    assert runner.input_batch.req_id_to_index == {}
    assert runner.input_batch.prev_req_id_to_index == {"b": 1}


def test_a_latest_token_is_forgotten_of_a_request_without_a_row() -> None:
    runner = model_runner()
    runner.input_batch.prev_req_id_to_index = {"a": 0}
    introduce(runner, arrival([6], 3))
    assert runner.input_batch.prev_req_id_to_index == {}


def test_a_request_that_begins_here_is_left_to_its_first_step() -> None:
    """V1 would take it for a streaming one if it were known."""
    runner = model_runner()
    runner.requests["a"] = state([])
    introduce(runner, arrival([], 0))
    assert runner.requests == {}


def test_v2_model_runners_are_told_by_the_step() -> None:
    introduce(SimpleNamespace(req_states=None), arrival([6], 3))


def test_positions_of_several_dimensions_are_made_anew() -> None:
    """As V1 makes them for a request that is new to it (Qwen2.5-VL)."""
    given: list[Any] = []
    runner = model_runner()
    runner.uses_mrope, runner._init_mrope_positions = True, given.append
    introduce(runner, arrival([6], 3))
    assert given == [runner.requests["a"]]


def test_log_probabilities_of_a_prompt_that_were_sent_elsewhere_are_not_sent_again() -> None:
    """vLLM would send what happens to be in new memory: its part of the prompt is not computed."""
    runner = model_runner()
    runner.num_prompt_logprobs.update(a=2, b=1)
    introduce(runner, arrival([7], 3))
    assert runner.num_prompt_logprobs == {"b": 1}
