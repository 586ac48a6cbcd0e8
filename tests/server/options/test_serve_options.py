import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from shoal.runtime.config import (
    MAX_HELD_BYTES,
    MAX_WAITING_REQUESTS,
    MAX_WAITING_TOKENS,
    MIXED_STEP_TOKENS,
    PRECOPY_TOKENS,
    CarryPath,
)
from shoal.runtime.served_weights import FP8_QUANTISATIONS
from shoal.server.errors import UserError, one_line
from shoal.server.options.front_end_option import front_ends
from shoal.server.options.refused_options import REFUSED
from shoal.server.options.serve_options import (
    CPU_KV_BYTES,
    DEMO_NAME,
    add_shoal_options,
    check_model,
    check_options,
    choose_tracing,
    engines_and_group,
    fake_settings,
    model_defaults,
    prepare_environment,
    with_chosen,
)
from shoal.server.options.step_options import settle_full_graphs

VLLM_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(REFUSED),
    "runner": "auto",
    "api_server_count": None,
    "quantization": None,
    "speculative_config": None,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "served_model_name": None,
    "enable_lora": False,
    "lora_modules": None,
    "enforce_eager": False,
    "enable_auto_tool_choice": False,
    "tool_call_parser": None,
    "kv_cache_memory_bytes": None,
    "dtype": "auto",
    "scheduling_policy": "fcfs",
    "model": "some/model",
}


def parsed(*argv: str, environ: dict[str, str] | None = None, **vllm: Any) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    add_shoal_options(parser, environ or {})
    args = parser.parse_args(argv)
    vars(args).update(VLLM_DEFAULTS | vllm)
    return args


def check(args: Namespace) -> None:
    check_options(args, VLLM_DEFAULTS.get)


def test_the_defaults_are_accepted() -> None:
    check(parsed())


@pytest.mark.parametrize("name", sorted(FP8_QUANTISATIONS))
def test_fp8_weights_are_accepted(name: str) -> None:
    check(parsed(quantization=name))


@pytest.mark.parametrize("name", ["awq", "gptq", "bitsandbytes", "gguf", "mxfp4", "modelopt"])
def test_other_quantisations_are_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=f"^--quantization {name}: only FP8 weights"):
        check(parsed(quantization=name))


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_option_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(UserError) as caught:
        check(parsed(**{name: "set"}))
    message = str(caught.value)
    assert message.startswith("--" + name.replace("_", "-") + ": ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--policy", "nosuch"], "nosuch"),
        (["--engines", "3"], "--engines 3"),
        (["--engines", "0"], "--engines 0"),
        (["--engines", "16"], "--engines 16"),
        (["--max-group", "3"], "--max-group 3"),
        (["--max-pp", "3"], "--max-pp 3"),
        (["--prepare-timeout", "0"], "--prepare-timeout"),
        (["--max-retries", "-1"], "--max-retries"),
        (["--engine-timeout", "0"], "--engine-timeout"),
        (["--controller-timeout", "0"], "--controller-timeout"),
        (["--outage-limit", "inf"], "--outage-limit"),
        (["--step-timeout", "inf"], "--step-timeout"),
        (["--fake-engine", "--fake-step-ms", "-1"], "--fake-step-ms"),
        (["--fake-step-ms", "1"], "--fake-engine"),
        (["--recording-dir", "/nowhere/at/all"], "--recording-dir /nowhere/at/all"),
        (["--recording-dir", "/tmp", "--fake-engine"], "nothing to record"),
        (["--port", "65536"], "--port 65536"),
    ],
)
def test_a_value_out_of_range_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        check(parsed(*argv))


@pytest.mark.parametrize(
    ("vllm", "named"),
    [
        ({"runner": "pooling"}, "--runner pooling"),
        ({"api_server_count": 0}, "--api-server-count 0"),
        ({"ssl_keyfile": "key"}, "--ssl-certfile"),
    ],
)
def test_vllms_options_are_checked_too(vllm: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        check(parsed(**vllm))


def test_the_port_comes_from_the_option_or_else_the_environment() -> None:
    assert parsed().port == 8000
    assert parsed().host == "127.0.0.1"
    assert parsed(environ={"PORT": "81"}).port == 81
    assert parsed("--port", "82", environ={"PORT": "81"}).port == 82


@pytest.mark.parametrize("text", ["", "http", "-1", "65536", "80.5"])
def test_a_bad_port_in_the_environment_is_named(text: str) -> None:
    with pytest.raises(UserError, match="PORT"):
        parsed(environ={"PORT": text})


@pytest.mark.parametrize(
    ("argv", "gpus", "demo", "expected"),
    [
        ([], 0, False, (2, 2)),
        ([], 1, False, (1, 1)),
        ([], 3, False, (2, 2)),
        ([], 7, False, (4, 4)),
        ([], 8, False, (8, 8)),
        ([], 64, False, (8, 8)),
        ([], 8, True, (2, 2)),
        ([], 1, True, (1, 1)),
        (["--engines", "4"], 0, False, (4, 4)),
        (["--engines", "4", "--max-group", "2"], 0, False, (4, 2)),
        (["--engines", "8", "--fake-engine"], 1, False, (8, 8)),
    ],
)
def test_engines_follow_the_gpus(
    argv: list[str], gpus: int, demo: bool, expected: tuple[int, int]
) -> None:
    assert engines_and_group(parsed(*argv), gpus, demo=demo) == expected


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_number_of_front_ends_is_a_default(on_cpu: bool) -> None:
    defaults = model_defaults(4, on_cpu=on_cpu, demo=False)
    assert defaults["api_server_count"] == front_ends(4, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("argv", "gpus", "named"),
    [
        (["--engines", "4"], 2, "2 GPUs"),
        (["--engines", "2", "--max-group", "4"], 0, "--max-group 4"),
        (["--max-group", "8"], 4, "--max-group 8"),
        (["--engines", "4", "--max-group", "2", "--max-pp", "4"], 0, "--max-pp 4: .* 2 engines"),
    ],
)
def test_more_than_there_is_is_refused(argv: list[str], gpus: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        engines_and_group(parsed(*argv), gpus, demo=False)


def test_engines_with_pipelines_may_share_weights() -> None:
    args = parsed("--engines", "2", "--max-pp", "2", "--share-weights", "2")
    assert engines_and_group(args, 0, demo=False) == (2, 2)


def test_the_demo_gets_small_defaults() -> None:
    defaults = model_defaults(2, on_cpu=True, demo=True)
    assert defaults["served_model_name"] == [DEMO_NAME]
    assert defaults["kv_cache_memory_bytes"] < CPU_KV_BYTES
    assert defaults["enable_auto_tool_choice"]


def test_a_model_on_gpus_keeps_vllms_defaults() -> None:
    assert model_defaults(2, on_cpu=False, demo=False).keys() == {"api_server_count"}


def test_a_models_place_on_the_command_line_does_not_matter() -> None:
    assert with_chosen(Namespace(model="other", model_tag="this")).model == "this"
    assert with_chosen(Namespace(model="that", model_tag=None)).model == "that"


def test_models_that_cannot_be_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for model, named in (
        (str(tmp_path / "missing"), "no such directory"),
        ("./missing", "no such directory"),
        (str(tmp_path), "config.json"),
        (str(tmp_path / "file"), "not a directory"),
    ):
        with pytest.raises(UserError, match=named):
            check_model(model)


def test_models_that_may_be_there_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    check_model("organisation/model-on-the-hub")


def test_the_environment_keeps_what_the_user_set(tmp_path: Path) -> None:
    environ = {"OMP_NUM_THREADS": "3", "VLLM_CPU_KVCACHE_SPACE": "40"}
    prepare_environment(environ, [str(tmp_path)])
    assert (environ["OMP_NUM_THREADS"], environ["NUMBA_NUM_THREADS"]) == ("3", "1")
    assert environ["HF_HUB_OFFLINE"] == "1"
    assert environ["VLLM_NO_USAGE_STATS"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environ


def test_vllm_chooses_its_model_runner_unless_the_user_does() -> None:
    environ: dict[str, str] = {}
    prepare_environment(environ, [])
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environ
    environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    prepare_environment(environ, [])
    assert environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


@pytest.mark.parametrize(
    ("argv", "offline"),
    [
        ([], True),
        (["--port", "1"], True),
        (["organisation/model"], False),
        (["--port", "1", "--model", "organisation/model"], False),
        (["--model=organisation/model"], False),
    ],
)
def test_only_a_local_model_keeps_the_hub_out(argv: list[str], offline: bool) -> None:
    environ: dict[str, str] = {}
    prepare_environment(environ, argv)
    assert ("HF_HUB_OFFLINE" in environ) is offline


def tracing(endpoint: str | None, *, log_stats: bool = True, **environ: str) -> str | None:
    args = Namespace(otlp_traces_endpoint=endpoint, disable_log_stats=not log_stats)
    choose_tracing(args, {name.upper(): value for name, value in environ.items()})
    return args.otlp_traces_endpoint


def test_traces_go_where_the_option_or_else_the_environment_says() -> None:
    of_environment = {"otel_exporter_otlp_traces_endpoint": "http://there:4317"}
    assert tracing(None) is None
    assert tracing(None, otel_exporter_otlp_traces_endpoint="") is None
    assert tracing(None, **of_environment) == "http://there:4317"
    assert tracing("http://here:4317", **of_environment) == "http://here:4317"
    assert tracing(None, log_stats=False) is None


def test_traces_that_cannot_be_are_refused() -> None:
    assert tracing("http://x", otel_exporter_otlp_traces_protocol="http/protobuf") == "http://x"
    with pytest.raises(UserError, match=r"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json'"):
        tracing("http://x", otel_exporter_otlp_traces_protocol="http/json")
    with pytest.raises(UserError, match="--disable-log-stats"):
        tracing("http://x", log_stats=False)


def test_the_service_is_called_shoal_unless_it_has_a_name() -> None:
    for environ, name in (
        ({}, "shoal"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,a=b"}, None),
    ):
        prepare_environment(environ, [])
        assert environ.get("OTEL_SERVICE_NAME") == name


def test_the_pool_is_bounded_out_of_the_box() -> None:
    args = parsed("--max-waiting-requests", "1", "--max-waiting-tokens", "2")
    check(args)
    assert (args.max_waiting_requests, args.max_waiting_tokens) == (1, 2)
    assert parsed().max_waiting_requests == MAX_WAITING_REQUESTS
    assert parsed().max_waiting_tokens == MAX_WAITING_TOKENS
    assert parsed().max_held_bytes == MAX_HELD_BYTES


@pytest.mark.parametrize(
    "option", ["--max-waiting-requests", "--max-waiting-tokens", "--max-held-bytes"]
)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_limit_of_the_pool_is_at_least_one(option: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{option} {value}"):
        check(parsed(option, value))


@pytest.mark.parametrize("value", ["0", "-3", "inf", "nan"])
def test_aging_takes_a_time(value: str) -> None:
    with pytest.raises(UserError, match="--priority-aging"):
        check(parsed("--priority-aging", value))


@pytest.mark.parametrize("value", ["-1", "inf", "nan"])
def test_a_switch_waits_for_a_time_or_not_at_all(value: str) -> None:
    with pytest.raises(UserError, match=f"--switch-wait {value}"):
        check(parsed("--switch-wait", value))
    check(parsed("--switch-wait", "0"))


def test_kv_is_copied_ahead_from_a_number_of_tokens_on() -> None:
    with pytest.raises(UserError, match="--precopy-tokens -1"):
        check(parsed("--precopy-tokens", "-1"))
    assert parsed().precopy_tokens == PRECOPY_TOKENS
    check(parsed("--precopy-tokens", "0"))
    assert parsed().carry_path is CarryPath.AUTO
    assert parsed("--carry-path", "host").carry_path is CarryPath.HOST


def test_steps_in_which_requests_decode_have_a_limit_of_their_own_or_none() -> None:
    with pytest.raises(UserError, match="--mixed-step-tokens -1"):
        check(parsed("--mixed-step-tokens", "-1"))
    assert parsed().mixed_step_tokens == MIXED_STEP_TOKENS
    with pytest.raises(UserError, match="--full-graph-tokens -1"):
        check(parsed("--full-graph-tokens", "-1"))
    check(parsed("--full-graph-tokens", "0"))
    check(parsed("--mixed-step-tokens", "0"))


@pytest.mark.parametrize(("asked", "dense", "experts"), [((), 1024, 8192), (("0",), 0, 0)])
def test_models_with_experts_have_full_graphs_for_more_tokens(
    asked: tuple[str, ...], dense: int, experts: int
) -> None:
    found = []
    for has_experts in (False, True):
        args = parsed(*(part for each in asked for part in ("--full-graph-tokens", each)))
        settle_full_graphs(args, has_experts=has_experts)
        found.append(args.full_graph_tokens)
    assert found == [dense, experts]


def test_fake_settings_follow_the_options() -> None:
    model: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 2, "prefix_caching": False}
    assert fake_settings(parsed(), **model) is None
    fake = fake_settings(parsed("--fake-engine", "--fake-step-ms", "5"), **model)
    assert fake is not None
    assert fake.step_seconds == 0.005
    assert {name: getattr(fake, name) for name in model} == model


def test_foreign_errors_become_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(KeyError()) == "KeyError"


def test_what_processes_tell_each_other_stays_on_this_machine_unless_it_is_set() -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    prepare_environment(environ, [])
    assert [environ[name] for name in names] == ["lo", "ib0", "127.0.0.1"]


@pytest.mark.parametrize(
    "option",
    ["--max-body-bytes", "--max-choices", "--max-grammar-seconds", "--max-waiting-grammars"],
)
def test_a_bound_leaves_something(option: str) -> None:
    with pytest.raises(UserError, match=f"{option} 0"):
        check(parsed(option, "0"))


def test_options_start_no_thread() -> None:
    """A process with threads cannot be forked, and one with numpy has those of its BLAS."""
    module = "shoal.server.options.serve_options"
    code = f"import os, sys, {module}; print(len(os.listdir('/proc/self/task')))"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"
