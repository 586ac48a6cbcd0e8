"""The node's metrics that are read from the controller's books on each request for metrics."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shoal.policies.registry import POLICIES
from shoal.policies.values.layouts import DP, Unit, alone, tier_of
from shoal.policies.values.level import levels_of
from shoal.runtime.config import NodeConfig
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.protocol.messages import Load, Mode, SpExchange, Work
from shoal.runtime.protocol.messages.metrics import (
    PRIORITY_CLASSES,
    EngineGauges,
    Family,
    Labels,
    counter,
    gauge,
    priority_class,
)


@dataclass(frozen=True)
class Gauges:
    """What the controller knows at one moment.

    Attributes:
        busy: engines that are regrouped, and get no new requests yet, or that form a group.
        step_errors: see ``messages.LayoutView``.
        now: the time by the controller's clock.
    """

    config: NodeConfig
    books: Books
    policy: str
    busy: Collection[int]
    unavailable: Collection[Unit]
    """Groups that cannot be formed now."""
    step_errors: Mapping[str, float]
    now: float

    def families(self) -> list[Family]:
        """Return all metrics."""
        return [
            *self._node(),
            *self._engine_states(),
            *self._unit_of_engines(),
            self._requests(),
            self._kv_blocks(),
            self._tier_blocks(),
            self._lease_blocks(),
            *self._pool(),
            *self._steps(),
        ]

    # --- the node -----------------------------------------------------------------------------

    def _node(self) -> Iterator[Family]:
        engines = self.books.engines
        ready = engines.started and not self.books.requests.closed and bool(engines.open)
        yield gauge("shoal_ready", "1 if the node can take requests.", (), {(): int(ready)})
        policies = {(name,): int(name == self.policy) for name in {*POLICIES, self.policy}}
        yield gauge("shoal_policy_info", "1 for the policy that decides.", ("policy",), policies)
        states = {(state.value,): len(engines.in_state(state)) for state in EngineState}
        yield gauge("shoal_engines", "Engines by state.", ("state",), states)
        layouts = [group.name for group in self.books.units.partition]
        units = {(layout.name,): layouts.count(layout.name) for layout in self.config.layouts}
        yield gauge("shoal_units", "Units by layout.", ("layout",), units)
        yield self._sp_exchanges()
        missing = [group.name for group in self.unavailable]
        yield gauge(
            "shoal_groups_unavailable",
            "Groups that cannot be formed because engines died.",
            ("layout",),
            {(name,): missing.count(name) for (name,) in units if name != DP.name},
        )

    def _sp_exchanges(self) -> Family:
        started = [engine.ready.startup for engine in self.books.engines if engine.ready]
        said = Counter(item for startup in started for item in startup.sp_exchanges.items())
        groups = [layout.name for layout in self.config.layouts if layout != DP]
        return gauge(
            "shoal_sp_exchange",
            "Engines by how they exchange in SP, in groups of this layout.",
            ("layout", "by"),
            {(name, by.value): said[name, by] for name in groups for by in SpExchange},
        )

    # --- engines ------------------------------------------------------------------------------

    def _engine_states(self) -> Iterator[Family]:
        yield gauge(
            "shoal_engine_state",
            "1 for the state that the engine is in.",
            ("engine", "state"),
            {
                (str(engine.number), state.value): int(engine.state is state)
                for engine in self.books.engines
                for state in EngineState
            },
        )
        yield gauge(
            "shoal_engine_drained",
            "1 while an operator has taken the engine out.",
            ("engine",),
            {(str(engine.number),): int(engine.drained) for engine in self.books.engines},
        )
        yield gauge(
            "shoal_engine_weight_bytes",
            "Weights in the engine's own memory, by its level of memory.",
            ("engine", "shared_by", "stages"),
            {
                (str(engine.number), *map(str, level)): engine.weight_bytes
                * (engine.level == level)
                for level in levels_of(self.config.share_weights, self.config.layouts)
                for engine in self.books.engines
            },
        )
        yield counter(
            "shoal_engine_restarts_total",
            "Times that the engine was started again after it had died.",
            ("engine",),
            {(str(engine.number),): engine.incarnation for engine in self.books.engines},
        )

    def _unit_of_engines(self) -> Iterator[Family]:
        """Yield the metrics that describe the unit of every engine."""
        serves, units = self.books.engines.serves, self._units
        for name, documentation, values in (
            (
                "shoal_engine_layout",
                "Engines of the unit that it is in; 0 while it does not serve.",
                {e: unit.size if serves(alone(e)) else 0 for e, unit in units.items()},
            ),
            (
                "shoal_engine_switching",
                "1 while a switch regroups it.",
                {e: int(e in self.busy) for e in units},
            ),
        ):
            labelled = {(str(engine),): value for engine, value in values.items()}
            yield gauge(name, documentation, ("engine",), labelled)

    @property
    def _units(self) -> dict[int, Unit]:
        """The unit of every engine."""
        return {engine: unit for unit in self.books.units.partition for engine in unit.engines}

    def _requests(self) -> Family:
        return gauge(
            "shoal_engine_requests",
            "Requests of the units that the engine leads.",
            ("engine", "state"),
            {
                (str(engine.number), state): count
                for engine in self.books.engines
                for state, count in self._requests_of(engine.number).items()
            },
        )

    def _lease_blocks(self) -> Family:
        return gauge(
            "shoal_lease_blocks",
            "Virtual KV blocks that a group's leader holds.",
            ("unit", "layout"),
            {
                (",".join(map(str, g.engines)), g.name): self.books.leases.opened.get(g, 0)
                for g in self.config.units
                if g.is_group
            },
        )

    def _requests_of(self, engine: int) -> dict[str, int]:
        """Return the number of requests of the units that an engine leads, by their state."""
        counts = {"running": 0, "waiting": 0, "paused": 0, "parked": 0}
        for core in self.books.requests.cores.values():
            if core.unit.leader != engine:
                continue
            held = len(core.requests)
            if core.unit.tier:
                counts["parked"] += held
            elif core.unit in self.books.units.partition:
                running = 0 if core.load is None else min(core.load.running, held)
                counts["running"] += running
                counts["waiting"] += held - running
            else:
                counts["paused"] += held
        return counts

    def _kv_blocks(self) -> Family:
        values: dict[Labels, float] = {}
        for number in range(len(self.books.engines)):
            total, free = self.books.engines.num_blocks(number), self._free_blocks(alone(number))
            lent = sum(self.books.leases.lent_by(number).values())
            name = str(number)
            values |= {(name, "free"): free, (name, "lent"): lent}
            values[name, "used"] = max(0, total - free - lent)
        return gauge("shoal_engine_kv_blocks", "KV blocks.", ("engine", "state"), values)

    def _tier_blocks(self) -> Family:
        values: dict[Labels, float] = {}
        for number in range(len(self.books.engines)):
            total = self.books.engines.tier_blocks(number)
            free = self._free_blocks(tier_of(number))
            values |= {(str(number), "free"): free, (str(number), "used"): max(0, total - free)}
        return gauge(
            "shoal_tier_kv_blocks",
            "KV blocks in the host's memory (--kv-tier-gib).",
            ("engine", "state"),
            values,
        )

    def _free_blocks(self, group: Unit) -> int:
        load = self._load(group)
        return 0 if load is None else load.free_blocks

    def _load(self, group: Unit) -> Load | None:
        core = self.books.requests.cores.get(group)
        return None if core is None else core.load

    def _kv_cache_usage(self, engine: int) -> float:
        """Return the fraction of an engine's blocks that requests hold, its groups' included."""
        total = self.books.engines.num_blocks(engine)
        lent = self.books.leases.lent_by(engine)
        free = self._free_blocks(alone(engine))
        free += sum(min(blocks, self._free_blocks(group)) for group, blocks in lent.items())
        return min(1.0, max(0.0, 1 - free / total)) if total else 0.0

    def engines(self) -> list[EngineGauges]:
        """Return the values of vLLM's gauges; they spread the pool's requests over the engines."""
        serving = sorted(self.books.engines.in_state(EngineState.SERVING)) or [0]
        share, rest = divmod(len(self.books.requests.pool), len(serving))
        shares = {engine: share + (k < rest) for k, engine in enumerate(serving)}
        gauges = []
        for engine in range(len(self.books.engines)):
            requests = self._requests_of(engine)
            gauges.append(
                EngineGauges(
                    engine=engine,
                    running=requests["running"],
                    waiting=requests["waiting"] + shares.get(engine, 0),
                    deferred=requests["paused"],
                    kv_cache_usage=self._kv_cache_usage(engine),
                )
            )
        return gauges

    # --- task pool ----------------------------------------------------------------------------

    def _pool(self) -> Iterator[Family]:
        waiting = dict.fromkeys(PRIORITY_CLASSES, 0)
        tokens = dict.fromkeys(PRIORITY_CLASSES, 0)
        oldest = dict.fromkeys(PRIORITY_CLASSES, 0.0)
        for request in self.books.requests.pool.all():
            name = priority_class(request.seen.priority)
            waiting[name] += 1
            tokens[name] += request.seen.prompt_tokens
            oldest[name] = max(oldest[name], self.now - request.seen.arrival)
        for name, documentation, values in (
            ("shoal_pool_waiting", "Requests in the task pool.", waiting),
            ("shoal_pool_waiting_tokens", "Prompt tokens in the task pool.", tokens),
            ("shoal_pool_oldest_seconds", "Wait of the oldest request in the pool.", oldest),
        ):
            yield gauge(name, documentation, ("priority",), {(k,): v for k, v in values.items()})

        held = self.books.requests.held.total, self.books.requests.finished.bytes
        yield gauge(
            "shoal_held_bytes",
            "Bytes that the controller keeps of requests, images included.",
            ("state",),
            {("unfinished",): held[0], ("finished",): held[1]},
        )

    # --- steps --------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Family]:
        steps, seconds, tokens = {}, {}, {}
        for labels, work in self._work():
            steps[labels] = work.steps
            seconds[labels] = work.seconds
            tokens[*labels, "decode"] = work.decodes
            tokens[*labels, "prefill"] = work.prefill_tokens
        labels = ("engine", "layout", "mode")
        yield counter("shoal_steps_total", "Steps of the model.", labels, steps)
        yield counter(
            "shoal_step_seconds_total", "Time in which a step was in flight.", labels, seconds
        )
        yield counter(
            "shoal_step_tokens_total", "Tokens that steps computed.", (*labels, "kind"), tokens
        )
        yield gauge(
            "shoal_step_time_relative_error",
            "Smoothed relative error of the predicted step times.",
            ("layout", "mode", "kind"),
            {_error_labels(name): error for name, error in self.step_errors.items()},
        )

    def _work(self) -> Iterable[tuple[tuple[str, str, str], Work]]:
        for group in self.config.units:
            load = self._load(group)
            for mode in Mode if group.is_group and self.config.max_sp > 1 else (Mode.TP,):
                labels = str(group.leader), *_labels(group.name, mode)
                yield labels, Work() if load is None else load.done(mode).total


def _labels(layout: str, mode: Mode) -> tuple[str, str]:
    """Return the labels ``layout`` and ``mode`` of steps in this layout and mode."""
    return layout, layout if layout == "dp" else mode.value


def _error_labels(steps: str) -> tuple[str, str, str]:
    """Return the labels for a name of steps as in ``messages.LayoutView.step_errors``."""
    layout, *mode, kind = steps.split()
    return *_labels(layout, Mode(*mode) if mode else Mode.TP), kind
