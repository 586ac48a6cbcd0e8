"""Options in a file: read as vLLM reads them, and refused as a whole if anything is wrong."""

import json
import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.server.commands import serve
from shoal.server.errors import UserError
from shoal.server.options import config_file, vllm_options
from shoal.server.options.serve_options import DEMO_CHECKPOINT, add_shoal_options


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    made = vllm_options.make_parser()
    add_shoal_options(made, {})
    return made


def written(tmp_path: Path, content: str | Mapping[str, Any], name: str = "serve.yaml") -> Path:
    path = tmp_path / name
    if not isinstance(content, str):
        content = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
    path.write_text(content)
    path.chmod(0o600)
    return path


def parsed(parser: ArgumentParser, path: Path, *argv: str) -> Namespace:
    """Return the arguments with a file's, which come after the first word."""
    words = [*argv[:1], "--config", str(path), *argv[1:]]
    return vllm_options.parse(parser, config_file.expand(parser, words))


def problems(parser: ArgumentParser, path: Path, *argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        config_file.expand(parser, ["--config", str(path), *argv])
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


OPTIONS: Mapping[str, Any] = {
    "model": "some/model",
    "port": 1234,
    "max_model_len": "16k",
    "gpu-memory-utilization": 0.5,
    "served-model-name": ["a", "b"],
    "enforce-eager": True,
    "enable-prefix-caching": False,
    "no-async-scheduling": True,
    "share-prefix-cache": True,
    "fake-engine": False,
    "chat-template": None,
    "max-num-seqs": [7],
    "api-key": ["k1"],
    "compilation-config": {"mode": 0, "pass_config": {"fuse_norm_quant": False}},
    "hf-overrides.rope_theta": 20000.0,
    "hf_overrides.name": "x",
    "allowed-origins": '["https://a.example"]',
    "max-group": 1,
    "seed": "-1",
}


# --- what a file says ---


@pytest.mark.parametrize("name", ["serve.yaml", "serve.yml", "serve.json"])
def test_a_file_says_what_it_says_to_vllm(
    parser: ArgumentParser, tmp_path: Path, name: str
) -> None:
    args = parsed(parser, written(tmp_path, OPTIONS, name))
    stock = parser.parse_args(["--config", str(written(tmp_path, OPTIONS))])
    assert vars(args) == vars(stock)
    assert (args.model, args.port, args.max_model_len) == ("some/model", 1234, 16000)
    assert args.enable_prefix_caching is False
    assert args.hf_overrides == {"rope_theta": 20000.0, "name": "x"}


def test_a_list_may_be_json(parser: ArgumentParser, tmp_path: Path) -> None:
    args = parsed(parser, written(tmp_path, {"allowed-methods": ["GET", "POST"]}))
    assert args.allowed_methods == ["GET", "POST"]


def test_parts_of_an_option_have_their_types(parser: ArgumentParser, tmp_path: Path) -> None:
    content = {"hf-overrides.a": True, "hf-overrides.b.c": [1, None], "hf-overrides.d": "e"}
    args = parsed(parser, written(tmp_path, content))
    assert args.hf_overrides == {"a": True, "b": {"c": [1, None]}, "d": "e"}


def test_an_empty_file_says_nothing(parser: ArgumentParser, tmp_path: Path) -> None:
    path = written(tmp_path, "# nothing yet\n")
    assert config_file.expand(parser, ["m", "--config", str(path), "--port", "1"]) == [
        *("m", "--port", "1")
    ]


def test_without_a_file_the_arguments_stay_as_they_are(parser: ArgumentParser) -> None:
    argv = ["m", "--config-format", "hf", "--", "x"]
    assert config_file.expand(parser, argv) == argv


@pytest.mark.parametrize(
    ("content", "argv", "dest", "value"),
    [
        ({"port": 1}, ["--port", "2"], "port", 2),
        ({"port": 1}, ["--port=2"], "port", 2),
        ({"tensor_parallel_size": 1}, ["-tp", "2"], "tensor_parallel_size", 2),
        ({"max-group": 4}, ["--max_group", "2"], "max_group", 2),
        ({"enforce-eager": True}, ["--no-enforce-eager"], "enforce_eager", False),
        (
            {"served-model-name": ["a", "b"]},
            ["--served-model-name", "c"],
            "served_model_name",
            ["c"],
        ),
        ({"middleware": "a"}, ["--middleware", "b"], "middleware", ["b"]),
        ({"hf-overrides": {"a": 1}}, ["--hf-overrides", '{"b": 2}'], "hf_overrides", {"b": 2}),
        ({"hf-overrides": {"a": 1}}, ["--hf-overrides.b", "2"], "hf_overrides", {"b": 2}),
        ({"hf-overrides.a": 1}, ["--hf-overrides", '{"b": 2}'], "hf_overrides", {"b": 2}),
        ({"hf-overrides.a": 1}, ["--hf-overrides.b", "2"], "hf_overrides", {"a": 1, "b": 2}),
        ({"hf-overrides.a": 1}, ["--hf-overrides.a", "2"], "hf_overrides", {"a": 2}),
    ],
)
def test_the_command_line_overrides_a_file(
    parser: ArgumentParser,
    tmp_path: Path,
    content: Mapping[str, Any],
    argv: list[str],
    dest: str,
    value: Any,
) -> None:
    path = written(tmp_path, content)
    for words in (["model", *argv, "--config", str(path)], [f"--config={path}", *argv]):
        args = vllm_options.parse(parser, config_file.expand(parser, words))
        assert getattr(args, dest) == value


def test_a_model_on_the_command_line_is_no_item_of_a_list(
    parser: ArgumentParser, tmp_path: Path
) -> None:
    path = written(tmp_path, {"model": "other", "served-model-name": ["a", "b"]})
    args = parsed(parser, path, "some/model", "--port", "1")
    assert (args.model_tag, args.served_model_name) == ("some/model", ["a", "b"])


def test_a_node_starts_with_the_options_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"model": str(DEMO_CHECKPOINT), "engines": 1, "max-num-seqs": 7})
    asked = serve.read_options(["--config", str(path), "--max-num-seqs", "9"])
    assert (asked.args.model, asked.args.engines, asked.args.max_num_seqs) == (
        *(str(DEMO_CHECKPOINT), 1, 9),
    )
    assert not asked.demo


def test_the_model_of_a_file_is_known_before_there_is_a_parser(tmp_path: Path) -> None:
    path = written(tmp_path, {"model": "some/model"})
    assert config_file.named_model(["--config", str(path)]) == "some/model"
    assert config_file.named_model(["--port", "1"]) is None


# --- what is refused ---


def test_all_that_is_wrong_is_told_at_once(parser: ArgumentParser, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "port: many\nport: 1x\nnosuch: s3cret\nenforce-eager: 1\nmax-group: 2\ndtype: float7\n",
    )
    found = problems(parser, path)
    assert [line.partition(":")[0] for line in found] == [
        *("port", "port", "nosuch", "enforce-eager", "dtype")
    ]
    assert found[0] == "port: it is given twice"
    assert found[2] == "nosuch: there is no such option"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"max-num-seqs": "many"}, "max-num-seqs: invalid int value: 'many'"),
        ({"max-num-seqs": 1.5}, "max-num-seqs: invalid int value: '1.5'"),
        ({"max-num-seqs": True}, "max-num-seqs: it takes a value"),
        ({"max-num-seqs": [1, 2]}, "max-num-seqs: invalid int value"),
        ({"max-num-seqs": {"a": 1}}, "max-num-seqs: invalid int value"),
        ({"model": ["a", "b"]}, "model: it takes one value"),
        ({"policy": {"name": "flying"}}, "policy: it takes one value"),
        ({"served-model-name": [["a"]]}, "served-model-name: it takes one value"),
        (
            {"admin-port": False},
            "admin-port: it takes a value; a word such as off stands in quotes",
        ),
        ({"admin-port": 70000}, "admin-port: '70000': it must be from 0 to 65535, or 'off'"),
        ({"enforce-eager": "true"}, "enforce-eager: it must be true or false"),
        ({"share-prefix-cache": 1}, "share-prefix-cache: it must be true or false"),
        ({"log-format": "xml"}, "log-format: 'xml': choose one of text, json"),
        ({"kv-cache-dtype": "fp9"}, "kv-cache-dtype: invalid choice: 'fp9'"),
        (
            {"compilation-config": {"nosuch": 1}},
            "compilation-config: nosuch: Unexpected keyword argument",
        ),
        (
            {"structured-outputs-config.backend": "nosuch"},
            "structured-outputs-config.backend: backend: Input should be 'auto'",
        ),
        ({"enforce-eage": True}, "enforce-eage: there is no such option"),
        ({"a\nb" + "c" * 100: 1}, f"a b{'c' * 37}: there is no such option"),
        ({"tp": 1}, "tp: there is no such option"),
        ({"model-tag": "a"}, "model-tag: there is no such option"),
        ({"help": True}, "help: it has no place in a file"),
        ({"config": "other.yaml"}, "config: it has no place in a file"),
        ({"max-group": 1, "max_group": 2}, "max_group: max-group sets the same"),
        ({"enforce-eager": True, "no-enforce-eager": True}, "no-enforce-eager: enforce-eager sets"),
        ({"hf-overrides": {}, "hf-overrides.a": 1}, "hf-overrides.a: hf-overrides sets the same"),
        ({"hf-overrides.a": 1, "hf_overrides.a": 1}, "hf_overrides.a: hf-overrides.a sets the"),
    ],
)
def test_an_option_that_is_wrong_is_named(
    parser: ArgumentParser, tmp_path: Path, content: dict[str, Any], problem: str
) -> None:
    path = written(tmp_path, yaml.safe_dump(content, sort_keys=False))
    (found,) = problems(parser, path)
    assert found.startswith(problem)


def test_an_option_of_a_file_that_the_command_line_overrides_is_checked_too(
    parser: ArgumentParser, tmp_path: Path
) -> None:
    path = written(tmp_path, {"port": "many"})
    assert problems(parser, path, "--port", "1") == ["port: invalid int value: 'many'"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("serve.yaml", "- port", "it must be a mapping"),
        ("serve.json", "[1]", "it must be a mapping"),
        ("serve.yaml", "port: [", "it is not valid YAML"),
        ("serve.toml", "port = 1", "ends in .yaml, .yml, .json"),
    ],
)
def test_what_is_no_file_of_options_is_refused_before_there_is_a_parser(
    tmp_path: Path, name: str, content: str, named: str
) -> None:
    path = written(tmp_path, content, name)
    with pytest.raises(UserError, match=named):
        config_file.named_model(["--config", str(path)])


@pytest.mark.parametrize(
    "argv", [["--config"], ["--config="], ["--config", "a.yaml", "--config=b.yaml"]]
)
def test_there_is_one_file(argv: list[str]) -> None:
    with pytest.raises(UserError, match="--config: it takes one file"):
        config_file.named_model(argv)


# --- secrets ---


@pytest.mark.parametrize(
    "content",
    [
        "api-key: {a: s3cret}",
        "api_key: [s3cret, [s3cret]]",
        "hf-token: [s3cret, s3cret]",
        "apikey: s3cret",
        "api-key: s3cret\napi_key: s3cret",
        "api-key: s3cret\nport: x",
        "api-key: *s3cret",
        "api-key: s3cret: s3cret",
    ],
)
def test_no_error_tells_a_secret(parser: ArgumentParser, tmp_path: Path, content: str) -> None:
    with pytest.raises(UserError) as caught:
        config_file.expand(parser, ["--config", str(written(tmp_path, content))])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [
        ({"api-key": "a"}, 0o644, True),
        ({"hf_token": "a"}, 0o604, True),
        ({"api-key": "a"}, 0o640, False),
        ({"port": 1}, 0o644, False),
    ],
)
def test_secrets_that_everyone_can_read_are_told_of(
    tmp_path: Path,
    content: dict[str, Any],
    mode: int,
    told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = written(tmp_path, content)
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        config_file.warn_of_secrets(["--config", str(path)])
    assert ("can be read by every user" in caplog.text) == told
