"""The node as ``GET /admin/layout`` shows it."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

from shoal.policies.values.layouts import Unit
from shoal.policies.values.partition import Partition
from shoal.policies.values.plan import Verdict
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.carry_book import CarryStage
from shoal.runtime.controller.books.engine_book import Engine, EngineBook, EngineState
from shoal.runtime.controller.switching.switch import Switch
from shoal.runtime.protocol.messages import SHUTTING_DOWN
from shoal.runtime.protocol.messages.views import (
    CandidateView,
    EngineView,
    RequestView,
    SwitchTrace,
    SwitchView,
    UnavailableView,
    UnitView,
)


def engine_views(books: Books) -> list[EngineView]:
    """Return the view of every engine."""
    return [_engine_view(engine, books) for engine in books.engines]


def _engine_view(engine: Engine, books: Books) -> EngineView:
    ready = engine.ready
    return EngineView(
        engine=engine.number,
        state=engine.state,
        num_blocks=0 if ready is None else ready.num_blocks,
        lent_blocks=_lent_blocks(books, engine.number),
        startup_seconds={} if ready is None else ready.startup.seconds,
        startup_bytes={} if ready is None else ready.startup.device_bytes,
        weight_bytes=engine.weight_bytes,
        share_weights=engine.level.share,
        share_stages=engine.level.stages,
        restarts=engine.incarnation,
        reason=engine.reason,
        drained=engine.drained,
        requests=_requests_of(books, engine.number),
    )


def _lent_blocks(books: Books, engine: int) -> dict[str, int]:
    """Return the blocks that an engine has lent, by the group's engines, in all its layouts."""
    lent = Counter[str]()
    for group, blocks in books.leases.lent_by(engine).items():
        lent[",".join(map(str, group.engines))] += blocks
    return dict(lent)


def _requests_of(books: Books, engine: int) -> int:
    """Return the number of requests that need an engine: it computes them or holds their KV."""
    cores = books.requests.cores.values()
    held = sum(len(core.requests) for core in cores if engine in core.unit.engines)
    # While KV is read, the book of requests has them at the destination only.
    read = (carry for carry in books.carries if carry.stage is CarryStage.IMPORTING)
    return held + sum(
        len(carry.ids)
        for carry in read
        if engine in carry.source.engines and engine not in carry.destination.engines
    )


def candidate_views(verdicts: Iterable[Verdict]) -> list[CandidateView]:
    """Return what the policy thinks of other layouts."""
    return [
        CandidateView(
            units=[unit.layout.name for unit in one.partition],
            saved_seconds=one.saved,
            price_seconds=one.price,
            fine_seconds=one.fine,
            foreseen_seconds=one.foreseen,
            has_room=one.has_room,
        )
        for one in verdicts
    ]


def unit_views(books: Books, busy: Collection[int], *, named: int = 0) -> list[UnitView]:
    """Return the view of every unit.

    Args:
        books: units and requests.
        busy: engines that are regrouped or form a group.
        named: the most requests of each unit that its view names.
    """
    paused = books.requests.paused
    return [_unit_view(books, group, busy, paused[group], named) for group in books.units.partition]


def _unit_view(
    books: Books, group: Unit, busy: Collection[int], paused: int, named: int
) -> UnitView:
    load = books.requests.core(group).load
    return UnitView(
        engines=group.engines,
        layout=group.name,
        state="switching"
        if set(busy).intersection(group.engines)
        else _state(books.engines, group),
        running=0 if load is None else load.running,
        waiting=0 if load is None else load.waiting,
        lease_blocks=books.leases.opened.get(group, 0),
        paused_requests=paused,
        requests=list(islice(_named(books, group), named)) if named else [],
    )


def _named(books: Books, group: Unit) -> Iterator[RequestView]:
    """Yield the requests of a unit, then those that are paused on its engines."""
    units, cores = books.units, books.requests.cores
    away = (core for core in cores.values() if not units.has(core.unit))
    paused = (core for core in away if units.unit_of(core.unit.leader) == group)
    for core in (books.requests.core(group), *paused):
        for request in core.requests.values():
            yield RequestView(request.id, request.seen.priority, core.unit != group)


def _state(engines: EngineBook, group: Unit) -> str:
    states = {engines[engine].state for engine in group.engines}
    worst_first = (EngineState.DEAD, EngineState.SILENT, EngineState.STARTING)
    return next((state for state in worst_first if state in states), EngineState.SERVING)


def unavailable_views(
    books: Books, groups: Iterable[Unit], broken: Mapping[Unit, str]
) -> list[UnavailableView]:
    """Return the groups that cannot be formed now, and why.

    Args:
        books: knows which engines are drained.
        groups: all units that the node can have.
        broken: groups that cannot be formed because engines died, with the reasons.
    """
    drained = books.engines.drained
    out = [group for group in groups if group.is_group and drained.intersection(group.engines)]
    reasons = {group: _drained_text(drained.intersection(group.engines)) for group in out}
    return [
        UnavailableView(g.engines, reason, g.name) for g, reason in {**reasons, **broken}.items()
    ]


def _drained_text(engines: Iterable[int]) -> str:
    return f"engines {sorted(engines)} are drained"


def lengths(engines: EngineBook) -> dict[str, int]:
    """Return the tokens of the longest request that each layout holds, by the layout's name."""
    ready = [engine.ready for engine in engines if engine.ready is not None]
    layouts = [limits for each in ready for limits in each.layouts]
    return {each.layout.name: each.max_model_len for each in layouts}


def not_ready_reason(books: Books) -> str | None:
    """Return why the node cannot take requests; None if it can."""
    engines = books.engines
    if books.requests.closed:
        return SHUTTING_DOWN
    starting = sorted(engines.in_state(EngineState.STARTING))
    if not engines.started:
        return f"engines {starting} are starting"
    if not engines.open:
        lost = sorted(engines.in_state(EngineState.DEAD, EngineState.SILENT))
        drained = sorted(engines.drained & engines.in_state(EngineState.SERVING))
        states = ((starting, "starting"), (lost, "lost"), (drained, "drained"))
        return ", ".join(f"engines {which} are {state}" for which, state in states if which)
    return None


def refusal(books: Books, target: Partition, unavailable: Mapping[Unit, str]) -> tuple[int, str]:
    """Return the HTTP status and the reason why a partition cannot be formed now; 200 if it can.

    Args:
        books: engines and units.
        target: the wanted partition.
        unavailable: groups that cannot be formed because engines died, with the reasons.
    """
    silent = books.engines.in_state(EngineState.SILENT)
    for group in target:
        out = books.engines.drained.intersection(group.engines)
        if group.is_group and out:
            return 409, f"unit {list(group.engines)} cannot be formed: {_drained_text(out)}"
        if not group.is_group or group in books.units.partition:
            continue
        if late := sorted(silent.intersection(group.engines)):
            return 503, f"unit {list(group.engines)} needs engines {late}, which do not answer"
        if group in unavailable:
            return 503, f"unit {list(group.engines)} is not available: {unavailable[group]}"
    return 200, ""


def switch_view(switch: Switch, after: Iterable[Unit], *, at: float, now: float) -> SwitchView:
    """Return the view of a finished switch.

    Args:
        switch: the switch.
        after: the partition after it.
        at: wall clock at its end, seconds.
        now: monotonic clock at its end, seconds.
    """
    reached = list(after)
    return SwitchView(
        epoch=switch.epoch,
        at=at - (now - switch.started),
        before=[unit.engines for unit in switch.before],
        after=[unit.engines for unit in reached],
        before_layouts=[unit.name for unit in switch.before],
        after_layouts=[unit.name for unit in reached],
        treatment=switch.treatment,
        outcome=switch.outcome,
        error=switch.error,
        duration_seconds=now - switch.started,
        paused=switch.paused,
        resumed=switch.counts.resumed,
        drained=switch.counts.drained,
        moved=switch.counts.moved,
        reason=switch.reason,
        late=switch.late,
        carried=switch.tally.carried,
        recomputed=dict(switch.tally.recomputed),
        carried_bytes=switch.tally.bytes,
        carry_seconds=switch.tally.seconds,
        precopied_bytes=switch.tally.precopied_bytes,
        precopy_seconds=switch.tally.precopy_seconds,
    )


def switch_trace(
    books: Books, switch: Switch, done: SwitchView | None, *, now: float
) -> SwitchTrace:
    """Return what front ends trace when a switch begins (``done`` is None) or has ended."""
    return SwitchTrace(
        traceparent=switch.traceparent,
        at=switch.started if done is None else now,
        epoch=switch.epoch,
        treatment=switch.treatment,
        reason=switch.reason,
        units=list(switch.target),
        done=done,
        phases=[] if done is None else switch.phases,
        paused=[] if done is None else _paused_units(books),
    )


def _paused_units(books: Books) -> list[Unit]:
    cores = books.requests.cores.values()
    return sorted(c.unit for c in cores if c.requests and not books.units.has(c.unit))
