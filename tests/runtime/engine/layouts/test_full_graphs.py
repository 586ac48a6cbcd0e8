"""Full graphs of steps with prompts: which are captured, and which steps replay them.

vLLM's own manager of the V2 model runner captures and dispatches. Only the graphs are simulated.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from shoal.runtime.config import FULL_GRAPH_TOKENS
from shoal.runtime.engine.agent.full_graph_steps import LONGEST_CONTEXT, MOST_REQUESTS
from shoal.runtime.engine.layouts.full_graphs import (
    FullGraphs,
    add_full_graphs,
)
from shoal.runtime.engine.sequence.capture_sizes import capture_also
from shoal.runtime.protocol.messages import Mode
from tests.runtime.engine.layouts.simulated_graphs import (
    Other,
    Runner,
    dispatched,
    flash_attention_3,
    runner_of,
    simulate,
)
from tests.runtime.engine.sequence.test_capture_sizes import LARGER, OWN_SIZES

OWN_MIXED = [size for size in OWN_SIZES if size % 16 == 0]
MIXED = [*OWN_MIXED, *range(576, 1025, 64)]


def step(
    requests: int, tokens: int, context: int = 0, *, mode: Mode = Mode.TP
) -> tuple[SimpleNamespace, Mode]:
    """Return a step: so many requests, of which one computes a prompt with the other tokens."""
    scheduled = dict.fromkeys(map(str, range(1, requests)), 1)
    scheduled["0"] = tokens - (requests - 1)
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[context] * (requests - 1)),
    )
    return output, mode


# --- which steps ---


@pytest.mark.parametrize(
    ("judged", "allowed"),
    [
        pytest.param(step(1, 300), True, id="a prompt alone"),
        pytest.param(step(20, 300), True, id="beside decodes"),
        pytest.param(step(20, FULL_GRAPH_TOKENS), True, id="longest"),
        pytest.param(step(20, FULL_GRAPH_TOKENS + 1), False, id="too long"),
        pytest.param(step(20, 20), False, id="nothing but decodes"),
        pytest.param(step(MOST_REQUESTS, 700), True, id="most requests"),
        pytest.param(step(MOST_REQUESTS + 1, 700), False, id="too many requests"),
        pytest.param(step(20, 300, LONGEST_CONTEXT), True, id="longest context"),
        pytest.param(step(20, 300, LONGEST_CONTEXT + 1), False, id="too long a context"),
        pytest.param(step(20, 300, mode=Mode.SP), False, id="by sequence"),
    ],
)
def test_steps_with_short_prompts_and_contexts_may_replay_one(
    judged: tuple[SimpleNamespace, Mode], allowed: bool
) -> None:
    graphs = FullGraphs(MIXED)
    graphs.largest = max(MIXED)
    graphs.expect(*judged)
    assert graphs.allowed is allowed


def test_none_may_where_none_was_captured() -> None:
    graphs = FullGraphs(MIXED)
    graphs.expect(*step(20, 300))
    assert not graphs.allowed


# --- capture and dispatch by vLLM's manager ---


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    return simulate(monkeypatch)


def captured_runner(larger: list[int] | None = None) -> tuple[Runner, FullGraphs]:
    runner = runner_of()
    if larger:
        capture_also(runner, larger)
    graphs = add_full_graphs(runner, FULL_GRAPH_TOKENS, chosen=False)
    assert graphs is not None
    runner.initialize_kv_cache()
    runner.capture_model()
    return runner, graphs


@pytest.mark.parametrize("larger", [None, LARGER])
def test_all_graphs_are_captured_beside_vllms_own(
    prepared: list[Any], larger: list[int] | None
) -> None:
    """Also where steps by sequence have larger graphs, of which the first capture is one."""
    runner, graphs = captured_runner(larger)
    mixed = [desc for desc in runner.cudagraph_manager.graphs if desc.uniform_token_count is None]
    decodes = [desc for desc in runner.cudagraph_manager.graphs if desc.uniform_token_count == 1]
    assert [desc.num_tokens for desc in mixed] == MIXED[::-1]
    assert [desc.num_tokens for desc in decodes] == OWN_SIZES[::-1]
    assert graphs.largest == FULL_GRAPH_TOKENS
    assert len(runner.cudagraph_manager.hidden_states) == max([FULL_GRAPH_TOKENS, *(larger or [])])


@pytest.mark.usefixtures("prepared")
def test_a_step_replays_the_smallest_that_holds_it() -> None:
    runner, graphs = captured_runner()
    for requests, tokens, size in [(1, 2, 16), (20, 300, 304), (70, 530, 576), (512, 1000, 1024)]:
        graphs.expect(*step(requests, tokens))
        found = dispatched(runner, requests, tokens)
        assert (found.cg_mode, found.num_tokens) == (CUDAGraphMode.FULL, size)
        assert found.num_reqs >= requests


@pytest.mark.usefixtures("prepared")
def test_other_steps_find_what_they_found() -> None:
    runner, graphs = captured_runner()
    graphs.expect(*step(20, 300, LONGEST_CONTEXT + 1))
    assert dispatched(runner, 20, 300).cg_mode is CUDAGraphMode.PIECEWISE
    graphs.expect(*step(20, 20))
    assert dispatched(runner, 20, 20, uniform=1).uniform_token_count == 1
    graphs.expect(*step(MOST_REQUESTS + 1, 600))
    assert dispatched(runner, MOST_REQUESTS + 1, 600).cg_mode is CUDAGraphMode.NONE
    graphs.expect(*step(20, 300))
    assert dispatched(runner, 20, 300).cg_mode is CUDAGraphMode.FULL
    # vLLM's dummy steps are not judged before.
    assert dispatched(runner, 20, 300).cg_mode is CUDAGraphMode.PIECEWISE


def test_only_attention_of_steps_with_prompts_is_not_split(prepared: list[Any]) -> None:
    """A graph of 1,024 tokens has one split, which vLLM would leave to a heuristic above 512."""
    runner, graphs = captured_runner()
    assert {(tokens, 1, tokens) for tokens in MIXED} <= set(prepared)
    assert {(tokens, 32, 512) for tokens in OWN_SIZES} <= set(prepared)
    (builder,) = runner.attn_groups[0][0].metadata_builders
    prepared.clear()
    for context, expected in ((0, (300, 1, 300)), (LONGEST_CONTEXT + 1, (300, 32, 512))):
        graphs.expect(*step(20, 300, context))
        dispatched(runner, 20, 300)
        builder.build(0, SimpleNamespace(num_actual_tokens=300))
        assert prepared.pop() == expected


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    "builders",
    [
        pytest.param([flash_attention_3(), flash_attention_3()], id="two kinds of layers"),
        pytest.param([Other()], id="another backend"),
        pytest.param([flash_attention_3(aot_schedule=False)], id="an older version"),
        pytest.param([], id="no attention"),
    ],
)
def test_other_attention_is_left_alone(builders: list[Any]) -> None:
    runner = runner_of(builders=builders)
    graphs = add_full_graphs(runner, FULL_GRAPH_TOKENS, chosen=False)
    assert graphs is not None
    runner.initialize_kv_cache()
    classes = [type(builder) for builder in builders]
    assert runner.capture_model() == len(OWN_SIZES)
    assert [type(builder) for builder in builders] == classes
    graphs.expect(*step(20, 300))
    assert dispatched(runner, 20, 300).cg_mode is CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize(
    "mode",
    [
        CUDAGraphMode.PIECEWISE,
        CUDAGraphMode.FULL,
        CUDAGraphMode.FULL_DECODE_ONLY,
        CUDAGraphMode.NONE,
    ],
)
def test_other_modes_of_graphs_are_left_alone(mode: CUDAGraphMode) -> None:
    assert add_full_graphs(runner_of(mode), FULL_GRAPH_TOKENS, chosen=False) is None


@pytest.mark.parametrize(
    "field", ["supports_multimodal_inputs", "is_encoder_decoder", "enable_prompt_embeds"]
)
def test_models_with_other_inputs_are_left_alone(field: str) -> None:
    runner = runner_of()
    setattr(runner.vllm_config.model_config, field, True)
    assert add_full_graphs(runner, FULL_GRAPH_TOKENS, chosen=False) is None


def test_nobody_has_to_have_them() -> None:
    assert add_full_graphs(runner_of(), 0, chosen=False) is None
    assert add_full_graphs(runner_of(), 0, chosen=True) is None


def test_they_reach_up_to_the_longest_steps() -> None:
    runner = runner_of()
    runner.vllm_config.scheduler_config.max_num_batched_tokens = 600
    graphs = add_full_graphs(runner, 2048, chosen=False)
    assert graphs is not None
    assert graphs.sizes[-1] == 576


def test_chosen_sizes_that_are_too_large_are_left_alone() -> None:
    runner = runner_of()
    runner.vllm_config.compilation_config.cudagraph_capture_sizes = [2048]
    assert add_full_graphs(runner, FULL_GRAPH_TOKENS, chosen=True) is None
    assert add_full_graphs(runner_of(), FULL_GRAPH_TOKENS, chosen=True) is not None


def test_the_v1_model_runner_is_left_alone() -> None:
    runner = runner_of()
    runner.cudagraph_dispatcher = object()  # type: ignore[attr-defined]
    assert add_full_graphs(runner, FULL_GRAPH_TOKENS, chosen=False) is None


@pytest.mark.parametrize("field", ["lora_config", "speculative_config"])
def test_adapters_and_drafts_have_none(field: str) -> None:
    runner = runner_of()
    setattr(runner.vllm_config, field, object())
    assert add_full_graphs(runner, FULL_GRAPH_TOKENS, chosen=False) is None
