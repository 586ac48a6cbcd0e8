"""What the live page is told, as server-sent events; ``docs/api.md`` describes their JSON."""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from shoal.policies.registry import POLICIES
from shoal.policies.values.level import Level
from shoal.runtime.protocol.messages import LayoutView, NodeMetrics
from shoal.runtime.protocol.messages.metrics import PRIORITY_CLASSES, Labels
from shoal.runtime.protocol.messages.views import EngineView, RequestView, SwitchView, UnitView
from shoal.server.operator.admin_answers import SwitchAnswer

MODES = ("dp", "tp", "sp")
RATE_SECONDS = 2.9
"""Rates are means over at least this time, if the page has been watched for so long."""

_encode = msgspec.json.Encoder().encode

Values = Mapping[Labels, float]
Tokens = tuple[float, float]
"""Prompt tokens and output tokens: a count, or per second."""


class About(msgspec.Struct, frozen=True):
    """What does not change while a node runs."""

    model: str
    """Name to ask for."""
    engines: int
    max_group: int
    max_pp: int
    """Most stages of a pipeline; 1: there are none."""
    since: float
    """When the front end started, in seconds since 1970."""
    policies: dict[str, bool] = msgspec.field(
        default_factory=lambda: {name: each.decides_layout for name, each in POLICIES.items()}
    )
    """All policies, and whether each decides the layout."""


class Trace(msgspec.Struct, frozen=True):
    """The part of a moment that the page draws over time."""

    at: float
    """Seconds since 1970."""
    engines: list[tuple[str, str, str]]
    """For each engine its unit (``0,1``), the unit's layout, and the state of both."""
    tokens: dict[str, Tokens]
    """Tokens per second, by mode."""
    waiting: dict[str, int]
    """Requests in the task pool, by class of priority."""


class UnitNow(msgspec.Struct, frozen=True):
    """One unit and its requests."""

    engines: Sequence[int]
    layout: str
    state: str
    running: int
    waiting: int
    paused: int
    requests: list[tuple[str, int, bool]]
    """Some of its requests, each with its ``key``, its priority and whether it is paused."""


class EngineNow(msgspec.Struct, frozen=True):
    """One engine, and the KV blocks of its pool."""

    engine: int
    state: str
    reason: str | None
    drained: bool
    restarts: int
    requests: int
    kv: dict[str, int]
    """Blocks that are ``free``, ``used`` and ``lent``."""


class Moment(msgspec.Struct, frozen=True):
    """The node at one moment."""

    trace: Trace
    ready: bool
    reason: str | None
    policy: str
    units: list[UnitNow]
    engines: list[EngineNow]
    oldest: dict[str, float]
    """Seconds that the oldest request in the task pool has waited, by class of priority."""
    sharing: str
    """How many engines share weights, and the last change of that, for people; empty if none do."""


class Rates:
    """Tokens per second, from counts at several times."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, Tokens]]] = deque()

    def take(self, now: float, tokens: dict[str, Tokens]) -> dict[str, Tokens]:
        """Return the rates now.

        Args:
            now: monotonic seconds.
            tokens: tokens so far, by mode.
        """
        while len(self._seen) > 1 and self._seen[1][0] <= now - RATE_SECONDS:
            self._seen.popleft()
        self._seen.append((now, tokens))
        then, before = self._seen[0]
        seconds = now - then
        if not seconds:
            return dict.fromkeys(MODES, (0.0, 0.0))
        return {mode: _rate(before[mode], tokens[mode], seconds) for mode in MODES}


def _rate(before: Tokens, now: Tokens, seconds: float) -> Tokens:
    # A restarted engine counts from 0 again.
    prefill, decode = (
        round(max(0.0, new - old) / seconds, 1) for old, new in zip(before, now, strict=True)
    )
    return prefill, decode


def key_of(request_id: str) -> str:
    """Return a short name of an engine request, by which the page knows it again."""
    return hashlib.blake2b(request_id.encode(), digest_size=4).hexdigest()


def event(name: str, data: object) -> bytes:
    """Return a server-sent event; ``data`` becomes JSON, which has no line break."""
    return f"event: {name}\ndata: ".encode() + _encode(data) + b"\n\n"


def switch_event(switch: SwitchView) -> bytes:
    """Return the event of a switch that has ended."""
    return event("switch", switch_json(switch))


def switch_json(switch: SwitchView) -> msgspec.Raw:
    """Return a switch as ``POST /admin/layout`` answers it."""
    return msgspec.Raw(SwitchAnswer.model_validate(switch).model_dump_json().encode())


def moment(
    layout: LayoutView, metrics: NodeMetrics, *, now: float, at: float, rates: Rates
) -> Moment:
    """Return the node at one moment.

    Args:
        layout: the controller's view, with some requests named.
        metrics: the controller's metrics.
        now: monotonic seconds.
        at: seconds since 1970.
        rates: know the counts of tokens at earlier moments.
    """
    values = {
        family.name: {s.labels: s.value for s in family.samples} for family in metrics.families
    }
    blocks = values["shoal_engine_kv_blocks"]
    waiting, oldest = values["shoal_pool_waiting"], values["shoal_pool_oldest_seconds"]
    units = {engine: unit for unit in layout.units for engine in unit.engines}
    return Moment(
        trace=Trace(
            at=round(at, 3),
            engines=[_traced(engine, units[engine.engine]) for engine in layout.engines],
            tokens=rates.take(now, _tokens(values["shoal_step_tokens_total"])),
            waiting={name: int(waiting[name,]) for name in PRIORITY_CLASSES},
        ),
        ready=layout.ready,
        reason=layout.reason,
        policy=layout.policy,
        units=[_unit_now(unit) for unit in layout.units],
        engines=[_engine_now(engine, blocks) for engine in layout.engines],
        oldest={name: round(oldest[name,], 1) for name in PRIORITY_CLASSES},
        sharing=_sharing(layout),
    )


def _sharing(layout: LayoutView) -> str:
    if layout.share_weights == 1 and not layout.memory_changes:
        return ""
    share, stages = layout.share_weights, layout.share_stages
    text = "whole weights" if share == 1 else f"weights shared by {share} engines"
    text += f", stages of pp{stages} whole" * (stages > 1)
    if not layout.memory_changes:
        return text
    last = layout.memory_changes[-1]
    end = last.error or f"{last.duration_seconds:.1f} s"
    before = Level(last.before, last.before_stages).name
    after = Level(last.after, last.after_stages).name
    return f"{text}; last change {before} → {after} ({last.reason}): {end}"


def _tokens(counts: Values) -> dict[str, Tokens]:
    sums = {(mode, kind): 0.0 for mode in MODES for kind in ("prefill", "decode")}
    for (_, _, mode, kind), count in counts.items():
        sums[mode, kind] += count
    return {mode: (sums[mode, "prefill"], sums[mode, "decode"]) for mode in MODES}


def _traced(engine: EngineView, unit: UnitView) -> tuple[str, str, str]:
    state = engine.state if engine.state != "serving" else unit.state
    if engine.drained and state == "serving":
        state = "drained"
    return ",".join(map(str, unit.engines)), unit.layout, state


def _unit_now(unit: UnitView) -> UnitNow:
    return UnitNow(
        engines=unit.engines,
        layout=unit.layout,
        state=unit.state,
        running=unit.running,
        waiting=unit.waiting,
        paused=unit.paused_requests,
        requests=[_request_now(request) for request in unit.requests],
    )


def _request_now(request: RequestView) -> tuple[str, int, bool]:
    return key_of(request.request_id), request.priority, request.paused


def _engine_now(engine: EngineView, blocks: Values) -> EngineNow:
    name = str(engine.engine)
    return EngineNow(
        engine=engine.engine,
        state=engine.state,
        reason=engine.reason,
        drained=engine.drained,
        restarts=engine.restarts,
        requests=engine.requests,
        kv={state: int(blocks[name, state]) for state in ("free", "used", "lent")},
    )
