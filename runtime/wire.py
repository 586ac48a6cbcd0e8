"""vLLM's front-end wire format, read and written without importing vLLM.

A front end (vLLM's ``AsyncMPClient``) sends a one-byte request type followed by msgpack frames, and
receives msgpack ``EngineCoreOutputs``. The structs here mirror ``vllm/v1/engine/__init__.py`` field
by field as far as Shoal needs them: they are encoded as arrays, so positions are the format.
``tests/runtime/test_wire.py`` holds them against vLLM's own classes.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec


class RequestType(bytes, enum.Enum):
    """First frame of what a front end sends (vLLM ``EngineCoreRequestType``)."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"


class FinishReason(enum.IntEnum):
    """Why a request ended (vLLM ``FinishReason``)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class Sampling(msgspec.Struct, frozen=True):
    """The part of vLLM's ``SamplingParams`` (a map) that scheduling looks at."""

    max_tokens: int | None = 16
    """Upper bound of output tokens; None means up to the model's length."""


class RequestView(msgspec.Struct, array_like=True, frozen=True):
    """vLLM's ``EngineCoreRequest``; fields that Shoal only forwards stay undecoded."""

    request_id: str
    prompt: msgspec.Raw
    mm_features: msgspec.Raw
    sampling_params: Sampling | None
    pooling_params: msgspec.Raw
    arrival_time: float
    lora_request: msgspec.Raw
    cache_salt: msgspec.Raw
    data_parallel_rank: msgspec.Raw
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    prompt_is_token_ids: msgspec.Raw = msgspec.Raw()
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: msgspec.Raw = msgspec.Raw()
    resumable: bool = False
    external_req_id: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, read from the array's header; 0 when there is no token list."""
        return _array_length(memoryview(self.prompt))

    def prompt_token_ids(self) -> list[int]:
        """Decode the prompt; an absent one is an empty list."""
        return msgspec.msgpack.decode(self.prompt, type=list[int] | None) or []


class UtilityCall(msgspec.Struct, array_like=True, frozen=True):
    """Payload of a ``UTILITY`` request."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


class PrefillStats(msgspec.Struct, frozen=True):
    """vLLM's ``PrefillStats`` (a map): how a prompt was computed, sent with its first token."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0


class Output(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """vLLM's ``EngineCoreOutput``: new tokens of one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: None = None
    new_prompt_logprobs_tensors: None = None
    pooling_output: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    trace_headers: None = None
    prefill_stats: PrefillStats | None = None


class UtilityOutput(msgspec.Struct, array_like=True, frozen=True):
    """vLLM's ``UtilityOutput``; ``result`` is ``(type information or None, value)``."""

    call_id: int
    failure_message: str | None = None
    result: tuple[None, Any] | None = None


class Outputs(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """vLLM's ``EngineCoreOutputs``: one message to one front end."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: None = None
    timestamp: float = 0.0
    """Monotonic seconds; 0 lets the receiver fill it in."""
    utility_output: UtilityOutput | None = None


class ReadyResponse(msgspec.Struct, frozen=True):
    """vLLM's ``EngineCoreReadyResponse`` (a map): the first message to every front end."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str
    vllm_version: str
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    dp_stats_address: str | None = None
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int = 0
    supports_lora: bool = False
    max_loras: int = 0


_request_decoder = msgspec.msgpack.Decoder(RequestView)
_abort_decoder = msgspec.msgpack.Decoder(list[str])
_utility_decoder = msgspec.msgpack.Decoder(UtilityCall)
_encoder = msgspec.msgpack.Encoder()


def decode_request(frames: Sequence[Any]) -> RequestView:
    """Read an ``ADD`` payload. Only the first frame is looked at; later ones carry tensors.

    Raises:
        msgspec.DecodeError: the frame is not an ``EngineCoreRequest``.
    """
    return _request_decoder.decode(frames[0])


def decode_abort(frames: Sequence[Any]) -> list[str]:
    """Read an ``ABORT`` payload: request ids.

    Raises:
        msgspec.DecodeError: the frame is not a list of ids.
    """
    return _abort_decoder.decode(frames[0])


def decode_utility(frames: Sequence[Any]) -> UtilityCall:
    """Read a ``UTILITY`` payload.

    Raises:
        msgspec.DecodeError: the frame is not a utility call.
    """
    return _utility_decoder.decode(frames[0])


def encode_outputs(outputs: Sequence[Output], *, engine: int = 0, timestamp: float = 0.0) -> bytes:
    """Encode new tokens that engine ``engine`` made for one front end."""
    return _encoder.encode(Outputs(engine_index=engine, outputs=list(outputs), timestamp=timestamp))


def encode_finish(request_ids: Iterable[str], reason: FinishReason) -> bytes:
    """Encode the end of requests without a further token, for one front end."""
    return encode_outputs([Output(id_, [], finish_reason=reason) for id_ in request_ids])


def encode_utility_result(call_id: int, result: Any) -> bytes:
    """Encode the answer to a utility call; ``result`` is made of msgpack's own types."""
    return _encoder.encode(Outputs(utility_output=UtilityOutput(call_id, result=(None, result))))


def encode_utility_failure(call_id: int, message: str) -> bytes:
    """Encode the failure of a utility call; the front end raises ``message``."""
    return _encoder.encode(Outputs(utility_output=UtilityOutput(call_id, failure_message=message)))


def merge_ready_responses(
    responses: Sequence[bytes], *, max_model_len: int, num_blocks: int
) -> bytes:
    """Return the node's ready response: the first engine's, with the node's own capacity."""
    fields = msgspec.msgpack.decode(responses[0])
    return _encoder.encode({**fields, "max_model_len": max_model_len, "num_gpu_blocks": num_blocks})


def _array_length(raw: memoryview) -> int:
    """Return the length in a msgpack array's header; 0 for anything that is not an array."""
    head = raw[0] if raw.nbytes else 0xC0
    if 0x90 <= head <= 0x9F:
        return head & 0x0F
    if head == 0xDC:
        return int.from_bytes(raw[1:3], "big")
    if head == 0xDD:
        return int.from_bytes(raw[1:5], "big")
    return 0
