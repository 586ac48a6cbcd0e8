"""What options say about promises and step times becomes what the node is started with."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from shoal.loadgen.bench import dummy_model
from shoal.policies.values.snapshot import Target
from shoal.runtime.served_weights import FP8_QUANTISATIONS
from shoal.runtime.simulation.data_sheets import projected
from shoal.runtime.simulation.shape_files import cost_model, read_hardware, read_shape
from shoal.server.errors import UserError
from shoal.server.options.promise_options import (
    add_promise_options,
    node_cost_model,
    promised,
    shape_of,
)
from shoal.server.options.shift_options import AUTO, add_shift_options
from shoal.server.options.vllm_options import make_vllm_config

LLAMA = read_shape("llama-3-8b-bf16")


class Model(SimpleNamespace):
    """What of vLLM's ``ModelConfig`` is read: that of a Llama 3 of 8B."""

    def __init__(self, **changes: Any) -> None:
        text = SimpleNamespace(num_attention_heads=32, intermediate_size=14336)
        fields = {"hf_text_config": text, "dtype": "torch.bfloat16", "quantization": None}
        kinds = {"is_moe": False, "use_mla": False, "architecture": "LlamaForCausalLM"}
        super().__init__(**{**fields, "max_model_len": 131072, **kinds, **changes})

    def get_total_num_hidden_layers(self) -> int:
        return 32

    def get_hidden_size(self) -> int:
        return 4096

    def get_total_num_kv_heads(self) -> int:
        return 8

    def get_head_size(self) -> int:
        return 128

    def get_vocab_size(self) -> int:
        return 128256


def parsed(*argv: str, policy: str = "adaptive") -> Namespace:
    parser = ArgumentParser(exit_on_error=False)
    add_promise_options(parser.add_argument_group("Shoal"))
    add_shift_options(parser)
    args = parser.parse_args(argv, Namespace(policy=policy, share_weights=1))
    if args.max_sp == AUTO:
        args.max_sp = 1  # the node has chosen it by then
    return args


def test_targets_are_in_seconds_and_in_order() -> None:
    args = parsed("--target=0:1000:30", "--target=-10:500:15")
    assert promised(args) == (Target(-10, 0.5, 0.015), Target(0, 1.0, 0.03))


def test_nothing_needs_to_be_promised() -> None:
    assert promised(parsed()) == ()


def test_the_shape_is_that_of_the_served_model() -> None:
    assert shape_of(Model(), "auto") == LLAMA
    small = msgspec.structs.replace(LLAMA, weight_dtype="fp8", kv_dtype="fp8")
    assert shape_of(Model(quantization="fp8"), "fp8_e4m3") == small


@pytest.mark.parametrize("name", sorted(FP8_QUANTISATIONS))
def test_weights_of_every_fp8_format_count_as_fp8(name: str) -> None:
    quantised = shape_of(Model(quantization=name), "auto")
    assert quantised == msgspec.structs.replace(LLAMA, weight_dtype="fp8")
    assert quantised.weight_bytes < LLAMA.weight_bytes


def test_the_hardware_is_that_of_the_gpu(tmp_path: Path) -> None:
    h200 = read_hardware("h200")
    known = node_cost_model(parsed(), Model(), "auto", gpu="NVIDIA H200", say=print)
    assert known == cost_model(LLAMA, h200)
    a100 = node_cost_model(parsed(), Model(), "auto", gpu="NVIDIA A100-SXM4-80GB", say=print)
    assert a100 == cost_model(LLAMA, projected("a100-80gb"))
    slower = msgspec.structs.replace(h200, memory_bytes_per_second=1e12)
    path = tmp_path / "slower.json"
    path.write_bytes(msgspec.json.encode(slower))
    args = parsed("--cost-model-hardware", str(path), "--cost-model-shape", "llama-3-70b-fp8")
    named = node_cost_model(args, Model(), "auto", gpu="NVIDIA H200", say=print)
    assert named == cost_model(read_shape("llama-3-70b-fp8"), slower)


def test_a_gpu_of_which_nothing_is_known_is_named() -> None:
    said: list[str] = []
    model = node_cost_model(parsed(), Model(), "auto", gpu="Some GPU", say=said.append)
    assert model == cost_model(LLAMA, read_hardware("h200"))
    assert said == ["  nothing is known of Some GPU: taken for an H200 until steps are measured"]


def test_the_model_knows_how_far_sp_goes() -> None:
    model = node_cost_model(parsed("--max-sp", "4"), Model(), "auto", gpu="NVIDIA H200", say=print)
    assert model == cost_model(LLAMA, read_hardware("h200"), 4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("qwen3-30b-a3b", "qwen3-30b-a3b-bf16"), ("gpt-oss-20b", "gpt-oss-20b-mxfp4")],
)
def test_the_shape_of_a_model_with_experts_is_read_of_its_configuration(
    name: str, shape: str, tmp_path: Path
) -> None:
    dummy_model.write_model(tmp_path, dummy_model.read_shape(name))
    model = make_vllm_config(AsyncEngineArgs(model=str(tmp_path))).model_config
    assert shape_of(model, "auto") == read_shape(shape)


def test_the_shape_of_a_model_with_latent_attention_counts_one_latent_for_all_heads() -> None:
    """The sizes are DeepSeek-V2-Lite's, and so are the numbers that its authors give."""
    text = SimpleNamespace(
        **{"num_attention_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408},
        **{"q_lora_rank": None, "kv_lora_rank": 512, "n_shared_experts": 2},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        first_k_dense_replace=1,
    )
    read: dict[str, Callable[[], int]] = {
        "get_total_num_hidden_layers": lambda: 27,
        "get_hidden_size": lambda: 2048,
        "get_head_size": lambda: 576,
        "get_vocab_size": lambda: 102400,
        "get_num_experts": lambda: 64,
        "get_num_experts_per_tok": lambda: 6,
    }
    found = shape_of(Model(hf_text_config=text, is_moe=True, use_mla=True, **read), "auto")
    assert found.model_shape().kv_bytes_per_token == 27 * 576 * 2
    assert found.weight_bytes == pytest.approx(2 * 15.7e9, rel=0.01)
    assert found.parameters == pytest.approx(2.4e9, rel=0.05)
    text.q_lora_rank = 1536
    wider = shape_of(Model(hf_text_config=text, is_moe=True, use_mla=True, **read), "auto")
    more = 1536 * (2048 + 16 * 192) - 2048 * 16 * 192
    assert wider.attention_parameters - found.attention_parameters == more


@pytest.mark.parametrize(
    ("named", "shared", "dense"),
    [
        ({"n_shared_experts": 2, "first_k_dense_replace": 3, "moe_intermediate_size": 50}, 100, 3),
        ({"shared_expert_intermediate_size": 70, "mlp_only_layers": [0, 40]}, 70, 1),
    ],
)
def test_families_name_shared_experts_and_dense_layers_in_their_own_ways(
    named: dict[str, Any], shared: int, dense: int
) -> None:
    text = SimpleNamespace(num_attention_heads=32, intermediate_size=14336, **named)
    experts = {"get_num_experts": lambda: 8, "get_num_experts_per_tok": lambda: 2}
    found = shape_of(Model(hf_text_config=text, is_moe=True, **experts), "auto")
    assert (found.shared_intermediate, found.dense_layers) == (shared, dense)
    assert found.expert_intermediate == named.get("moe_intermediate_size", 14336)


def test_a_node_that_needs_no_cost_model_starts_without_and_says_so() -> None:
    said: list[str] = []
    strange = Model(dtype="torch.float64")
    none = node_cost_model(
        parsed(policy="flying"), strange, "auto", gpu="NVIDIA H200", say=said.append
    )
    assert none is None
    assert said == ["  no cost model: nothing is known of dtype float64"]


def test_a_model_whose_configuration_names_no_mlp_size_has_no_cost_model() -> None:
    said: list[str] = []
    bloom = Model(hf_text_config=SimpleNamespace(num_attention_heads=32))
    args = parsed(policy="flying")
    assert node_cost_model(args, bloom, "auto", gpu="NVIDIA H200", say=said.append) is None
    assert said == ["  no cost model: the model's configuration has no intermediate_size"]


@pytest.mark.parametrize(
    ("argv", "policy"),
    [
        (("--target", "0:1000:30"), "adaptive"),
        (("--cost-model-hardware", "h200"), "flying"),
        (("--max-sp", "2", "--shift-threshold", "auto"), "flying"),
    ],
    ids=["promised", "asked-for", "needed-for-the-shift"],
)
def test_a_cost_model_that_is_wanted_is_there_or_nothing_starts(
    argv: tuple[str, ...], policy: str
) -> None:
    strange = Model(dtype="torch.float64")
    with pytest.raises(UserError, match="no cost model: nothing is known of dtype float64"):
        node_cost_model(parsed(*argv, policy=policy), strange, "auto", gpu="NVIDIA H200", say=print)


def test_a_file_that_is_not_there_is_named() -> None:
    args = parsed("--cost-model-hardware", "h2000", policy="flying")
    with pytest.raises(UserError, match=r"cannot read h2000.*built-in ones: .*h200"):
        node_cost_model(args, Model(), "auto", gpu="NVIDIA H200", say=print)
