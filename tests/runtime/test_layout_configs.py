"""One configuration for all processes: what each gets, and what a start refuses."""

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import CompilationConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from shoal.loadgen.bench import dummy_model
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.runtime import layout_configs as module
from shoal.runtime.config import LayoutConfigs, NodeConfig
from shoal.runtime.engine.layouts.engine_config import engine_config
from shoal.runtime.engine.link.executor import UnitExecutor
from shoal.runtime.layout_configs import (
    ConfigurationDiffersError,
    differences,
    dp_config,
    facts_of,
    layout_configs,
    prepare,
    take,
)
from shoal.runtime.whole_experts import parse
from shoal.server.options.serve_options import DEMO_CHECKPOINT

TP2 = Layout(tp=2)

ENGINES_ADD = {
    "additional_config.shoal_weights": "the order of the weights, for vLLM's compile cache",
    "cache_config.gpu_memory_utilization": "of a group: DP has taken the share of all layouts",
    "load_config.load_format": "of a group: its weights are views",
    "load_config.use_tqdm_on_load": "no progress bar per engine",
    "model_config.original_max_model_len": "a layout may hold less than another",
    "parallel_config.distributed_executor_backend": "steps go over queues",
    "quant_config": "the layers' weights are shared",
}
"""Fields in which what an engine runs with differs from what the main process has made."""


def made(layouts: Sequence[Layout] = (DP, TP2), **fields: Any) -> LayoutConfigs:
    """Return the configurations of a node that serves the demo model."""
    args = prepare(AsyncEngineArgs(**{"model": str(DEMO_CHECKPOINT), **fields}), api_servers=1)
    return layout_configs(args, dp_config(args), layouts)


def altered(configs: LayoutConfigs, section: str, **fields: Any) -> LayoutConfigs:
    """Return configurations of which that of DP is another than the main process made."""
    config = take(configs, DP)
    for name, value in fields.items():
        setattr(getattr(config, section), name, value)
    return dataclasses.replace(configs, pickled={DP: bytes(ForkingPickler.dumps(config))})


@pytest.mark.parametrize("layout", [DP, TP2])
def test_engines_add_what_is_said_and_nothing_else(layout: Layout) -> None:
    configs = made()
    node = NodeConfig(2, 2, "manual", "unused", configs)
    ours, made_of = engine_config(node, layout, UnitExecutor), take(configs, layout)
    for path, _, _ in differences(facts_of(ours), facts_of(made_of)):
        assert any(f"{path}.".startswith(f"{name}.") for name in ENGINES_ADD), path


@pytest.mark.parametrize(
    ("expert", "block", "by_expert"),
    [
        (768, None, ()),
        (768, 128, (4, 8)),
        (1408, 128, (2, 4, 8)),
        (14336, 128, ()),
        (130, None, (4, 8)),
    ],
)
def test_members_have_whole_experts_where_a_share_would_be_no_view(
    expert: int, block: int | None, by_expert: tuple[int, ...], tmp_path: Path
) -> None:
    """As of Qwen3-30B-A3B with FP8 in blocks: half an expert is three blocks, a quarter is not."""
    shape = dummy_model.read_shape("qwen3-30b-a3b")
    dummy_model.write_model(tmp_path, shape | {"moe_intermediate_size": expert})
    args = prepare(AsyncEngineArgs(model=str(tmp_path)), api_servers=1)
    dp = dp_config(args)
    dp.quant_config = None if block is None else SimpleNamespace(weight_block_size=[block, block])
    assert _by_expert(layout_configs(args, dp, layouts_up_to(8))) == by_expert


def test_members_of_gpt_oss_have_shares_where_these_are_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its quantisation they always are. In MXFP4 it depends on the GPU and the kernel."""

    def found(**shape: Any) -> tuple[int, ...]:
        dummy_model.write_model(tmp_path, dummy_model.read_shape("gpt-oss-20b") | shape)
        args = prepare(AsyncEngineArgs(model=str(tmp_path)), api_servers=1)
        return _by_expert(layout_configs(args, dp_config(args), layouts_up_to(8)))

    assert found(quantization_config=None) == ()
    assert found() == (), "on CPUs, where they stay as a checkpoint has them"
    for unit, by_expert in ((128, ()), (512, (8,)), (None, (2, 4, 8))):
        monkeypatch.setattr(module, "_packed_unit", lambda _, unit=unit: unit)
        assert found() == by_expert


@pytest.mark.parametrize(
    ("backend", "capability", "triton_kernels", "unit"),
    [
        ("auto", 90, True, 128),
        ("triton", 90, True, 128),
        ("marlin", 90, True, None),
        ("auto", 90, False, None),
        ("auto", 100, True, None),
        ("auto", 80, True, None),
    ],
)
def test_the_kernel_and_the_gpu_say_what_is_packed_together(
    backend: str,
    capability: int,
    triton_kernels: bool,
    unit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = {"is_cpu": lambda: False, "is_device_capability": lambda of: of == capability}
    monkeypatch.setattr(module, "current_platform", SimpleNamespace(**gpu))
    monkeypatch.setattr(module, "has_triton_kernels", lambda: triton_kernels)
    config: Any = SimpleNamespace(kernel_config=SimpleNamespace(moe_backend=backend))
    assert module._packed_unit(config) == unit


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_a_user_may_have_whole_experts_in_all_steps(shape: str, tmp_path: Path) -> None:
    dummy_model.write_model(tmp_path, dummy_model.read_shape(shape))
    args = prepare(AsyncEngineArgs(model=str(tmp_path)), api_servers=1)
    for spelled, by_expert in (("0", (2, 4, 8)), ("64", ()), ("auto", ())):
        configs = layout_configs(args, dp_config(args), layouts_up_to(8), parse(spelled))
        assert _by_expert(configs) == by_expert


def _by_expert(configs: LayoutConfigs) -> tuple[int, ...]:
    """Return the sizes of the groups whose members have ranges of whole experts."""
    return tuple(
        layout.tp
        for layout in layouts_up_to(8)
        if pickle.loads(configs.pickled[layout]).parallel_config.enable_expert_parallel
    )


@pytest.mark.parametrize(("use_mla", "tokens"), [(True, [16, 16, 16]), (False, [16, 32, 64])])
def test_a_block_of_latents_has_as_many_tokens_in_every_layout(
    use_mla: bool, tokens: list[int]
) -> None:
    """Every member has whole latents, however many KV heads the configuration names."""
    sizes = {"get_total_num_hidden_layers": lambda: 27, "get_total_num_kv_heads": lambda: 16}
    model = SimpleNamespace(use_mla=use_mla, **sizes)
    config: Any = SimpleNamespace(
        model_config=model, cache_config=SimpleNamespace(block_size=tokens[0])
    )
    found = module.geometry_of(config)
    assert [found.block(layout).tokens for layout in layouts_up_to(4)] == tokens


def test_what_the_user_adds_to_the_configuration_stays() -> None:
    node = NodeConfig(2, 2, "manual", "unused", made(additional_config={"name": 1}))
    assert engine_config(node, DP, UnitExecutor).additional_config["name"] == 1


def test_a_process_that_has_another_value_is_refused() -> None:
    other = altered(made(), "scheduler_config", max_num_batched_tokens=99)
    with pytest.raises(ConfigurationDiffersError) as caught:
        take(other, DP)
    (field, said) = str(caught.value).split(" is ")
    assert field == "max_in_flight_tokens" or field.endswith("max_num_batched_tokens")
    assert "in this process" in said
    assert "\n" not in str(caught.value)


def test_a_process_that_derives_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = made()
    take(configs, DP)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigurationDiffersError, match=r"^use_v2_model_runner is True in this"):
        take(configs, DP)


def test_each_process_has_a_copy_of_its_own() -> None:
    configs = made()
    take(configs, DP).scheduler_config.max_num_seqs = 1
    assert take(configs, DP).scheduler_config.max_num_seqs > 1


def test_a_group_has_the_limits_of_dp() -> None:
    """Which vLLM would double on CPUs."""
    layouts = layouts_up_to(4)
    configs = made(layouts)
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        assert len({getattr(take(configs, of).scheduler_config, name) for of in layouts}) == 1


def test_a_group_that_vllm_would_serve_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def derive(engine_args: AsyncEngineArgs) -> VllmConfig:
        config = dp_config(engine_args)
        config.scheduler_config.max_num_seqs += engine_args.tensor_parallel_size
        return config

    args = prepare(AsyncEngineArgs(model=str(DEMO_CHECKPOINT)), api_servers=1)
    dp = dp_config(args)
    monkeypatch.setattr(module, "dp_config", derive)
    with pytest.raises(ConfigurationDiffersError, match=r"TP2 unlike DP: .*max_num_seqs is"):
        layout_configs(args, dp, (DP, TP2))


def test_a_configuration_class_of_the_models_own_travels_by_value(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in DEMO_CHECKPOINT.iterdir():
        if file.name != "config.json":
            (model / file.name).symlink_to(file)
    config = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(
        "from transformers import LlamaConfig\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    configs = made(model=str(model), trust_remote_code=True)
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    assert type(take(configs, TP2).model_config.hf_config).__name__ == "OwnConfig"


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        pytest.param({}, False, id="nothing"),
        pytest.param({"compilation_config": {"cudagraph_mode": "NONE"}}, False, id="a mode"),
        pytest.param({"cudagraph_capture_sizes": [1, 64]}, True, id="sizes"),
        pytest.param({"max_cudagraph_capture_size": 64}, True, id="the largest"),
        pytest.param({"compilation_config": {"cudagraph_capture_sizes": [1, 64]}}, True, id="json"),
        pytest.param(
            {"compilation_config": CompilationConfig(max_cudagraph_capture_size=64)},
            True,
            id="as options are parsed",
        ),
    ],
)
def test_who_says_what_is_captured_is_known(fields: dict[str, Any], chosen: bool) -> None:
    assert made((DP,), **fields).sizes_are_chosen is chosen


@pytest.mark.parametrize(("length", "fits"), [(None, False), (128, False), (-1, True)])
def test_a_length_that_is_left_to_the_memory_is_known(length: int | None, fits: bool) -> None:
    assert made((DP,), max_model_len=length).takes_what_fits is fits


def test_who_is_handed_them_needs_no_vllm() -> None:
    """A controller that is spawned reads the node's configuration, and none of vLLM's."""
    node = NodeConfig(
        engines=1, max_group=1, policy="manual", runtime_dir="/tmp", vllm=LayoutConfigs({DP: b""})
    )
    script = (
        "import pickle, sys\n"
        "pickle.load(sys.stdin.buffer)\n"
        "print(*sorted({'torch', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(node), capture_output=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("asked", [True, None])
def test_the_node_knows_whether_steps_are_scheduled_ahead(asked: bool | None) -> None:
    """On a CPU that is only so if the user asks for it."""
    configs = made((DP,), async_scheduling=asked)
    node = NodeConfig(engines=1, max_group=1, policy="manual", runtime_dir="", vllm=configs)
    assert node.schedules_ahead == bool(asked)
    on_a_gpu = dataclasses.replace(
        configs, facts={DP: {**configs.facts[DP], "scheduler_config.async_scheduling": "True"}}
    )
    node = msgspec.structs.replace(node, vllm=on_a_gpu)
    assert node.schedules_ahead
