"""What the controller counts as events happen; ``gauges.py`` has what it can look up instead."""

from collections.abc import Sequence
from typing import get_args

from shoal.policies.values.layouts import Layout, Unit
from shoal.policies.values.plan import ShareReason, SwitchReason
from shoal.runtime.controller.books.request import Request
from shoal.runtime.protocol.messages import DeathCause, Fallback, Imported, Outcome, Treatment
from shoal.runtime.protocol.messages.metrics import (
    PRIORITY_CLASSES,
    Counter,
    Family,
    Histogram,
    priority_class,
)
from shoal.runtime.protocol.messages.views import MemoryView, SwitchView

MANUAL = "manual"
"""Reason of a switch that the admin API asked for."""
DRAIN = "drain"
"""Reason of a switch that releases groups of drained engines."""
FIT = "fit"
"""Reason of a switch to a layout whose steps are timed before the node is ready."""
REJOIN = "rejoin"
"""Reason of a change of memory with which engines that are back follow the others."""
SWITCH, PAUSE, BALANCE, HANDOVER = "switch", "pause", "balance", "handover"
DEPARTURES = (SWITCH, DRAIN, PAUSE, BALANCE, HANDOVER)
"""Why requests are to leave their unit with their KV: the unit is regrouped; its engines are
drained; it has paused them for too long; or another one has less to do."""
OTHER = "other"
"""Reason, in metrics, of a switch whose policy named no known reason."""
MEMORY_REASONS = (*filter(None, get_args(ShareReason)), MANUAL, REJOIN, OTHER)
REASONS = (*filter(None, get_args(SwitchReason)), MANUAL, DRAIN, FIT, OTHER)

SWITCH_OUTCOMES = ("done", "failed")
BIND_OUTCOMES = ("done", "aborted", "lost")
RELEASE_OUTCOMES = ("done", "kept", "lost")
CARRY_OUTCOMES = ("carried", "recomputed", "kept", "lost")
"""What became of a request that was to be carried: it went with its KV, or without it; it stayed
where it was; or an engine died before it was settled."""
CARRY_PHASES = ("precopy", "export", "import", "copy")
"""From ``Pin`` to ``Settle``; from ``Export`` to its answer; from ``Import`` to its last answer;
one copy of the members."""
CARRY_PATHS = ("peer", "host")
"""How KV went: from an engine's memory to the reader's, or through memory of the host."""
TIER_OUTCOMES = ("parked", "no_room", "hit", "miss")
"""What became of a request whose KV was to wait in the host's memory: it went there, or there was
no room for it; it left with that KV, or what it had was computed again."""
TIER_DIRECTIONS = ("written", "read")
PRECOPY_OUTCOMES = ("copied", "nothing", "stopped")
"""How a pre-copy ended: the KV was copied; there was nothing to copy or no room; or it failed, was
late or was given up."""
PHASES = ("drain", "lease", "commit", "release", "resume")

WAIT_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
SWITCH_BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600),
)
PHASE_BOUNDS = (0.0001, 0.00025, *SWITCH_BOUNDS)
LOOP_BOUNDS = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
)


class SwitchStatistics:
    """Counters and histograms of the node's switches.

    Args:
        layouts: names of the node's layouts, DP first.
    """

    def __init__(self, layouts: Sequence[str]) -> None:
        by_reason = {"reason": REASONS}
        self._ended = Counter(
            "shoal_switches_total",
            "Switches that have ended.",
            {"outcome": SWITCH_OUTCOMES} | by_reason,
        )
        self._late = Counter(
            "shoal_late_switches_total",
            "Switches that requests kept waiting for too long: they went on without waiting.",
            by_reason,
        )
        self._durations = Histogram(
            "shoal_switch_seconds",
            "Time of a whole switch.",
            SWITCH_BOUNDS,
            {"treatment": Treatment},
        )
        self._binds = Counter(
            "shoal_binds_total",
            "Groups that were to be formed.",
            {"outcome": BIND_OUTCOMES} | by_reason,
        )
        self._releases = Counter(
            "shoal_releases_total",
            "Groups that were to be dissolved.",
            {"outcome": RELEASE_OUTCOMES} | by_reason,
        )
        self._phases = Histogram(
            "shoal_switch_phase_seconds",
            "Phases of binds and releases.",
            PHASE_BOUNDS,
            {"phase": PHASES, "layout": layouts[1:]},
        )
        self._paused = Counter(
            "shoal_paused_requests_total", "Requests paused by a switch, their KV in place."
        )
        self._resumed = Counter(
            "shoal_resumed_requests_total", "Requests that went on when their unit was back."
        )
        self._drained = Counter(
            "shoal_drained_requests_total", "Requests that a switch waited for."
        )

    def switched(self, view: SwitchView) -> None:
        """Count a switch that has ended."""
        self._ended.add(view.outcome, _reason(view.reason))
        if view.late:
            self._late.add(_reason(view.reason))
        self._durations.observe(view.duration_seconds, view.treatment)
        self._paused.add(amount=view.paused)
        self._resumed.add(amount=view.resumed)
        self._drained.add(amount=view.drained)

    def phase(self, name: str, group: Unit, seconds: float) -> None:
        """Count a completed phase (one of ``PHASES``) of a group's bind or release."""
        self._phases.observe(max(0.0, seconds), name, group.name)

    def bound(self, outcome: str, reason: str) -> None:
        """Count the end of a bind: one of ``BIND_OUTCOMES``."""
        self._binds.add(outcome, _reason(reason))

    def released(self, outcome: str, reason: str) -> None:
        """Count the end of a release: one of ``RELEASE_OUTCOMES``."""
        self._releases.add(outcome, _reason(reason))

    @property
    def ended(self) -> dict[str, int]:
        """Number of switches that have ended, by outcome, without outcomes that never happened."""
        counts = {outcome: int(self._ended.total(outcome)) for outcome in SWITCH_OUTCOMES}
        return {outcome: count for outcome, count in counts.items() if count}

    def families(self) -> list[Family]:
        """Return all metrics of switches as they are now."""
        return [metric.family() for metric in vars(self).values()]


class CarryStatistics:
    """Counters and histograms of requests that go to another unit with their KV."""

    def __init__(self) -> None:
        self.requests = Counter(
            "shoal_carried_requests_total",
            "Requests that were to go to another unit with their KV, by what became of that.",
            {"outcome": CARRY_OUTCOMES},
        )
        self.departures = Counter(
            "shoal_departures_total",
            "Requests that were asked to leave their unit with their KV, by the reason.",
            {"reason": DEPARTURES},
        )
        self.fallbacks = Counter(
            "shoal_carry_fallbacks_total",
            "Requests whose KV the other unit computed again, by the reason.",
            {"reason": Fallback},
        )
        self.bytes = Counter(
            "shoal_carried_bytes_total", "Bytes of KV that were carried.", {"path": CARRY_PATHS}
        )
        self.precopies = Counter(
            "shoal_precopies_total",
            "Carries whose KV was to be copied ahead, by what became of that.",
            {"outcome": PRECOPY_OUTCOMES},
        )
        self.precopied_bytes = Counter(
            "shoal_precopied_bytes_total",
            "Bytes of KV that were copied ahead of carries.",
            {"path": CARRY_PATHS},
        )
        self.tier_requests = Counter(
            "shoal_tier_requests_total",
            "Requests whose KV was to wait in the host's memory, by what became of that.",
            {"outcome": TIER_OUTCOMES},
        )
        self.tier_bytes = Counter(
            "shoal_tier_bytes_total",
            "Bytes of KV that were written to the host's memory, or read from there by units.",
            {"direction": TIER_DIRECTIONS},
        )
        self.seconds = Histogram(
            "shoal_carry_seconds", "Phases of carries.", PHASE_BOUNDS, {"phase": CARRY_PHASES}
        )

    def count(self, source: Unit, destination: Unit, message: Imported) -> None:
        """Count what a unit has said of the requests that came to it.

        Args:
            source: the unit that they have left.
            destination: the unit that they have come to.
            message: its answer.
        """
        with_kv, without = len(message.carried), len(message.recomputed)
        if destination.tier:
            self.tier_requests.add("parked", amount=with_kv)
            self.tier_requests.add("no_room", amount=without)
            self.tier_bytes.add("written", amount=message.bytes)
            return
        if source.tier:
            self.tier_requests.add("hit", amount=with_kv)
            self.tier_requests.add("miss", amount=without)
            self.tier_bytes.add("read", amount=message.bytes)
        else:
            self.carried(message.bytes, message.host_bytes)
        self.requests.add("carried", amount=with_kv)
        self.requests.add("recomputed", amount=without)
        for reason in message.recomputed.values():
            self.fallbacks.add(reason)
        if with_kv:
            self.seconds.observe(message.seconds, "copy")

    def carried(self, total: int, through_host: int) -> None:
        """Count bytes that were read while requests stood still."""
        _add_by_path(self.bytes, total, through_host)

    def precopied(self, total: int, through_host: int) -> None:
        """Count bytes that were copied ahead."""
        _add_by_path(self.precopied_bytes, total, through_host)

    def families(self) -> list[Family]:
        """Return all metrics of carries as they are now."""
        return [metric.family() for metric in vars(self).values()]


class MemoryStatistics:
    """Counters and histograms of changes of memory between weights and KV."""

    def __init__(self) -> None:
        self._ended = Counter(
            "shoal_memory_changes_total",
            "Changes of memory between weights and KV that have ended.",
            {"outcome": SWITCH_OUTCOMES, "reason": MEMORY_REASONS},
        )
        self._durations = Histogram(
            "shoal_memory_change_seconds",
            "Time of a whole change of memory between weights and KV.",
            SWITCH_BOUNDS,
        )
        self._preempted = Counter(
            "shoal_memory_preempted_requests_total",
            "Requests that lost KV because its memory was given to weights.",
        )

    def changed(self, view: MemoryView) -> None:
        """Count a change that has ended."""
        reason = view.reason if view.reason in MEMORY_REASONS else OTHER
        self._ended.add(view.outcome, reason)
        self._durations.observe(view.duration_seconds)
        self._preempted.add(amount=view.preempted)

    def families(self) -> list[Family]:
        """Return all metrics of these changes as they are now."""
        return [metric.family() for metric in vars(self).values()]


class Statistics:
    """Counters and histograms of one controller.

    Args:
        layouts: the layouts that the node forms, DP first.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        names = [layout.name for layout in layouts]
        self.switches = SwitchStatistics(names)
        self.carries = CarryStatistics()
        self.memory = MemoryStatistics()
        self.requests = Counter(
            "shoal_requests_total",
            "Requests that have left the node, by outcome.",
            {"outcome": Outcome},
        )
        self.moved = Counter(
            "shoal_moved_requests_total", "Requests taken out of a unit, to go on in another."
        )
        self.placed_tokens = Counter(
            "shoal_placed_prompt_tokens_total",
            "Prompt tokens of requests that were given to units, by whether the unit was expected "
            "to have them in its prefix cache.",
            {"expected": ("cached", "new")},
        )
        self.migrated = Counter(
            "shoal_requests_migrated_total", "Requests whose engine died, to go on in another."
        )
        self.pushed_out = Counter(
            "shoal_pushed_out_requests_total",
            "Requests that waited, and made room in the task pool for more urgent ones.",
        )
        self.stale = Counter(
            "shoal_stale_messages_total", "Messages of switches that were over, dropped."
        )
        self.policy_errors = Counter(
            "shoal_policy_errors_total", "Decisions that raised, or could not be done."
        )
        self.decisions = Histogram(
            "shoal_policy_decision_seconds", "Time of one decision of the policy.", LOOP_BOUNDS
        )
        self.turns = Histogram(
            "shoal_controller_loop_seconds",
            "One turn of the controller's loop, without its wait for messages.",
            LOOP_BOUNDS,
        )
        self._deaths = Counter(
            "shoal_engine_deaths_total",
            "Engines that died, or were given up.",
            {"cause": DeathCause},
        )
        self._queue = Histogram(
            "shoal_request_queue_seconds",
            "From a request's arrival at the controller until a unit is given it.",
            WAIT_BOUNDS,
            {"priority": PRIORITY_CLASSES, "layout": names},
        )

    def placed(self, request: Request, group: Unit, now: float, cached: int) -> None:
        """Count a request that is given to a unit; its wait counts only the first time.

        Args:
            request: the request.
            group: the unit.
            now: the clock.
            cached: tokens of its prompt that are expected in the unit's prefix cache.
        """
        self.placed_tokens.add("cached", amount=cached)
        self.placed_tokens.add("new", amount=request.seen.prompt_tokens - cached)
        if request.moved_at is None:
            labels = priority_class(request.seen.priority), group.name
            self._queue.observe(now - request.seen.arrival, *labels)

    def left(self, request: Request, outcome: Outcome) -> None:
        """Count a request that has left the node; one that had to come back counts only once."""
        if not request.counted:
            self.requests.add(outcome)

    def died(self, cause: DeathCause) -> None:
        """Count an engine's death."""
        self._deaths.add(cause)

    def families(self) -> list[Family]:
        """Return all metrics as they are now."""
        groups = (self.switches, self.carries, self.memory)
        own = [metric.family() for metric in vars(self).values() if metric not in groups]
        return [*(family for group in groups for family in group.families()), *own]


def _add_by_path(counter: Counter, total: int, through_host: int) -> None:
    counter.add("peer", amount=total - through_host)
    counter.add("host", amount=through_host)


def _reason(reason: str) -> str:
    return reason if reason in REASONS else OTHER
