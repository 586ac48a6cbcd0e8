"""Shoal's view of vLLM's wire format, held against vLLM's own classes in both directions."""

import msgspec
import pytest

from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.runtime.protocol import wire
from tests.units import tp

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def vllm():
    """Import what a front end uses, once."""
    from types import SimpleNamespace

    import torch
    from vllm import SamplingParams
    from vllm.v1 import engine, serial_utils

    return SimpleNamespace(
        torch=torch, SamplingParams=SamplingParams, engine=engine, serial=serial_utils
    )


def request_frames(vllm, **fields):
    values = {
        "request_id": "r-1",
        "prompt_token_ids": [5, 6, 7],
        "mm_features": None,
        "sampling_params": vllm.SamplingParams(max_tokens=9),
        "pooling_params": None,
        "arrival_time": 1.5,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    } | fields
    request = vllm.engine.EngineCoreRequest(**values)
    return [bytes(frame) for frame in vllm.serial.MsgpackEncoder().encode(request)]


def decode_outputs(vllm, frame):
    return vllm.serial.MsgpackDecoder(vllm.engine.EngineCoreOutputs).decode([frame])


def test_request_types_are_vllms(vllm):
    theirs = {kind.value for kind in vllm.engine.EngineCoreRequestType}
    assert wire.RequestType.UNANSWERED.value not in theirs
    for kind in set(wire.RequestType) - {wire.RequestType.UNANSWERED}:
        assert vllm.engine.EngineCoreRequestType[kind.name].value == kind.value


def test_finish_reasons_are_vllms(vllm):
    for reason in wire.FinishReason:
        assert vllm.engine.FinishReason[reason.name].value == reason.value


@pytest.mark.parametrize("own", [None, {"traceparent": "00-a-b-01"}])
def test_terms_travel_among_the_trace_headers(vllm, own):
    terms = wire.Terms(deadline=12.5, caller="batch", max_waiting=3)
    frames = request_frames(vllm, trace_headers=terms.added_to(own))
    assert wire.decode_request(frames).terms == terms
    # vLLM's engine reads the request with them.
    request = vllm.serial.MsgpackDecoder(vllm.engine.EngineCoreRequest).decode(frames)
    assert (own or {}).items() <= request.trace_headers.items()


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "00-a-b-01"}])
def test_a_request_without_terms_asks_for_nothing(vllm, headers):
    frames = request_frames(vllm, trace_headers=headers)
    assert wire.decode_request(frames).terms == wire.Terms()


def test_request_with_every_field_at_its_default(vllm):
    view = wire.decode_request(request_frames(vllm))
    assert (view.request_id, view.prompt_tokens, view.prompt_token_ids()) == ("r-1", 3, [5, 6, 7])
    assert (view.client_index, view.priority, view.external_req_id) == (0, 0, None)
    assert view.sampling_params.max_tokens == 9


def test_request_with_fields_behind_the_defaults(vllm):
    view = wire.decode_request(
        request_frames(
            vllm,
            client_index=3,
            priority=-7,
            external_req_id="outside",
            trace_headers={"a": "b"},
            session_id="s",
        )
    )
    assert (view.client_index, view.priority, view.external_req_id) == (3, -7, "outside")


@pytest.mark.parametrize("length", [0, 1, 15, 16, 65_535, 65_536, 100_000])
def test_prompt_length_is_read_from_the_header(vllm, length):
    view = wire.decode_request(request_frames(vllm, prompt_token_ids=[70_000] * length))
    assert view.prompt_tokens == length
    assert len(view.prompt_token_ids()) == length


def test_absent_prompt_has_no_tokens(vllm):
    view = wire.decode_request(request_frames(vllm, prompt_token_ids=None))
    assert (view.prompt_tokens, view.prompt_token_ids()) == (0, [])


def test_request_of_several_frames(vllm):
    embeds = vllm.torch.zeros(2000, 8)
    frames = request_frames(vllm, prompt_embeds=embeds, client_index=1)
    assert len(frames) > 1
    assert wire.decode_request(frames).client_index == 1


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch says it once
def test_images_are_told_apart_without_their_tensors(vllm):
    from vllm.multimodal import inputs

    def image(name, offset, size):
        pixels = inputs.MultiModalFieldElem(
            vllm.torch.zeros(size), inputs.MultiModalSharedField(batch_size=1)
        )
        return inputs.MultiModalFeatureSpec(
            inputs.MultiModalKwargsItem({"pixels": pixels}),
            "image",
            name,
            inputs.PlaceholderRange(offset, 3, is_embed=vllm.torch.tensor([False, True, True])),
            name,
        )

    frames = request_frames(vllm, mm_features=[image("a", 1, 4), image("b", 7, 5000)])
    assert len(frames) > 1
    found = wire.decode_request(frames).features
    assert [(each.identifier, each.mm_position.offset) for each in found] == [("a", 1), ("b", 7)]
    again = wire.mark_attempt(frames, 1)
    request = vllm.serial.MsgpackDecoder(vllm.engine.EngineCoreRequest).decode(again)
    assert [each.data["pixels"].data.shape for each in request.mm_features] == [(4,), (5000,)]
    assert not list(wire.decode_request(request_frames(vllm)).features)


@pytest.mark.parametrize(("given", "seen"), [(None, None), (16, 16), (1, 1)])
def test_max_tokens_survives_omitted_defaults(vllm, given, seen):
    params = vllm.SamplingParams(max_tokens=given, temperature=0.5, stop=["x"], seed=4)
    view = wire.decode_request(request_frames(vllm, sampling_params=params))
    assert view.sampling_params.max_tokens == seen


def test_request_that_is_not_one_is_refused(vllm):
    with pytest.raises(msgspec.DecodeError):
        wire.decode_request([msgspec.msgpack.encode(["only-an-id"])])


def test_abort_and_utility_payloads(vllm):
    encoder = vllm.serial.MsgpackEncoder()
    assert wire.decode_abort(encoder.encode(["a", "b"])) == ["a", "b"]
    call = wire.decode_utility(encoder.encode((2, 1 << 63, "is_sleeping", ())))
    assert (call.client_index, call.call_id, call.method) == (2, 1 << 63, "is_sleeping")


def test_tokens_reach_vllm(vllm):
    outputs = decode_outputs(
        vllm,
        wire.encode_outputs(
            [
                wire.Output("a", [1, 2], prefill_stats=wire.PrefillStats(4, 4)),
                wire.Output("b", [3], finish_reason=wire.FinishReason.LENGTH, stop_reason="x"),
            ],
            timestamp=2.5,
        ),
    )
    first, second = outputs.outputs
    assert outputs.timestamp == 2.5
    assert (first.request_id, first.new_token_ids, first.finish_reason) == ("a", [1, 2], None)
    assert first.prefill_stats.num_prompt_tokens == 4
    assert second.finish_reason is vllm.engine.FinishReason.LENGTH
    assert second.stop_reason == "x"


def test_finish_reaches_vllm(vllm):
    frame = wire.encode_finish(["a", "b"], wire.FinishReason.ERROR)
    outputs = decode_outputs(vllm, frame).outputs
    assert [o.request_id for o in outputs] == ["a", "b"]
    assert {o.finish_reason for o in outputs} == {vllm.engine.FinishReason.ERROR}
    assert all(o.finished and o.new_token_ids == [] for o in outputs)


@pytest.mark.parametrize("result", [True, None, ("generate",), {"a": [1]}])
def test_utility_result_reaches_vllm(vllm, result):
    output = decode_outputs(vllm, wire.encode_utility_result(11, result)).utility_output
    assert (output.call_id, output.failure_message) == (11, None)
    assert output.result.result == (list(result) if isinstance(result, tuple) else result)


def test_utility_failure_reaches_vllm(vllm):
    output = decode_outputs(vllm, wire.encode_utility_failure(12, "no such call")).utility_output
    assert (output.call_id, output.failure_message) == (12, "no such call")


def test_merged_ready_response_is_vllms(vllm):
    one = wire.ReadyResponse(
        max_model_len=100,
        num_gpu_blocks=10,
        block_size=16,
        dtype="float32",
        vllm_version="0.32.0",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        instance_id="i",
    )
    merged = wire.merge_ready_responses(
        [msgspec.msgpack.encode(one)] * 2, max_model_len=200, num_blocks=20
    )
    response = msgspec.msgpack.decode(merged, type=vllm.engine.EngineCoreReadyResponse)
    assert (response.max_model_len, response.num_gpu_blocks) == (200, 20)
    assert (response.block_size, response.max_num_seqs, response.instance_id) == (16, 8, "i")


@pytest.mark.parametrize(
    "unit",
    [
        alone(0),
        alone(7),
        tp(2, 3),
        tp(*range(8)),
        Unit((4, 5, 6, 7), Layout(tp=2, pp=2)),
        Unit((0, 1, 2, 3), Layout(tp=4, ep=4)),
    ],
)
def test_an_index_tells_the_unit_and_its_layout(unit: Unit) -> None:
    assert wire.sender_of(wire.unit_index(unit)) == unit


def test_the_controller_is_no_unit() -> None:
    assert wire.sender_of(0) is None
