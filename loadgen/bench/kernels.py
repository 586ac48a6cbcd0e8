"""What a recorded step spent its time on: kinds of kernels, and whose an instant is.

The kinds are those of Shift Parallelism's Figure 13, finer: it tells the model's time from
all-reduce, attention and all-to-all.
"""

import enum
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec


class Kind(enum.StrEnum):
    """What a kernel, or an operator on a CPU, is there for."""

    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    COMMUNICATION = "other communication"
    GEMM = "GEMM"
    ATTENTION = "attention"
    OTHER = "other kernels"
    HOST = "host"
    """None: the device waits for the host."""


_NAMES: Sequence[tuple[str, Kind]] = (
    # What the compiler has fused is named after all that went into it, vLLM's wrappers of
    # collectives and of attention after what they call.
    (r"^triton_(poi|per|red|for)_fused", Kind.OTHER),
    (r"^vllm::unified_", Kind.OTHER),
    (r"reshape_and_cache", Kind.OTHER),
    (r"all_?reduce|cross_device_reduce", Kind.ALL_REDUCE),
    (r"sendrecv|all_?to_?all", Kind.ALL_TO_ALL),
    # Those of runtime/engine/sequence/peer_exchange_kernel.py; to wait for members is torch's
    # barrier.
    (r"^_(give|take)_kernel$", Kind.ALL_TO_ALL),
    (r"all_?gather", Kind.ALL_GATHER),
    (r"^nccl|^c10d::|^gloo:", Kind.COMMUNICATION),
    (
        r"flash|fmha|attention|merge_attn_states|batch(prefill|decode)with|^reduce_segments",
        Kind.ATTENTION,
    ),
    (r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|matmul|scaled_mm|^triton_.*mm", Kind.GEMM),
    # Those of runtime/engine/kernels/partitioned_linear_kernel.py.
    (r"^_(vector|matrix)_kernel$", Kind.GEMM),
    (r"^aten::(mm|addmm|bmm|baddbmm|linear)$|::onednn_|^mkldnn::.*linear", Kind.GEMM),
)
_PATTERNS = [(re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in _NAMES]


def kind_of(name: str) -> Kind:
    """Return the kind of a kernel on a GPU, or of an operator on a CPU, by its name in a trace."""
    return next((kind for pattern, kind in _PATTERNS if pattern.search(name)), Kind.OTHER)


@dataclass(frozen=True, slots=True)
class Activity:
    """One kernel or operator: its kind, and when it ran, in seconds since the epoch."""

    kind: Kind
    begin: float
    end: float


class _Event(msgspec.Struct):
    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    """Microseconds after the trace's base time."""
    dur: float = 0.0


class _Trace(msgspec.Struct):
    baseTimeNanoseconds: int  # noqa: N815 - the format's name
    traceEvents: list[_Event]  # noqa: N815


ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of ``torch.profiler``'s events of what ran on a GPU."""


def read_trace(path: Path) -> list[Activity]:
    """Return what the device did, in no order; without a GPU what the host did.

    Raises:
        ValueError: the file is no trace of ``torch.profiler``.
    """
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=_Trace, strict=False)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    complete = [event for event in trace.traceEvents if event.ph == "X"]
    on_device = [event for event in complete if event.cat in ON_DEVICE]
    base = trace.baseTimeNanoseconds
    found = []
    for event in on_device or filter(_is_operator, complete):
        begin = base / 1e9 + event.ts / 1e6
        found.append(Activity(kind_of(event.name), begin, begin + event.dur / 1e6))
    return found


def _is_operator(event: _Event) -> bool:
    # A collective over gloo, which has a thread of its own, is an annotation.
    return event.cat == "cpu_op" or event.name.startswith("gloo:")


_PRECEDENCE = (
    *(Kind.GEMM, Kind.ATTENTION, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.ALL_GATHER),
    *(Kind.COMMUNICATION, Kind.OTHER),
)


def divided(activities: Iterable[Activity], begin: float, end: float) -> dict[Kind, float]:
    """Return the seconds between two moments by kind; they add up to all of them.

    An instant in which several kinds ran is the first one's in this order: GEMMs, attention, the
    collectives, others. So communication behind a GEMM counts as hidden, and what an operator calls
    counts as what it is.
    """
    changes = []
    for activity in activities:
        first, last = max(begin, activity.begin), min(end, activity.end)
        if first < last:
            changes += [(first, 1, activity.kind), (last, -1, activity.kind)]
    found = dict.fromkeys(Kind, 0.0)
    running: Counter[Kind] = Counter()
    now = begin
    for moment, change, kind in sorted(changes):
        found[_foremost(running)] += moment - now
        running[kind] += change
        now = moment
    found[_foremost(running)] += end - now
    return found


def _foremost(running: Counter[Kind]) -> Kind:
    return next((kind for kind in _PRECEDENCE if running[kind]), Kind.HOST)
