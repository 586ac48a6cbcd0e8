"""What ``shoal serve`` refuses, and says, before vLLM is imported: as it would afterwards."""

import os
import socket
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.runtime.logs import LogFormat
from shoal.server.commands import early
from shoal.server.errors import UserError
from shoal.server.gate.access import check_environment, take_access
from shoal.server.options import vllm_options
from shoal.server.options.serve_options import (
    add_shoal_options,
    check_model,
    check_options,
    engines_and_group,
)
from shoal.server.options.shift_options import check_shift


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    """The parser that reads all options."""
    made = vllm_options.make_parser()
    add_shoal_options(made, {})
    return made


def known(*argv: str) -> Namespace:
    args = early.known_arguments(argv, {})
    assert args is not None
    return args


# --- what is known ---


def test_vllms_options_are_read_as_its_parser_reads_them(parser: ArgumentParser) -> None:
    actions, own = parser._option_string_actions, early.make_parser({})._option_string_actions
    for flag, settings in early.VLLM_OPTIONS.items():
        here, there = own[flag], actions[flag]
        assert (here.dest, here.nargs) == (there.dest, there.nargs)
        for text in ("1", "text"):
            assert _converted(here.type, text) == _converted(there.type, text), flag
        if "default" in settings:
            assert parser.get_default(here.dest) == settings["default"]


def _converted(kind: object, text: str) -> object:
    try:
        return kind(text) if callable(kind) else text
    except ValueError:
        return ValueError


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--port", "1234", "--host=::1", "--max_group=2", "--log-format", "json"],
        ["some/model", "--enforce-eager", "--served-model-name", "a", "b", "--engines", "2"],
        ["--dtype", "float32", "--api-key", "a", "b", "--policy", "flying", "-tp", "1"],
        ["--admin-port", "off", "--compilation-config.mode", "0", "--metrics", "open", "-O3"],
    ],
)
def test_what_is_known_is_what_the_whole_parser_reads(
    parser: ArgumentParser, argv: list[str]
) -> None:
    read = vars(vllm_options.parse(parser, argv))
    args = vars(known(*argv))
    model = args.pop("model")
    assert model in (None, read["model_tag"])
    assert args == {name: read[name] for name in args}


@pytest.mark.parametrize(
    "argv",
    [
        ["--config", "serve.yaml"],
        ["--config=serve.yaml"],
        ["--por", "1"],
        ["--max_gr=1"],
        ["--help=all"],
        ["--"],
    ],
)
def test_nothing_is_known_where_the_whole_parser_may_read_something_else(argv: list[str]) -> None:
    assert early.known_arguments([*argv, "--port", "1"], {}) is None


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        (["m"], "m"),
        (["m", "--enforce-eager"], "m"),
        (["--port", "1", "m"], "m"),
        (["--model", "m"], "m"),
        (["--model=m", "--port", "1"], "m"),
        ([], None),
        (["--enforce-eager", "m"], None),
        (["--dtype", "m"], None),
        (["--api-key", "m"], None),
    ],
)
def test_a_model_is_known_where_no_option_can_have_it_for_a_value(
    argv: list[str], model: str | None
) -> None:
    assert known(*argv).model == model


# --- what is refused ---


@pytest.mark.parametrize(
    "argv",
    [
        ["--engines", "three"],
        ["--engines", "3"],
        ["--engines", "2", "--max-group", "4"],
        ["--engines", "2", "--max-sp", "4"],
        ["--policy", "nosuch"],
        ["--policy", "module:"],
        ["--cost-model-shape", "nosuch"],
        ["--cost-model-hardware", "nosuch"],
        ["--port", "65536"],
        ["--log-format", "xml"],
        ["--restart-backoff", "0"],
        ["--ssl-keyfile", "key"],
        ["--ssl-keyfile", "/no/such/key", "--ssl-certfile", "/no/such/file"],
        ["--api-server-count", "0"],
        ["--api-key", ""],
        ["--api-key-file", "/no/such/file"],
        ["--admin-host", "0.0.0.0"],
        ["--api-key", "a", "--admin-port", "1"],
        ["--port", "80", "--admin-port", "80"],
        ["--port", "80", "--metrics-port", "81"],
        ["/no/such/model"],
    ],
)
def test_a_refusal_is_that_of_the_whole_parser(parser: ArgumentParser, argv: list[str]) -> None:
    with pytest.raises(UserError) as before:
        early.check_early(known(*argv), {})
    with pytest.raises(UserError) as after:
        check_late(parser, argv)
    assert str(before.value) == str(after.value)


def check_late(parser: ArgumentParser, argv: list[str]) -> None:
    """Check arguments as a start does, on a machine with as many GPUs as anybody wants."""
    args = vllm_options.parse(parser, argv)
    check_options(args, parser.get_default)
    check_environment({})
    early.bindings_of(args, take_access(args, {}))
    _, max_group = engines_and_group(args, 8, demo=False)
    check_shift(args, [args.policy], max_group)
    check_model(args.model_tag)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "module:"], "--policy: 'module:' is not module:NAME"),
        (["--policy", ":NAME"], "--policy: ':NAME' is not module:NAME"),
        (["--log-format", "xml"], "--log-format: 'xml': choose one of text, json"),
        (["--carry-path", "air"], "--carry-path: 'air': choose one of auto, host"),
        (["--metrics", "no"], "--metrics: 'no': choose one of key, open, off"),
        (["--cost-model-hardware", "nosuch"], "--cost-model-hardware: cannot read nosuch: No such"),
        (["--cost-model-hardware", "nosuch"], "built-in ones: a10,"),  # also those of data sheets
    ],
)
def test_a_wrong_name_is_told_with_the_right_ones(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        early.check_early(known(*argv), {})
    assert message in str(refused.value)


def test_a_port_is_for_one_purpose() -> None:
    with pytest.raises(UserError, match="--metrics-port 81: this is already the port of the admin"):
        early.check_early(known("--port", "80", "--metrics-port", "81"), {})
    with pytest.raises(UserError, match="--admin-port 80: this is already the port of the API"):
        early.check_early(known("--port", "80", "--admin-port", "80"), {})
    free = known("--port", "0", "--admin-port", "0", "--metrics-port", "0")
    assert early.check_early(free, {}).metrics == ("127.0.0.1", 0)


def test_what_the_environment_says_is_refused_too() -> None:
    with pytest.raises(UserError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        early.check_early(known(), {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})


def test_where_to_listen_and_how_to_log_is_known() -> None:
    args = known("--port", "80", "--log-format", "json")
    assert args.log_format is LogFormat.JSON
    here = "127.0.0.1"
    assert early.check_early(args, {}) == early.Bindings((here, 80), (here, 81), None)
    args = known("--port", "80", "--host", "0.0.0.0", "--metrics-port", "82")
    assert early.check_early(args, {}).metrics == ("0.0.0.0", 82)
    environ = {"VLLM_API_KEY": "secret"}
    assert early.check_early(args, environ).admin is None
    assert environ == {"VLLM_API_KEY": "secret"}


# --- without vLLM ---

CUT_OFF = (
    "import sys\n"
    "sys.modules['shoal.server.frontend.frontend'] = None  # what imports vLLM cannot be imported\n"
    "from shoal.server.commands.cli import main\n"
    "sys.exit(main(sys.argv[1:]))"
)


def serve_without_vllm(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", CUT_OFF, "serve", *argv],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_port_in_use_is_refused_without_vllm() -> None:
    with taken_port() as port:
        done = serve_without_vllm("--port", str(port))
        admin = serve_without_vllm("--port", "0", "--admin-port", str(port))
    for process in (done, admin):
        assert process.returncode == 2
        assert process.stderr == f"shoal: cannot listen on 127.0.0.1:{port}: the port is in use\n"
        assert process.stdout == ""


def test_a_file_of_options_that_is_not_there_is_refused_without_vllm() -> None:
    done = serve_without_vllm("--config", "/no/such/file.yaml")
    assert done.returncode == 2
    assert done.stderr == "shoal: /no/such/file.yaml: No such file or directory\n"


@pytest.mark.parametrize("option", ["--help", "-h", "--help=Shoal"])
def test_help_comes_without_vllm_and_says_how_to_see_the_rest(option: str) -> None:
    done = serve_without_vllm("--port", "1", option)
    assert done.returncode == 0
    assert done.stderr == ""
    for named in ("--max-group", "--port", "--help=all", "--help=NAME"):
        assert named in done.stdout


def test_a_start_says_so_before_vllm_is_imported() -> None:
    done = serve_without_vllm("--port", "0")
    assert done.stdout == "Starting Shoal\n"
    assert "import of shoal.server.frontend.frontend halted" in done.stderr
