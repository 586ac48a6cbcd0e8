"""The fake engine's probabilities, as vLLM's own classes read them."""

from typing import Any

import pytest

from shoal.runtime.engine.fake import fake_logprobs
from shoal.runtime.protocol import wire

engine = pytest.importorskip("vllm.v1.engine")
serial = pytest.importorskip("vllm.v1.serial_utils")


def read(**fields: Any) -> Any:
    """Return what a front end reads of an output with these fields."""
    frame = wire.encode_outputs([wire.Output("a", [7, 300], **fields)])
    decoder = serial.MsgpackDecoder(engine.EngineCoreOutputs)
    return decoder.decode([bytearray(frame)]).outputs[0]  # torch wants to be able to write


def lists(sampling: wire.Sampling) -> Any:
    return read(new_logprobs=fake_logprobs.of_outputs([7, 300], sampling)).new_logprobs


def tensors(prompt: list[int], sampling: wire.Sampling) -> Any:
    made = fake_logprobs.of_prompt(prompt, sampling)
    return read(new_prompt_logprobs_tensors=made).new_prompt_logprobs_tensors


def test_nobody_is_told_who_did_not_ask() -> None:
    output = read(
        new_logprobs=fake_logprobs.of_outputs([7], wire.Sampling()),
        new_prompt_logprobs_tensors=fake_logprobs.of_prompt([7, 8], wire.Sampling()),
    )
    assert (output.new_logprobs, output.new_prompt_logprobs_tensors) == (None, None)


def test_a_row_is_the_token_and_the_likeliest_of_which_it_is_the_first() -> None:
    found = lists(wire.Sampling(logprobs=3))
    assert found.logprob_token_ids.tolist() == [[7, 7, 0, 1], [300, 300, 0, 1]]
    assert found.logprobs.tolist() == [[-0.5, -0.5, -1.5, -1.5]] * 2
    assert found.sampled_token_ranks.tolist() == [1, 1]


def test_without_others_it_is_the_token_alone() -> None:
    assert lists(wire.Sampling(logprobs=0)).logprob_token_ids.tolist() == [[7], [300]]


def test_the_others_may_be_named() -> None:
    found = lists(wire.Sampling(logprob_token_ids=[5, 300]))
    assert found.logprob_token_ids.tolist() == [[7, 5, 300], [300, 5, 300]]


def test_of_a_prompt_all_tokens_have_one_but_the_first() -> None:
    found = tensors([4, 5, 6], wire.Sampling(prompt_logprobs=1))
    assert found.logprob_token_ids.tolist() == [[5, 5], [6, 6]]
    assert found.logprobs.tolist() == [[-0.5, -0.5]] * 2
    assert found.selected_token_ranks.tolist() == [1, 1]
    assert tensors([4], wire.Sampling(prompt_logprobs=1)) is None
