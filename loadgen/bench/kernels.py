"""Sorts the time of a recorded step by kinds of kernels.

The kinds are finer than in Shift Parallelism's Figure 13, which divides the time into the model's,
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
    """The purpose of a kernel, or of an operator on a CPU."""

    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    COMMUNICATION = "other communication"
    GEMM = "GEMM"
    ATTENTION = "attention"
    OTHER = "other kernels"
    HOST = "host"
    """No kernel runs: the device waits for the host."""


_NAMES: Sequence[tuple[str, Kind]] = (
    # Fused kernels are named after all operations in them, and vLLM's wrappers of collectives and
    # attention after what they call: neither name tells the kind.
    (r"^triton_(poi|per|red|for)_fused", Kind.OTHER),
    (r"^vllm::unified_", Kind.OTHER),
    (r"reshape_and_cache", Kind.OTHER),
    (r"all_?reduce|cross_device_reduce", Kind.ALL_REDUCE),
    (r"sendrecv|all_?to_?all", Kind.ALL_TO_ALL),
    # Kernels of runtime/engine/sequence/peer_exchange_kernel.py; members wait in torch's barrier.
    (r"^_(give|take)_kernel$", Kind.ALL_TO_ALL),
    (r"all_?gather", Kind.ALL_GATHER),
    (r"^nccl|^c10d::|^gloo:", Kind.COMMUNICATION),
    (
        r"flash|fmha|attention|merge_attn_states|batch(prefill|decode)with|^reduce_segments",
        Kind.ATTENTION,
    ),
    (r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|matmul|scaled_mm|^triton_.*mm", Kind.GEMM),
    # vLLM's Triton kernel for routed experts.
    (r"^fused_moe_kernel$", Kind.GEMM),
    # Kernels of runtime/engine/kernels/partitioned_linear_kernel.py.
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
"""Categories of ``torch.profiler``'s events that ran on a GPU."""


def read_trace(path: Path) -> list[Activity]:
    """Return the device's activities in no order; without a GPU, the host's.

    Raises:
        ValueError: the file is not a trace of ``torch.profiler``.
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
    # gloo runs collectives in its own thread; the trace has annotations for them.
    return event.cat == "cpu_op" or event.name.startswith("gloo:")


_PRECEDENCE = (
    *(Kind.GEMM, Kind.ATTENTION, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.ALL_GATHER),
    *(Kind.COMMUNICATION, Kind.OTHER),
)


def divided(activities: Iterable[Activity], begin: float, end: float) -> dict[Kind, float]:
    """Divide the seconds between two moments by kind; they add up to the whole time.

    If several kinds ran at an instant, it counts for the first of them in this order: GEMMs,
    attention, the collectives, others. So communication during a GEMM is hidden, and a kernel
    inside a wrapping operator counts as its own kind.
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
