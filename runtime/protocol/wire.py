"""vLLM's front-end wire format, read and written without importing vLLM.

A front end (vLLM's ``AsyncMPClient``) sends a one-byte request type followed by msgpack frames, and
receives msgpack ``EngineCoreOutputs``. The structs here mirror ``vllm/v1/engine/__init__.py`` field
by field as far as Shoal needs them. Most are encoded as arrays, so the order of fields matters.
``tests/runtime/protocol/test_wire.py`` compares them with vLLM's own classes.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from shoal.policies.values.layouts import Layout, Unit, unit_of


class RequestType(bytes, enum.Enum):
    """First frame of a front end's message (vLLM ``EngineCoreRequestType``, except the last)."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    UNANSWERED = b"\x40"
    """Like ``ABORT``, for requests that the front end ended because the controller was silent."""


class FinishReason(enum.IntEnum):
    """Why a request ended (vLLM ``FinishReason``)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class Sampling(msgspec.Struct, frozen=True):
    """The part of vLLM's ``SamplingParams`` (a map) that scheduling uses."""

    max_tokens: int | None = 16
    """Upper bound of output tokens; None: up to the model's length."""
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether all tokens must be computed (vLLM ``Request.get_skip_reading_prefix_cache``)."""
        skips = self.skip_reading_prefix_cache
        return self.prompt_logprobs is not None if skips is None else skips


class Terms(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a front end asks of the task pool for a request.

    vLLM's format has no field for them, so they are sent as one of the request's trace headers.
    """

    deadline: float | None = None
    """When to give up the request if it still waits: seconds of the monotonic clock, which all
    processes of a node share."""
    caller: str | None = None
    """Name of the API key."""
    max_waiting: int | None = None
    """How many requests of this caller may wait."""
    max_held_bytes: int | None = None
    """How many bytes the requests of this caller may have together."""
    family: int | None = None
    """The front end's number for the HTTP request, if that has several engine requests."""
    begun: bool = False
    """Whether the response may have begun, so that an error can no longer replace it."""

    def added_to(self, trace_headers: Mapping[str, str] | None) -> dict[str, str]:
        """Return a request's trace headers with these terms."""
        return {**(trace_headers or {}), _TERMS_HEADER: msgspec.json.encode(self).decode()}


NOBODY = (1 << 31) - 1
"""The client of requests that no front end has sent, so that nobody reads their outputs."""
_NIL = b"\xc0"
_TERMS_HEADER = "x-shoal-terms"
_ATTEMPT_HEADER = "x-shoal-attempt"
_FIELD_BITS = 16
_FIELD_MASK = (1 << _FIELD_BITS) - 1


class Position(msgspec.Struct, frozen=True):
    """The part of vLLM's ``PlaceholderRange`` (a map) that says where an image's tokens begin."""

    offset: int


class Feature(msgspec.Struct, frozen=True):
    """The part of vLLM's ``MultiModalFeatureSpec`` (a map) that tells images apart."""

    identifier: str
    """A hash of the image, and of all else that decides what the encoder makes of it."""
    mm_position: Position


class RequestView(msgspec.Struct, array_like=True, frozen=True):
    """vLLM's ``EngineCoreRequest``. Fields that Shoal only forwards stay undecoded."""

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

    @property
    def prompt_header_bytes(self) -> int:
        """Length of the header of the prompt's array; 0 when there is no token list."""
        head = memoryview(self.prompt)[0] if len(bytes(self.prompt)) else 0xC0
        return 1 if 0x90 <= head <= 0x9F else {0xDC: 3, 0xDD: 5}.get(head, 0)

    @property
    def terms(self) -> Terms:
        """What the front end asks of the task pool for this request.

        Raises:
            msgspec.DecodeError: ``Terms.added_to`` did not make the header.
        """
        text = (self.headers or {}).get(_TERMS_HEADER)
        return Terms() if text is None else _terms_decoder.decode(text)

    @property
    def headers(self) -> dict[str, str] | None:
        """The request's trace headers, which each of its outputs carries."""
        return _trace_headers_decoder.decode(self.trace_headers) if self.trace_headers else None

    @property
    def cache_keys(self) -> bytes:
        """What must be equal, beside tokens and images, for two requests to share cached KV.

        These are the fields that vLLM puts into the hashes of all blocks, or into the first of them
        (``generate_block_hash_extra_keys``): LoRA, the cache salt, embeddings.
        """
        fields = (self.lora_request, self.cache_salt, self.prompt_embeds)
        return b"".join(bytes(raw) or _NIL for raw in fields)

    @property
    def features(self) -> Sequence[Feature]:
        """The images of the prompt, in its order."""
        return _features_decoder.decode(self.mm_features) or () if self.mm_features else ()

    def prompt_token_ids(self) -> list[int]:
        """Decode the prompt; an absent prompt gives an empty list."""
        return msgspec.msgpack.decode(self.prompt, type=list[int] | None) or []


class UtilityCall(msgspec.Struct, array_like=True, frozen=True):
    """Payload of a ``UTILITY`` request."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


class EventType(enum.IntEnum):
    """What happened to a request in its engine (vLLM ``EngineCoreEventType``)."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class Event(msgspec.Struct, frozen=True):
    """vLLM's ``EngineCoreEvent`` (a map)."""

    type: EventType
    timestamp: float
    """Monotonic seconds."""


class PrefillStats(msgspec.Struct, frozen=True):
    """vLLM's ``PrefillStats`` (a map): how a prompt was computed; sent with the first token."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens that were not computed because they were found in a cache."""
    num_local_cached_tokens: int = 0
    """Those of them that were in the engine's own prefix cache."""


PackedArray = tuple[str, tuple[int, ...], msgspec.msgpack.Ext]
"""A numpy or torch array as vLLM's ``MsgpackEncoder`` packs it: type, shape, content."""
Logprobs = tuple[PackedArray, PackedArray, PackedArray, None]
"""vLLM's ``LogprobsLists`` or ``LogprobsTensors``: ids, logprobs and the rank of the first id, with
one row per token."""
_RAW_VIEW = 3
"""vLLM's ``CUSTOM_TYPE_RAW_VIEW``."""


def packed(dtype: str, shape: tuple[int, ...], content: bytes) -> PackedArray:
    """Return an array in vLLM's format; ``content`` is row by row."""
    return dtype, shape, msgspec.msgpack.Ext(_RAW_VIEW, content)


class Output(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """vLLM's ``EngineCoreOutput``: new tokens of one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Logprobs | None = None
    new_prompt_logprobs_tensors: Logprobs | None = None
    pooling_output: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[Event] | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None


class UtilityOutput(msgspec.Struct, array_like=True, frozen=True):
    """vLLM's ``UtilityOutput``; ``result`` is ``(type information or None, value)``."""

    call_id: int
    failure_message: str | None = None
    result: tuple[None, Any] | None = None


class Outputs(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """vLLM's ``EngineCoreOutputs``: one message to one front end."""

    engine_index: int = 0
    """See ``unit_index``; 0: the controller is the sender."""
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
_raw_fields_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_HEADERS_FIELD = RequestView.__struct_fields__.index("trace_headers")
_abort_decoder = msgspec.msgpack.Decoder(list[str])
_utility_decoder = msgspec.msgpack.Decoder(UtilityCall)
_trace_headers_decoder = msgspec.msgpack.Decoder(dict[str, str] | None)
_terms_decoder = msgspec.json.Decoder(Terms)
_features_decoder = msgspec.msgpack.Decoder(list[Feature] | None)
_encoder = msgspec.msgpack.Encoder()


def decode_request(frames: Sequence[Any]) -> RequestView:
    """Read an ``ADD`` payload. Only the first frame is read; later ones carry tensors.

    Raises:
        msgspec.DecodeError: the frame is not an ``EngineCoreRequest``.
    """
    return _request_decoder.decode(frames[0])


def mark_attempt(frames: Sequence[Any], attempt: int) -> list[bytes]:
    """Return an ``ADD`` payload whose outputs tell that they are of this attempt.

    Args:
        frames: the request's payload.
        attempt: how often the request was started again; see ``attempt_of``.
    """
    fields, view = _raw_fields_decoder.decode(frames[0]), decode_request(frames)
    fields += [_raw(None)] * (_HEADERS_FIELD + 1 - len(fields))
    fields[_HEADERS_FIELD] = _raw({**(view.headers or {}), _ATTEMPT_HEADER: str(attempt)})
    return [_encoder.encode(fields), *map(bytes, frames[1:])]


def attempt_of(trace_headers: Mapping[str, str] | None) -> int:
    """Return the number of the attempt that produced an output; the first attempt is 0.

    A request is started again when its engine dies, and outputs of the dead engine may come later.
    Every output carries its request's trace headers, which tell the attempts apart.
    """
    return int(trace_headers.get(_ATTEMPT_HEADER, 0)) if trace_headers else 0


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))


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


def unit_index(unit: Unit) -> int:
    """Return the engine index in a unit's outputs. It encodes the first engine and the layout.

    vLLM's format has one number for the sender; ``sender_of`` decodes it in the front end.
    """
    layout = unit.layout
    index = unit.leader
    for field, degree in enumerate((layout.tp, layout.pp, layout.ep), 1):
        index |= degree << field * _FIELD_BITS
    return index


@lru_cache(maxsize=1024)
def sender_of(index: int) -> Unit | None:
    """Return the unit that sent outputs with this engine index; None: the controller sent them."""
    first, tp, pp, ep = (index >> field * _FIELD_BITS & _FIELD_MASK for field in range(4))
    if not tp:
        return None
    return unit_of(first, Layout(tp, pp, ep))


def encode_outputs(
    outputs: Sequence[Output], *, unit: Unit | None = None, timestamp: float = 0.0
) -> bytes:
    """Encode outputs of a unit, or of the controller, for one front end."""
    index = 0 if unit is None else unit_index(unit)
    return _encoder.encode(Outputs(index, list(outputs), timestamp=timestamp))


def encode_finish(request_ids: Iterable[str], reason: FinishReason) -> bytes:
    """Encode the end of requests, without further tokens, for one front end."""
    return encode_outputs([Output(id_, [], finish_reason=reason) for id_ in request_ids])


def encode_utility_result(call_id: int, result: Any) -> bytes:
    """Encode the answer to a utility call; ``result`` has only msgpack's own types."""
    return _encoder.encode(Outputs(utility_output=UtilityOutput(call_id, result=(None, result))))


def encode_utility_failure(call_id: int, message: str) -> bytes:
    """Encode the failure of a utility call; the front end raises ``message``."""
    return _encoder.encode(Outputs(utility_output=UtilityOutput(call_id, failure_message=message)))


def merge_ready_responses(
    responses: Sequence[bytes], *, max_model_len: int, num_blocks: int
) -> bytes:
    """Return the node's ready response: the first engine's, with the capacity of the node."""
    fields = msgspec.msgpack.decode(responses[0])
    return _encoder.encode({**fields, "max_model_len": max_model_len, "num_gpu_blocks": num_blocks})


def step_tokens(response: bytes) -> int:
    """Return the most tokens of a step, which an engine's ready response says."""
    return msgspec.msgpack.decode(response, type=ReadyResponse).max_num_batched_tokens


def _array_length(raw: memoryview) -> int:
    """Return the length in a msgpack array's header; 0 for any other value."""
    head = raw[0] if raw.nbytes else 0xC0
    if 0x90 <= head <= 0x9F:
        return head & 0x0F
    if head == 0xDC:
        return int.from_bytes(raw[1:3], "big")
    if head == 0xDD:
        return int.from_bytes(raw[1:5], "big")
    return 0


def encode_request(
    request_id: str,
    prompt: Any,
    sampling: Mapping[str, Any],
    *,
    client: int = 0,
    priority: int = 0,
    arrival_time: float = 0.0,
) -> bytes:
    """Return an ``EngineCoreRequest`` as vLLM encodes it.

    Args:
        request_id: the request.
        prompt: its token ids, or these in msgpack.
        sampling: the fields of vLLM's ``SamplingParams`` that differ from the defaults.
        client: the front end that reads the outputs.
        priority: lower numbers are urgent.
        arrival_time: when it came, seconds.
    """
    head = [request_id, prompt, None, sampling, None, arrival_time, None, None, None, None, None]
    return msgspec.msgpack.encode([*head, client, 0, priority])
