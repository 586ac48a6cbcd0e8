from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS

from shoal.server.errors import UserError
from shoal.server.options import vllm_options
from shoal.server.options.serve_options import DEMO_CHECKPOINT
from shoal.server.options.speculation_options import (
    check_speculation,
    check_speculation_and_layouts,
    check_speculation_options,
)
from tests.draft_checkpoint import write_draft
from tests.runtime.engine.prompts import MODELS, make_model

NGRAMS = {"method": "ngram", "num_speculative_tokens": 4}


def draft(**changes: Any) -> Any:
    """Return the configuration of a draft model, with other values of its parts."""
    values: dict[str, Any] = {
        "model": "d",
        "architectures": ["Eagle3LlamaForCausalLM"],
        "quantization": None,
        "get_total_num_kv_heads": lambda: 8,
        "get_head_size": lambda: 128,
    } | changes
    return SimpleNamespace(**values)


def config(**changes: Any) -> Any:
    """Return the configuration of a node that speculates, with other values of its parts."""
    values: dict[str, Any] = {
        "method": "ngram",
        "draft_model_config": draft(),
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": None,
        "model": "m",
        "use_mla": False,
        "is_moe": False,
        "quantization": None,
        "get_total_num_kv_heads": lambda: 8,
        "get_head_size": lambda: 128,
        "hf_text_config": SimpleNamespace(layer_types=["full_attention"] * 3),
        "block_size": 16,
    } | changes
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**values),
        model_config=SimpleNamespace(**values),
        cache_config=SimpleNamespace(**values),
        use_v2_model_runner=values.get("v2", False),
    )


@pytest.mark.parametrize(("method", "v2"), [("ngram", False), ("ngram", True), ("ngram_gpu", True)])
def test_n_grams_are_served(method: str, v2: bool) -> None:
    check_speculation(config(method=method, v2=v2))
    check_speculation(config(method=method, v2=v2, num_speculative_tokens=15))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"method": "ngram_gpu"},
            'method ngram_gpu needs vLLM\'s V2 model runner, and here vLLM uses V1; "method": ',
        ),
        ({"num_speculative_tokens": 16}, "num_speculative_tokens is at most 15 here"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 2)]}, "per_batch_size is not supported"),
        ({"use_mla": True}, "not supported for m: it has latent attention"),
        (
            {"hf_text_config": SimpleNamespace(layer_types=["full_attention", "sliding"])},
            "not supported for m: only some of its layers attend to all tokens",
        ),
    ],
)
def test_other_speculation_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_speculation(config(**changes))
    assert str(caught.value).startswith("--speculative-config: ")
    assert said in str(caught.value)
    check_speculation(
        SimpleNamespace(speculative_config=None, model_config=config(**changes).model_config)
    )


def test_both_names_of_a_kind_of_draft_model_are_served() -> None:
    """VLLM has one class for both, whatever a checkpoint calls itself."""
    names = ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")
    assert _SPECULATIVE_DECODING_MODELS[names[0]] == _SPECULATIVE_DECODING_MODELS[names[1]]
    for name in names:
        model = draft(architectures=[name])
        check_speculation(config(method="eagle3", v2=True, draft_model_config=model))


def test_what_a_checkpoint_brings_with_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"^m: speculative decoding by mtp is not supported$"):
        check_speculation(config(method="mtp"))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"v2": False}, "needs vLLM's V2 model runner, and here vLLM uses V1"),
        (
            {"draft_model_config": draft(architectures=["EagleMistralLarge3ForCausalLM"])},
            "d is a draft model of kind EagleMistralLarge3ForCausalLM: not supported",
        ),
        ({"draft_model_config": draft(quantization="fp8")}, "d is quantised (fp8): not supported"),
        ({"quantization": "fp8"}, "not supported for m, which is quantised (fp8)"),
        ({"is_moe": True}, "not supported for m, which has routed experts"),
        (
            {"draft_model_config": draft(get_head_size=lambda: 64)},
            "d has 8 KV heads of 64 elements and m 8 KV heads of 128 elements: they must",
        ),
    ],
)
def test_draft_models_are_served_as_far_as_they_were_tried(
    method: str, changes: dict[str, Any], said: str
) -> None:
    check_speculation(config(method=method, v2=True))
    with pytest.raises(UserError) as caught:
        check_speculation(config(**{"method": method, "v2": True} | changes))
    assert str(caught.value).startswith("--speculative-config: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, 'method eagle3 needs "model", its draft model'),
        ({"draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size: not supported with"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method: not supported with"),
    ],
)
def test_options_of_draft_models_that_layouts_decide_are_refused(
    given: dict[str, Any], said: str
) -> None:
    asked = {"method": "eagle3", "model": "d", "num_speculative_tokens": 3}
    check_speculation_options(options(speculative_config=asked))
    with pytest.raises(UserError) as caught:
        check_speculation_options(options(speculative_config=asked | given))
    assert said in str(caught.value)


def test_a_node_is_checked_as_it_is_configured() -> None:
    args = AsyncEngineArgs(model=str(DEMO_CHECKPOINT), block_size=16, speculative_config=NGRAMS)
    found = vllm_options.make_vllm_config(args)
    assert found.speculative_config.num_speculative_tokens == 4
    more = {**NGRAMS, "num_speculative_tokens": 16}
    args = AsyncEngineArgs(model=str(DEMO_CHECKPOINT), block_size=16, speculative_config=more)
    with pytest.raises(UserError, match="at most 15 here, as a block of KV has 16 tokens"):
        vllm_options.make_vllm_config(args)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_node_with_a_draft_model_is_checked_as_it_is_configured(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # as where there are GPUs
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    model, spec = make_model("llama", tmp_path), MODELS["llama"]
    for name, heads in (("draft", spec.kv_heads), ("other", spec.kv_heads // 2)):
        write_draft(model, tmp_path / name, replace(spec, kv_heads=heads), method)
    asked = {"method": method, "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}

    def made(**changes: str) -> Any:
        args = AsyncEngineArgs(
            model=str(model), block_size=16, speculative_config={**asked, **changes}
        )
        return vllm_options.make_vllm_config(args)

    assert made().num_lookahead_tokens == 3
    with pytest.raises(UserError, match=r"has 2 KV heads of 32 elements and .* 4 KV heads of 32"):
        made(model=str(tmp_path / "other"))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(UserError, match="needs vLLM's V2 model runner, and here vLLM uses V1"):
        made()


def options(**given: Any) -> Any:
    defaults = {"max_sp": 1, "max_pp": 1, "share_weights": 1}
    return SimpleNamespace(**{"speculative_config": NGRAMS, **defaults, **given})


@pytest.mark.parametrize("found", [{"num_speculative_tokens": 1}, {"method": "draft_model"}])
def test_a_method_must_be_named_and_known(found: dict[str, Any]) -> None:
    check_speculation_options(options())
    check_speculation_options(options(speculative_config=NGRAMS | {"method": "ngram_gpu"}))
    check_speculation_options(options(speculative_config=None))
    served = r'^--speculative-config: .*; "method": "ngram", "ngram_gpu", "eagle", "eagle3" are$'
    with pytest.raises(UserError, match=served):
        check_speculation_options(options(speculative_config=found))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_pp": 2}, "--max-pp 2: it must be 1 with --speculative-config"),
        ({"share_weights": 4}, "--share-weights 4: it must be 1 with --speculative-config"),
    ],
)
def test_what_was_not_tried_beside_it_is_refused(given: dict[str, Any], said: str) -> None:
    check_speculation_and_layouts(options(), 4)
    check_speculation_and_layouts(options(**given, speculative_config=None), 4)
    with pytest.raises(UserError) as caught:
        check_speculation_and_layouts(options(**given), 4)
    assert str(caught.value) == said


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_draft_model_has_sp_if_heads_keep_their_order(method: str) -> None:
    drafted = {"speculative_config": {"method": method}}
    for max_sp, max_group in ((1, 4), (2, 2), (4, 4)):
        check_speculation_and_layouts(options(max_sp=max_sp, **drafted), max_group)
    with pytest.raises(UserError) as caught:
        check_speculation_and_layouts(options(max_sp=2, **drafted), 4)
    assert str(caught.value) == (
        f"--max-sp 2 with groups of 4: not supported with method {method}; use 1 or 4"
    )
    check_speculation_and_layouts(options(max_sp=2), 4)
