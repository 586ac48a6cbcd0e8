from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.platforms.interface import UnspecifiedPlatform

from shoal.server.errors import UserError
from shoal.server.frontend import vllm_app
from shoal.server.options import vllm_options
from shoal.server.options.refused_options import REFUSED
from shoal.server.options.serve_options import (
    DEMO_CHECKPOINT,
    add_shoal_options,
    check_options,
)


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    made = vllm_options.make_parser()
    add_shoal_options(made, {})
    return made


def parse(parser: ArgumentParser, *argv: str) -> Namespace:
    args = vllm_options.parse(parser, list(argv))
    check_options(args, parser.get_default)
    return args


@pytest.mark.parametrize(
    ("model", "root"), [(str(DEMO_CHECKPOINT), "a name"), ("some/model-of-the-hub", None)]
)
def test_a_model_in_a_directory_does_not_say_where_it_is(model: str, root: str | None) -> None:
    served = BaseModelPath(name="a name", model_path=model)
    vllm_app._hide_directory(SimpleNamespace(base_model_paths=[served]), model)
    assert served == BaseModelPath(name="a name", model_path=root or model)


def test_a_build_for_gpus_without_one_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_options, "current_platform", UnspecifiedPlatform())
    with pytest.raises(UserError, match=r"^no GPU found: .*nvidia-smi.*--gpus all[^\n]*$"):
        vllm_options.make_parser()


def test_every_refused_option_is_one_of_vllms(parser: ArgumentParser) -> None:
    assert set(REFUSED) <= {action.dest for action in parser._actions}


def test_the_defaults_are_not_refused(parser: ArgumentParser) -> None:
    assert parse(parser, "model").model_tag == "model"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--enable-lora", "--fully-sharded-loras"], "--fully-sharded-loras"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["-tp", "2"], "--tensor-parallel-size"),
        (["--data-parallel-size", "2"], "--data-parallel-size"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size"),
        (["--enable-expert-parallel"], "--enable-expert-parallel"),
        (["--quantization", "awq"], "--quantization"),
        (["--speculative-config", '{"num_speculative_tokens": 1}'], "without a method: not"),
        (["--speculative-config", '{"method": "medusa", "model": "m"}'], "method medusa: not"),
        (["--spec-method", "ngram"], "--spec-method: use --speculative-config"),
        (["--kv-transfer-config", '{"kv_role": "kv_both"}'], "--kv-transfer-config"),
        (["--runner", "pooling"], "--runner pooling"),
        (["--limit-mm-per-prompt", '{"image": 2, "video": 1}'], "--limit-mm-per-prompt: video"),
        (["--enable-mm-embeds"], "--enable-mm-embeds"),
        (["--allowed-local-media-path", "/"], "--allowed-local-media-path"),
        (["--no-such-option"], "--no-such-option"),
        (["--max-model-len", "long"], "--max-model-len"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "nosuch"], "nosuch"),
        (["--chat-template", "/no/such/template"], "/no/such/template"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_option(
    parser: ArgumentParser, argv: list[str], named: str
) -> None:
    with pytest.raises(UserError) as caught:
        parse(parser, "model", *argv)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"max_model_len": 10**6}, "max_model_len"), ({"dtype": "float7"}, "dtype")],
)
def test_vllms_refusals_are_one_line(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        vllm_options.make_vllm_config(AsyncEngineArgs(model=str(DEMO_CHECKPOINT), **wrong))
    assert "\n" not in str(caught.value)


def test_a_model_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: AsyncEngineArgs) -> None:
        try:
            raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder.")
        except LocalEntryNotFoundError as error:
            raise OSError("We could not connect.") from error

    monkeypatch.setattr(vllm_options, "dp_config", read)
    with pytest.raises(UserError, match=r"^some/model: no such directory, not downloaded yet, and"):
        vllm_options.make_vllm_config(SimpleNamespace(model="some/model"))
