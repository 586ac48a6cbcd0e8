import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config.cache import CacheDType
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.transformers_utils.config import get_config, get_hf_text_config

from shoal.runtime.served_kv import KV_TYPES
from shoal.runtime.served_weights import REPACKED_QUANTISATIONS
from shoal.server.errors import UserError
from shoal.server.options import unsupported_models, vllm_options
from shoal.server.options.unsupported_models import (
    check_experts,
    check_kv_groups,
    check_kv_type,
    check_model_config,
    check_quantisation,
    check_repacked,
    check_stages,
)
from tests.random_checkpoint import CheckpointSpec, model_config, write_checkpoint
from tests.server.node import ServedNode, run_shoal

SUPPORTED: dict[str, Any] = {
    "model": "m",
    "runner_type": "generate",
    "is_encoder_decoder": False,
    "is_moe": False,
    "is_hybrid": False,
    "is_attention_free": False,
    "use_mla": False,
    "hf_text_config": SimpleNamespace(),
    "quantization": None,
}


@pytest.mark.parametrize(
    "quantization",
    [None, "fp8", "compressed-tensors", "fp8_per_block", *sorted(REPACKED_QUANTISATIONS)],
)
def test_a_plain_model_is_supported(quantization: str | None) -> None:
    check_model_config(SimpleNamespace(**SUPPORTED | {"quantization": quantization}))


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ({"runner_type": "pooling"}, "pooling"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_hybrid": True}, "state-space"),
        ({"is_attention_free": True}, "state-space"),
        ({"use_mla": True, "quantization": "fp8"}, r"\(MLA\), quantised \(fp8\)"),
        ({"use_mla": True, "hf_text_config": SimpleNamespace(index_topk=2048)}, "MLA.*sparse"),
        ({"use_mla": True, "hf_text_config": SimpleNamespace(compress_ratios=[])}, "MLA.*sparse"),
        ({"quantization": "mxfp4"}, "mxfp4"),
        ({"quantization": "modelopt_fp4"}, "modelopt_fp4"),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(kind: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_model_config(SimpleNamespace(**SUPPORTED | kind))


def test_a_model_with_latent_attention_is_supported() -> None:
    check_model_config(SimpleNamespace(**SUPPORTED | {"use_mla": True}))


@pytest.mark.parametrize("quantization", [None, "fp8", "fp8_per_block", "gpt_oss_mxfp4"])
def test_a_model_with_experts_is_supported(quantization: str | None) -> None:
    check_model_config(
        SimpleNamespace(**SUPPORTED | {"is_moe": True, "quantization": quantization})
    )


def with_experts(backend: str, quantization: str | None = None, *, is_moe: bool = True) -> Any:
    return SimpleNamespace(
        kernel_config=SimpleNamespace(moe_backend=backend),
        model_config=SimpleNamespace(is_moe=is_moe, quantization=quantization),
    )


@pytest.mark.parametrize("backend", ["auto", "triton", "flashinfer_cutlass"])
@pytest.mark.parametrize("is_moe", [False, True])
def test_another_kernel_for_experts_is_refused_where_there_are_some(
    backend: str, is_moe: bool
) -> None:
    config = with_experts(backend, is_moe=is_moe)
    if not is_moe or backend != "flashinfer_cutlass":
        check_experts(config)
        return
    with pytest.raises(UserError, match=r"^--moe-backend flashinfer_cutlass: not supported; "):
        check_experts(config)


@pytest.mark.parametrize("quantization", [None, "fp8", "gpt_oss_mxfp4"])
@pytest.mark.parametrize("backend", ["marlin", "flashinfer_trtllm"])
def test_kernels_that_pack_experts_one_by_one_are_for_those_that_vllm_packs(
    quantization: str | None, backend: str
) -> None:
    config = with_experts(backend, quantization)
    if quantization == "gpt_oss_mxfp4":
        check_experts(config)
        return
    with pytest.raises(UserError, match=r"weights, which only triton reads in place$"):
        check_experts(config)


def test_other_kernels_for_packed_experts_are_refused() -> None:
    with pytest.raises(UserError, match="which only triton or marlin or flashinfer_trtllm reads"):
        check_experts(with_experts("humming", "gpt_oss_mxfp4"))


@pytest.mark.parametrize("chosen", get_args(CacheDType))
def test_a_kv_cache_that_cannot_go_to_other_layouts_is_refused_by_name(chosen: str) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=chosen))
    if chosen in KV_TYPES:
        check_kv_type(config)
        return
    with pytest.raises(UserError, match=rf"^--kv-cache-dtype {chosen}: not supported; "):
        check_kv_type(config)


def test_the_type_is_checked_as_a_node_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    args = AsyncEngineArgs(model=str(tmp_path), kv_cache_dtype="int8_per_token_head")
    with pytest.raises(UserError, match=r"^--kv-cache-dtype int8_per_token_head"):
        vllm_options.make_vllm_config(args)


@pytest.mark.parametrize("kind", ["is_hybrid", "is_attention_free"])
def test_layers_are_refused_for_want_of_a_rule_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported_models, "WITHOUT_RULE", frozenset())
    check_model_config(SimpleNamespace(**SUPPORTED | {kind: True}))


# --- groups of KV blocks ---

SHAPE = model_config(CheckpointSpec(layers=6)) | {"dtype": "bfloat16"}
WINDOW: dict[str, Any] = {"sliding_window": 512}
SLIDING, FULL = "sliding_attention", "full_attention"


def family(name: str, architecture: str, **more: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a model of another family."""
    return SHAPE | {"model_type": name, "architectures": [architecture]} | more


GEMMA_2 = family("gemma2", "Gemma2ForCausalLM", **WINDOW)
CHUNKED = family(
    *("mistral", "MistralForCausalLM"),
    attention_chunk_size=512,
    layer_types=["chunked_attention", FULL, FULL] * 2,
)
SERVED = {
    "llama": SHAPE,
    "qwen2": family("qwen2", "Qwen2ForCausalLM"),
    "mistral-all-layers": family("mistral", "MistralForCausalLM", **WINDOW),
    "gemma-2": GEMMA_2,
    "gemma-3": family("gemma3_text", "Gemma3ForCausalLM", **WINDOW),
    "mistral-some-layers": family(
        "mistral", "MistralForCausalLM", **WINDOW, layer_types=[SLIDING, FULL, FULL] * 2
    ),
    "window-by-layer": family(
        "mistral", "MistralForCausalLM", interleaved_sliding_window=[None, 512, 512] * 2
    ),
}


def configured(path: Path, config: dict[str, Any], *, one_group: bool = False) -> Any:
    """Return what is read of vLLM's ``VllmConfig`` for a model with this ``config.json``."""
    (path / "config.json").write_text(json.dumps(config))
    text = get_hf_text_config(get_config(str(path), trust_remote_code=False))
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=one_group),
        model_config=SimpleNamespace(model="m", hf_text_config=text),
    )


def test_a_model_in_which_some_layers_attend_to_chunks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_kv_groups(configured(tmp_path, CHUNKED))
    assert str(caught.value) == (
        "m is a model in which only some layers attend to chunks of 512 tokens: not supported; "
        "with --disable-hybrid-kv-cache-manager it is"
    )
    check_kv_groups(configured(tmp_path, CHUNKED, one_group=True))


@pytest.mark.parametrize("config", SERVED.values(), ids=SERVED)
def test_a_model_whose_groups_of_kv_blocks_can_be_served_is(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    check_kv_groups(configured(tmp_path, config))


def staged(layers: int = 6, *, supported: bool = True, latent: bool = False, **text: Any) -> Any:
    """Return what is read of vLLM's ``VllmConfig`` for pipelines."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(
            model="m",
            architecture="MForCausalLM",
            is_pp_supported=supported,
            use_mla=latent,
            get_total_num_hidden_layers=lambda: layers,
            hf_text_config=SimpleNamespace(**text),
        ),
    )


@pytest.mark.parametrize(
    ("max_pp", "config", "message"),
    [
        (4, staged(), "--max-pp 4: the model's 6 layers make no 4 equal stages"),
        (2, staged(supported=False), "--max-pp 2: vLLM runs MForCausalLM in one stage only"),
        (2, staged(latent=True), "--max-pp 2: m has latent attention"),
        (2, staged(layer_types=[SLIDING, FULL]), "only some layers of m attend to all tokens"),
    ],
)
def test_a_model_that_cannot_be_divided_into_stages_is_refused(
    max_pp: int, config: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_stages(max_pp, config)
    check_stages(1, config)
    check_stages(2, staged(layer_types=[FULL] * 6))


def repacked(
    quantization: str | None = "auto_gptq", load_format: str = "auto", *, is_moe: bool = False
) -> Any:
    """Return the configuration of a model whose weights vLLM repacks."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model="m", quantization=quantization, is_moe=is_moe),
        load_config=SimpleNamespace(load_format=load_format),
        quant_config=None,
    )


@pytest.mark.parametrize(
    ("config", "limits", "message"),
    [
        (repacked(), (4, 1, 2), "--max-pp 2: not supported for m, which is quantised"),
        (repacked(), (4, 2, 1), "--max-sp 2 with groups of 4: not supported"),
        (repacked(load_format="sharded_state"), (2, 1, 1), "--load-format sharded_state: not"),
    ],
)
def test_layouts_that_cannot_load_a_shard_of_their_own_are_refused(
    config: Any, limits: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_repacked(config, *limits)
    config.model_config.quantization = "fp8"
    check_repacked(config, *limits)


@pytest.mark.parametrize("quantization", ["auto_gptq", "auto_awq", "awq", "fp8"])
def test_experts_are_not_repacked(quantization: str) -> None:
    check_quantisation(repacked(quantization))
    config = repacked(quantization, is_moe=True)
    if quantization == "fp8":
        check_quantisation(config)
        return
    with pytest.raises(UserError) as caught:
        check_quantisation(config)
    assert str(caught.value) == (
        f"m is a mixture-of-experts model, quantised ({quantization}) in a form that vLLM repacks: "
        "not supported"
    )


@pytest.mark.parametrize("max_sp", [1, 4])
def test_a_model_that_is_repacked_is_served_alone_and_in_groups(max_sp: int) -> None:
    check_repacked(repacked(), 4, max_sp, 1)


def test_the_groups_are_checked_as_a_node_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CHUNKED))
    with pytest.raises(UserError, match="chunks of 512 tokens"):
        vllm_options.make_vllm_config(AsyncEngineArgs(model=str(tmp_path)))
    one = AsyncEngineArgs(model=str(tmp_path), disable_hybrid_kv_cache_manager=True)
    vllm_options.make_vllm_config(one)


# --- compressed-tensors ---

Arguments = Mapping[str, Any]
"""How one tensor is quantised, as compressed-tensors writes it."""

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
OF_128 = {"dynamic": True, "strategy": "group", "group_size": 128}
TOKEN = {"dynamic": True, "strategy": "token"}
CHANNEL = {"strategy": "channel"}
TENSOR = {"strategy": "tensor"}
HADAMARD = {
    "config_groups": {
        "all": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}
    }
}


def layers(weights: Arguments, activations: Arguments | None, target: str = "Linear") -> Any:
    return {"targets": [target], "weights": weights, "input_activations": activations}


def checkpoint(path: Path, *groups: Any, form: str = "float-quantized", **more: Any) -> Path:
    """Write the configuration of a checkpoint whose groups of layers are quantised like this."""
    config = model_config(CheckpointSpec(layers=1)) | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "ignore": ["lm_head"],
            "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
            **more,
        },
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(layers(FP8 | CHANNEL, FP8 | TOKEN), id="channel"),
        pytest.param(layers(FP8 | TENSOR, FP8 | TENSOR), id="tensor-static"),
        pytest.param(layers(FP8 | BLOCK, FP8 | OF_128), id="block"),
    ],
)
def test_fp8_is_supported(tmp_path: Path, group: Any) -> None:
    config = vllm_options.make_vllm_config(AsyncEngineArgs(model=str(checkpoint(tmp_path, group))))
    assert config.quant_config.target_scheme_map.keys() == {"Linear"}


@pytest.mark.parametrize(
    ("group", "form"),
    [
        pytest.param(layers(INT8 | CHANNEL, INT8 | TOKEN), "int-quantized", id="w8a8"),
        pytest.param(layers(INT8 | TENSOR, INT8 | TENSOR), "int-quantized", id="w8a8-static"),
        pytest.param(layers(INT4, None), "pack-quantized", id="w4a16"),
        pytest.param(layers(INT8 | CHANNEL, None), "pack-quantized", id="w8a16"),
    ],
)
def test_integers_are_served_as_what_vllm_repacks(tmp_path: Path, group: Any, form: str) -> None:
    model = checkpoint(tmp_path, group, form=form)
    config = vllm_options.make_vllm_config(AsyncEngineArgs(model=str(model)))
    with pytest.raises(UserError, match=r"^--max-pp 2: .*quantised \(compressed-tensors\), so "):
        check_repacked(config, 2, 1, 2)


@pytest.mark.parametrize(
    ("groups", "form", "named"),
    [
        pytest.param(
            [layers(INT4, INT8 | TOKEN)],
            "pack-quantized",
            "Linear has 4-bit int (group) weights and 8-bit int (token) activations",
            id="int4-int8",
        ),
        pytest.param(
            [layers(INT4, FP8 | TOKEN)],
            "pack-quantized",
            "Linear has 4-bit int (group) weights and 8-bit float (token) activations",
            id="int4-fp8",
        ),
        pytest.param(
            [layers(FP8 | CHANNEL, None)],
            "naive-quantized",
            "Linear has 8-bit float (channel) weights and plain activations",
            id="fp8-weights-alone",
        ),
        pytest.param(
            [layers(FP8 | {"strategy": "group", "group_size": 32}, FP8 | TOKEN)],
            "float-quantized",
            "Linear has 8-bit float (group) weights and 8-bit float (token) activations",
            id="fp8-groups",
        ),
        pytest.param(
            [layers(FP8 | CHANNEL, FP8 | TOKEN), layers(FP8 | CHANNEL, None, "re:.*down_proj")],
            "mixed-precision",
            "re:.*down_proj has 8-bit float (channel) weights and plain activations",
            id="one-group-of-two",
        ),
    ],
)
def test_other_quantisations_are_refused_by_name(
    tmp_path: Path, groups: list[Any], form: str, named: str
) -> None:
    model = checkpoint(tmp_path, *groups, form=form)
    with pytest.raises(UserError) as caught:
        vllm_options.make_vllm_config(AsyncEngineArgs(model=str(model)))
    assert str(caught.value) == f"{model} is quantised (compressed-tensors: {named}): not supported"


def test_weights_that_are_quantised_again_are_left_to_the_engines(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, layers(INT8 | CHANNEL, INT8 | TOKEN), form="int-quantized")
    again: Any = {"linear": "fp8_per_channel"}
    args = AsyncEngineArgs(model=str(model), quantization_config=again)
    quantisation = vllm_options.make_vllm_config(args).quant_config
    assert quantisation.online_quantization_config is not None


def test_no_engine_is_started_for_one(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, layers(INT4, FP8 | TOKEN), form="pack-quantized")
    process = run_shoal(["serve", str(model), "--port", "0"], dict(os.environ))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    _starting, _imports, error = output.splitlines()
    assert error.startswith(f"shoal: {model} is quantised (compressed-tensors: Linear has 4-bit ")


def test_real_engines_refuse_what_they_alone_see(tmp_path_factory: pytest.TempPathFactory) -> None:
    """FP8 by the scheme of its groups, but for transforms that are applied to the activations."""
    model = tmp_path_factory.mktemp("models") / "transformed"
    write_checkpoint(model, CheckpointSpec(layers=1))
    (model / "model.safetensors").unlink()
    checkpoint(model, layers(FP8 | CHANNEL, FP8 | TOKEN), transform_config=HADAMARD)
    node = ServedNode(
        tmp_path_factory.mktemp("c"),  # of a short name: sockets are below it
        *(str(model), "--engines", "2", "--load-format", "dummy", "--enforce-eager"),
        *("--max-model-len", "256", "--kv-cache-memory-bytes", str(16 << 20)),
        real=True,
    )
    lines = [*node.lines, *node.wait()]
    assert node.process.returncode == 1
    (line,) = [line for line in lines if line.startswith("shoal: ")]
    assert line.endswith(
        "UnviewableWeights: model.layers.0.self_attn.qkv_proj: "
        "CompressedTensorsLinearTransformMethod weights are not supported"
    )
    assert not any("Traceback" in line for line in lines)
    assert node.leftovers() == []
