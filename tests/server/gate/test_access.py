from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from shoal.server.errors import UserError
from shoal.server.gate.access import (
    Access,
    MetricsAccess,
    add_access_options,
    admin_address,
    check_environment,
    take_access,
)
from shoal.server.gate.keys import plain_key
from tests.server.node import key_file


def parsed(*argv: str, port: int = 8000, api_key: list[str] | None = None) -> Namespace:
    parser = ArgumentParser()
    add_access_options(parser.add_argument_group())
    args = parser.parse_args(argv)
    vars(args).update(port=port, api_key=api_key, prefix_caching_hash_algo="sha256")
    return args


# --- where the admin API is ---


@pytest.mark.parametrize(
    ("argv", "port", "address"),
    [
        ((), 8000, ("127.0.0.1", 8001)),
        ((), 0, ("127.0.0.1", 0)),
        (("--admin-port", "9000"), 8000, ("127.0.0.1", 9000)),
        (("--admin-port", "0"), 8000, ("127.0.0.1", 0)),
        (("--admin-port", "off"), 8000, None),
        (("--admin-host", "::1"), 8000, ("::1", 8001)),
        (("--admin-host", "localhost"), 8000, ("localhost", 8001)),
        (("--admin-host", "127.0.0.9"), 8000, ("127.0.0.9", 8001)),
    ],
)
def test_the_admin_api_is_on_this_machine(
    argv: tuple[str, ...], port: int, address: tuple[str, int] | None
) -> None:
    assert admin_address(parsed(*argv, port=port), needs_key=False) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.com", ""])
def test_elsewhere_it_needs_keys_of_its_own(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--admin-key-file"):
        admin_address(parsed("--admin-host", host), needs_key=False)
    keys = str(key_file(tmp_path / "keys", "k"))
    args = parsed("--admin-host", host, "--admin-key-file", keys)
    assert admin_address(args, needs_key=True) == (host, 8001)


def test_beside_an_api_with_keys_it_has_its_own_or_is_off(tmp_path: Path) -> None:
    assert admin_address(parsed(), needs_key=True) is None
    with pytest.raises(UserError, match="--admin-port: with API keys"):
        admin_address(parsed("--admin-port", "9000"), needs_key=True)
    keys = str(key_file(tmp_path / "keys", "k"))
    assert admin_address(parsed("--admin-key-file", keys), needs_key=True) is not None


def test_the_port_after_the_last_is_none() -> None:
    with pytest.raises(UserError, match="--admin-port"):
        admin_address(parsed(port=65535), needs_key=False)


@pytest.mark.parametrize("port", ["-1", "65536", "on", ""])
def test_a_port_is_a_number_or_off(port: str) -> None:
    with pytest.raises(SystemExit):
        parsed("--admin-port", port)
    with pytest.raises(SystemExit):
        parsed("--metrics-port", port)
    with pytest.raises(SystemExit):
        parsed("--metrics-port", "off")


# --- keys ---


def test_keys_of_the_command_line_win_over_the_environment_s() -> None:
    environ = {"VLLM_API_KEY": "env"}
    assert take_access(parsed(api_key=["a", "b"]), environ).keys == (
        plain_key("a"),
        plain_key("b"),
    )
    assert take_access(parsed(), {"VLLM_API_KEY": "env"}).keys == (plain_key("env"),)
    assert not take_access(parsed(), {}).needs_key


def test_their_text_is_forgotten(tmp_path: Path) -> None:
    args, environ = parsed(api_key=["s3cret"]), {"VLLM_API_KEY": "0ther", "HOME": "/"}
    access = take_access(args, environ)
    assert environ == {"HOME": "/"}
    assert "s3cret" not in repr((vars(args), access))


def test_keys_of_a_file_come_on_top(tmp_path: Path) -> None:
    path = key_file(tmp_path / "keys.json", "k")
    access = take_access(parsed("--api-key-file", str(path), api_key=["a"]), {})
    assert (access.keys, access.key_file) == ((plain_key("a"),), path)
    assert access.needs_key
    assert Access(key_file=path).needs_key


@pytest.mark.parametrize("option", ["--api-key-file", "--admin-key-file"])
def test_a_wrong_file_is_refused_at_the_start(option: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("[]")
    with pytest.raises(UserError, match="holds no key"):
        take_access(parsed(option, str(path)), {})


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(UserError, match="--api-key: a key is empty"):
        take_access(parsed(api_key=["one", ""]), {})


def test_stored_responses_are_for_one_key_only(tmp_path: Path) -> None:
    environ = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    take_access(parsed(api_key=["a"]), dict(environ))
    for args in (
        parsed(api_key=["a", "b"]),
        parsed("--api-key-file", str(key_file(tmp_path / "keys", "k"))),
    ):
        with pytest.raises(UserError, match="VLLM_ENABLE_RESPONSES_API_STORE"):
            take_access(args, dict(environ))


def test_the_rest() -> None:
    args = parsed("--metrics", "open", "--share-prefix-cache")
    access = take_access(args, {})
    assert (access.metrics, access.share_prefix_cache) == (MetricsAccess.OPEN, True)
    default = take_access(parsed(), {})
    assert (default.metrics, default.share_prefix_cache) == (MetricsAccess.KEY, False)


@pytest.mark.parametrize(("value", "allowed"), [(None, True), ("0", True), ("1", False)])
def test_serialisation_that_runs_code_is_refused(value: Any, allowed: bool) -> None:
    environ = {} if value is None else {"VLLM_ALLOW_INSECURE_SERIALIZATION": value}
    if allowed:
        check_environment(environ)
        return
    with pytest.raises(UserError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        check_environment(environ)
