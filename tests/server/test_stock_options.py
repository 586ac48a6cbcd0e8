"""Every option of ``vllm serve`` means here what it means there, or is refused.

What vLLM makes of a command line is compared as a whole: its ``VllmConfig`` field by field, the
parsed arguments, and the state of the application.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.runtime.layout_configs import OF_THE_SIZE, flat, take
from shoal.server.commands import serve
from shoal.server.errors import UserError
from shoal.server.options.refused_options import REFUSED
from shoal.server.options.serve_options import DEMO_CHECKPOINT
from tests.server.certificates import certificate
from tests.server.stock import app_state, differing, ours, parser, stock

MODEL = str(DEMO_CHECKPOINT)

OF_A_NODE: Mapping[str, str] = {
    "instance_id": "is the time at which a VllmConfig was made",
    "cache_config.block_size": "is the smallest of the backend: a group's are multiples of it",
    "cache_config.user_specified_block_size": "follows from that",
    "cache_config.kv_cache_memory_bytes": "is not a share of all memory on CPUs: engines share it",
    "shutdown_timeout": "is long enough for requests to end, where stock's cuts them off",
    "scheduler_config.policy": "has to be priority, for requests to have one",
    "parallel_config._api_process_count": "is 2 at least, so that engines keep no images' features",
    "speculative_config.target_parallel_config._api_process_count": "is the same",
    "speculative_config.draft_parallel_config._api_process_count": "is the same",
    "lora_config.max_loras": "leaves a slot empty on CPUs, which vLLM's operators there need",
    "lora_config.max_cpu_loras": "follows from that, and is enough for all adapters",
}
"""Fields of ``VllmConfig`` in which a node's may differ from stock's, and why."""


def unexplained(found: Mapping[str, Any], tables: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the fields that no table names, nor a part that they are within."""
    names = [name for table in tables for name in table]
    return [path for path in found if not any(f"{path}.".startswith(f"{n}.") for n in names)]


# --- configurations -------------------------------------------------------------------------------

NGRAMS = '{"method": "ngram", "num_speculative_tokens": 3}'

OPTIONS = [
    pytest.param(argv, id=" ".join(argv) or "none")
    for argv in (
        [],
        ["--max-num-seqs", "7"],
        ["--max-model-len", "128"],
        ["--max-model-len", "-1"],
        ["--max-num-batched-tokens", "512"],
        ["--enforce-eager"],
        ["--no-enable-prefix-caching"],
        ["--no-enable-chunked-prefill"],
        ["--dtype", "float32"],
        ["--reasoning-parser", "qwen3"],
        ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'],
        ["--reasoning-parser", "qwen3", "--structured-outputs-config.enable_in_reasoning", "true"],
        ["--compilation-config", '{"mode": 0}'],
        ["--async-scheduling"],
        ["--no-async-scheduling"],
        ["--seed", "7"],
        ["--generation-config", "vllm"],
        ["--override-generation-config", '{"temperature": 0.5}'],
        ["--hf-overrides", '{"rope_theta": 20000.0}'],
        ["--performance-mode", "throughput"],
        ["--additional-config", '{"name": 1}'],
        ["--kv-cache-dtype", "fp8"],
        ["--optimization-level", "0"],
        ["--stream-interval", "4"],
        ["--block-size", "64"],
        ["--speculative-config", NGRAMS],
    )
]


@pytest.mark.parametrize("argv", OPTIONS)
def test_a_node_has_the_configuration_of_stock_vllm(argv: list[str]) -> None:
    found = differing(ours([MODEL, *argv]).config, stock([MODEL, *argv]).config)
    assert unexplained(found, [OF_A_NODE]) == []


@pytest.mark.parametrize("argv", OPTIONS)
def test_processes_get_what_the_main_process_has(argv: list[str]) -> None:
    made = ours([MODEL, *argv], layouts_up_to(2))
    assert made.configs is not None
    assert differing(take(made.configs, DP), made.config) == {}
    group = differing(take(made.configs, Layout(tp=2)), made.config)
    assert unexplained(group, [OF_THE_SIZE]) == []
    assert group["parallel_config.tensor_parallel_size"] == ("2", "1")


def test_a_difference_is_seen() -> None:
    found = differing(ours([MODEL, "--max-num-seqs", "7"]).config, stock([MODEL]).config)
    assert unexplained(found, [OF_A_NODE]) != []


@pytest.fixture
def large_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM take its defaults for a device with 140 GiB that is no A100."""
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda *_: 140 << 30)
    monkeypatch.setattr(current_platform, "get_device_name", lambda *_: "H200")
    inside = [False]
    platform, is_cpu = type(current_platform), current_platform.is_cpu
    # What asks for the defaults of CPUs after those of the device.
    from vllm.engine.arg_utils import EngineArgs

    defaults = EngineArgs.get_batch_defaults.__func__

    def get_batch_defaults(cls: Any, world_size: int) -> Any:
        inside[0] = True
        try:
            return defaults(cls, world_size)
        finally:
            inside[0] = False

    monkeypatch.setattr(EngineArgs, "get_batch_defaults", classmethod(get_batch_defaults))
    monkeypatch.setattr(platform, "is_cpu", lambda _: not inside[0] and is_cpu())


@pytest.mark.usefixtures("large_device")
def test_every_layout_has_the_step_of_a_server_on_its_device() -> None:
    made = ours([MODEL], layouts_up_to(4))
    assert made.configs is not None
    steps = [
        take(made.configs, layout).scheduler_config.max_num_batched_tokens
        for layout in layouts_up_to(4)
    ]
    assert steps == [8192] * 3
    assert stock([MODEL]).config.scheduler_config.max_num_batched_tokens == 8192


# --- every option ---------------------------------------------------------------------------------

OF_THE_SERVER: Mapping[str, str] = {
    "host": "is this machine alone, unless it is set",
    "port": "may be given by PORT",
    "uvicorn_log_level": "leaves out a line per request",
    "api_server_count": "is a number where stock's None means one, or one for each DP engine",
    "shutdown_timeout": OF_A_NODE["shutdown_timeout"],
    "h11_max_header_count": "is a bound of Shoal's",
    "h11_max_incomplete_event_size": "is a bound of Shoal's",
    "scheduling_policy": OF_A_NODE["scheduler_config.policy"],
    "kv_cache_memory_bytes": OF_A_NODE["cache_config.kv_cache_memory_bytes"],
}
"""Arguments in which a parsed command line may differ from stock's, and why."""

OF_THE_ENGINE: Mapping[str, str] = {
    **OF_THE_SERVER,
    "block_size": OF_A_NODE["cache_config.block_size"],
    "max_loras": OF_A_NODE["lora_config.max_loras"],
    "_api_process_count": OF_A_NODE["parallel_config._api_process_count"],
    "speculative_config.target_parallel_config._api_process_count": "is the same",
    "speculative_config.draft_parallel_config._api_process_count": "is the same",
    "limit_mm_per_prompt": "leaves out videos and sound",
}
"""The same of ``AsyncEngineArgs``."""

UNTRIED: Mapping[str, str] = {
    "tool_server": "connects to the servers that it names",
    "return_sampling_mask": "needs vLLM's V2 model runner, which needs Triton",
    "enable_trace_replay": "the same",
    "watermark_config": "the same",
    "use_replayssm": "needs a model with state-space layers, which is refused",
    "mamba_backend": "the same",
    "mamba_ssu_algorithm": "the same",
    "enable_mamba_cache_stochastic_rounding": "the same",
    "engram_config": "needs a model with an engram",
    "ray_workers_use_nsight": "needs Ray",
    "collect_detailed_traces": "needs a collector of traces",
    "offload_backend": "needs an option that is refused",
    "api_server_count": "has a test of its own",
}
"""Options that cannot be tried here, and why: vLLM refuses every value, and so does Shoal."""

VALUES: Mapping[str, Sequence[str]] = {
    "additional_config": ["--additional-config", '{"name": 1}'],
    "attention_backend": ["--attention-backend", "CPU_ATTN"],
    "attention_config": ["--attention-config", '{"backend": "CPU_ATTN"}'],
    "aux_output_config": ["--aux-output-config", '{"max_bytes": 7}'],
    "chat_template": ["--chat-template", "{{ messages[0].content }}"],
    "compilation_config": ["--compilation-config", '{"mode": 0}'],
    "config": ["--config", "CONFIG"],
    "config_format": ["--config-format", "hf"],
    "custom_histogram_buckets": ["--custom-histogram-buckets", '{"inter_token_latency": [1, 2]}'],
    "data_parallel_multi_port_external_lb": [
        *("--data-parallel-size", "2", "--data-parallel-multi-port-external-lb")
    ],
    "default_chat_template_kwargs": ["--default-chat-template-kwargs", '{"a": 1}'],
    "enable_auto_tool_choice": ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
    "enable_log_outputs": ["--enable-log-outputs", "--enable-log-requests"],
    "eplb_config": ["--eplb-config", '{"window_size": 7}'],
    "ec_manager_config": ["--ec-manager-config", "{}"],
    "fault_tolerance_config": ["--fault-tolerance-config", '{"engine_recovery_timeout_sec": 7}'],
    "fingerprint_value": ["--fingerprint-mode", "custom", "--fingerprint-value", "this"],
    "generation_config": ["--generation-config", "vllm"],
    "gpu_memory_utilization": ["--gpu-memory-utilization", "0.5"],
    "hf_config_path": ["--hf-config-path", MODEL],
    "hf_overrides": ["--hf-overrides", '{"rope_theta": 20000.0}'],
    "ir_op_priority": ["--ir-op-priority", '{"rms_norm": ["native"]}'],
    "kernel_config": ["--kernel-config", '{"enable_flashinfer_autotune": false}'],
    "kv_cache_metrics_sample": ["--kv-cache-metrics-sample", "0.5"],
    "limit_mm_per_prompt": ["--limit-mm-per-prompt", '{"image": 2}'],
    "media_io_kwargs": ["--media-io-kwargs", '{"image": {"image_mode": "RGB"}}'],
    "mm_processor_kwargs": ["--mm-processor-kwargs", '{"num_crops": 4}'],
    "logging_config": ["--logging-config", '{"log_level": "INFO"}'],
    "lora_modules": ["--enable-lora", "--lora-modules", "name=path"],
    "max_cpu_loras": ["--enable-lora", "--max-cpu-loras", "7"],
    "max_loras": ["--enable-lora", "--max-loras", "7"],
    "max_lora_rank": ["--enable-lora", "--max-lora-rank", "32"],
    "max_model_len": ["--max-model-len", "128"],
    "max_num_batched_tokens": ["--max-num-batched-tokens", "512"],
    "max_num_seqs": ["--max-num-seqs", "7"],
    "model": ["--model", MODEL],
    "model_class_overrides": ["--model-class-overrides", '{"this": "that:other"}'],
    "optimization_level": ["--optimization-level", "1"],
    "override_generation_config": ["--override-generation-config", '{"temperature": 0.5}'],
    "profiler_config": ["--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/tmp"}'],
    "quantization": ["--quantization", "awq"],
    "reasoning_config": ["--reasoning-config", '{"reasoning_parser": "qwen3"}'],
    "reasoning_parser": ["--reasoning-parser", "qwen3"],
    "runner": ["--runner", "pooling"],
    "speculative_config": ["--speculative-config", NGRAMS],
    "ssl_certfile": ["--ssl-certfile", "CERTIFICATE", "--ssl-keyfile", "KEY"],
    "ssl_keyfile": ["--ssl-certfile", "CERTIFICATE", "--ssl-keyfile", "KEY"],
    "structured_outputs_config": ["--structured-outputs-config", '{"backend": "guidance"}'],
    "tokenizer": ["--tokenizer", MODEL],
    "tokenizer_mode": ["--tokenizer-mode", "hf"],
    "tool_call_parser": ["--tool-call-parser", "hermes"],
    "watermark": ["--watermark", "0.1"],
}
"""Values of options that have to be known; the others are made up."""


def options() -> Iterator[Any]:
    """Yield every option of vLLM with an id."""
    for action in parser()._actions:
        if action.option_strings and action.dest not in ("help", *UNTRIED):
            yield pytest.param(action, id=action.dest)


def made_up(action: Any, tmp_path: Path) -> list[str]:
    """Return arguments that give an option another value than its default."""
    if action.dest in VALUES:
        (config := tmp_path / "options.yaml").write_text("max-num-seqs: 7\n")
        cert, key = certificate(tmp_path)
        files = {"CONFIG": str(config), "CERTIFICATE": cert, "KEY": key}
        return [files.get(value, value) for value in VALUES[action.dest]]
    flag = next(option for option in action.option_strings if option.startswith("--"))
    if action.nargs == 0:
        return [flag.replace("--", "--no-", 1) if action.default else flag]
    if action.choices:
        return [flag, str(next(each for each in action.choices if each != action.default))]
    if isinstance(action.default, int | float):
        return [flag, str(type(action.default)(action.default + 1))]
    return [flag, _taken_by(action)]


def _taken_by(action: Any) -> str:
    for text in ("7", '["this"]', "{}"):
        with suppress(Exception):
            if action.type is None or action.type(text) is not None:
                return text
    raise AssertionError(f"no value is known for {action.dest}")


def refused_by_name(action: Any, argv: Sequence[str]) -> None:
    """Check that the option is refused before anything is started."""
    flag = action.dest.replace("_", "-")
    with pytest.raises(UserError, match=rf"--(model|{flag}|data-parallel-size)\b"):
        serve.read_options(argv)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("action", list(options()))
def test_an_option_does_what_it_does_in_stock_vllm_or_is_refused(
    action: Any, tmp_path: Path
) -> None:
    argv = [MODEL, *made_up(action, tmp_path)]
    if action.dest in {*REFUSED, "quantization", "runner"}:
        refused_by_name(action, argv)
        return
    here, there = ours(argv), stock(argv)
    assert unexplained(differing(here.config, there.config), [OF_A_NODE]) == []
    for mine, its, table in (
        (here.engine_args, there.engine_args, OF_THE_ENGINE),
        (here.args, there.args, OF_THE_SERVER),
    ):
        said, meant = dict(flat(mine)), dict(flat(its))
        found = {path: said.get(path) for path in meant if said.get(path) != meant[path]}
        assert unexplained(found, [table]) == []
    if action.dest in OF_THE_SERVER and action.dest != "scheduling_policy":
        assert str(getattr(here.args, action.dest)) == argv[-1]


@pytest.mark.parametrize("name", UNTRIED)
def test_an_untried_option_is_one_of_vllms(name: str) -> None:
    assert name in {action.dest for action in parser()._actions}


def test_several_front_ends_are_stocks_api_servers() -> None:
    made = ours([MODEL, "--api-server-count", "3"])
    parallel = made.config.parallel_config
    assert (parallel._api_process_count, parallel._api_process_rank) == (3, -1)


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param([], id="none"),
        pytest.param(["--reasoning-parser", "qwen3"], id="reasoning"),
        pytest.param(
            [
                *("--structured-outputs-config", '{"reasoning_parser": "qwen3"}'),
                *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
                *("--chat-template", "{{ messages[0].content }}", "--response-role", "other"),
                *("--chat-template-content-format", "string", "--trust-request-chat-template"),
                *("--default-chat-template-kwargs", '{"a": 1}', "--served-model-name", "a", "b"),
                *("--return-tokens-as-token-ids", "--enable-prompt-tokens-details"),
                *("--enable-force-include-usage", "--enable-per-request-metrics"),
                *("--enable-log-requests", "--enable-log-outputs", "--no-enable-log-deltas"),
                *("--max-log-len", "7", "--log-error-stack", "--tool-strict-level", "function"),
                *("--exclude-tools-when-tool-choice-none", "--cohere-format", "cmd3"),
            ],
            id="many",
        ),
    ],
)
def test_the_application_is_that_of_stock_vllm(argv: list[str]) -> None:
    mine = asyncio.run(app_state(ours([MODEL, *argv])))
    its = asyncio.run(app_state(stock([MODEL, *argv])))
    assert len(its) > 300
    # It is made of a hash of the configuration, of which OF_A_NODE says what differs.
    found = {path for path in {*mine, *its} if mine.get(path, "-") != its.get(path, "-")}
    assert {path for path in found if not path.endswith(".system_fingerprint")} == set()
