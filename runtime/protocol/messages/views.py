"""How the controller shows the node: engines, units and past switches, as plain values."""

from collections.abc import Iterable
from itertools import chain, repeat

import msgspec

from shoal.policies.shift import ShiftRule, ShiftThreshold
from shoal.policies.values.layouts import Engines, Unit
from shoal.policies.values.level import Level


class EngineView(msgspec.Struct, frozen=True):
    """One engine in ``GET /admin/layout``."""

    engine: int
    state: str
    num_blocks: int
    """KV blocks that requests may hold."""
    lent_blocks: dict[str, int]
    """Number of lent blocks, by group, where a group is written like ``0,1``."""
    startup_seconds: dict[str, float] = {}
    """How long its start took, by phase; empty until it is ready (see ``messages.Startup``)."""
    startup_bytes: dict[str, int] = {}
    """How much memory of its device the start took, by phase."""
    weight_bytes: int = 0
    """See ``messages.Startup``; 0 until it is ready."""
    share_weights: int = 1
    """How many engines it shares weights with, itself included."""
    share_stages: int = 1
    """The stages of the pipeline of whose layers it has those of its own stage whole; 1: none."""
    restarts: int = 0
    """How often it was restarted."""
    reason: str | None = None
    """Why it does not serve, if it does not."""
    drained: bool = False
    """Whether an operator has taken it out: no request starts on it, and no group contains it."""
    requests: int = 0
    """Requests that need it: those of every unit that it is in, paused and exported ones too."""


class RequestView(msgspec.Struct, frozen=True):
    """One request that was handed to a unit."""

    request_id: str
    priority: int
    paused: bool
    """Whether it waits until its unit is back; it is then named at its leader's present unit."""


class UnitView(msgspec.Struct, frozen=True):
    """One unit in ``GET /admin/layout``."""

    engines: Engines
    layout: str
    state: str
    running: int
    waiting: int
    lease_blocks: int
    paused_requests: int
    requests: list[RequestView] = []
    """The requests that were sent to it first, as many as ``messages.GetLayout.named`` allows."""


class UnavailableView(msgspec.Struct, frozen=True):
    """A group in ``GET /admin/layout`` that cannot be formed now."""

    engines: Engines
    reason: str
    layout: str = ""


class ShiftView(msgspec.Struct, frozen=True):
    """How steps are divided between TP and SP, in ``GET /admin/layout``."""

    threshold: ShiftThreshold = ShiftRule.OFF
    """The node's setting."""
    max_sp: int = 1
    """See ``NodeConfig.max_sp``."""
    sp_above: dict[str, int] = {}
    """The result: the number of tokens above which a step runs in SP, by the name of its layout."""


class SwitchView(msgspec.Struct, frozen=True):
    """One past switch: when and why it happened, how long it took, what it did to requests."""

    epoch: int
    at: float
    """Seconds since the epoch (wall clock)."""
    before: list[Engines]
    after: list[Engines]
    treatment: str
    """A ``messages.Treatment``."""
    outcome: str
    error: str | None
    duration_seconds: float
    paused: int
    resumed: int
    drained: int
    moved: int = 0
    reason: str = ""
    """See ``shoal.policies.values.plan.SwitchReason``; empty: no reason was given."""
    late: bool = False
    """Whether the switch went on without waiting, because requests did not end in time."""
    carried: int = 0
    """Requests that went on in another unit with their KV."""
    recomputed: dict[str, int] = {}
    """Requests that were to be carried, but whose KV was computed again, by ``Fallback``."""
    carried_bytes: int = 0
    """Bytes of KV that the members of the new units have read."""
    carry_seconds: float = 0.0
    """Time in which requests of the switch were on their way between two units."""
    precopied_bytes: int = 0
    """Bytes of KV that were read before the switch began, while the requests went on."""
    precopy_seconds: float = 0.0
    """The part of ``duration_seconds`` that this took."""
    before_layouts: list[str] = []
    """Names of the layouts of ``before``."""
    after_layouts: list[str] = []
    """Names of the layouts of ``after``."""

    def line(self) -> str:
        """Return the switch in one line, for people to read."""
        counts = {
            "paused": self.paused,
            "resumed": self.resumed,
            "waited for": self.drained,
            "moved": self.moved,
            "carried": self.carried,
            "carried without their KV": sum(self.recomputed.values()),
        }
        did = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        why = ", ".join(filter(None, (self.reason, self.treatment, "late" if self.late else "")))
        took = f"{self.duration_seconds * 1e3:.1f} ms"
        end = f"failed after {took}: {self.error}" if self.error else f"took {took}"
        return (
            f"switch {self.epoch}: {self.text_before} -> {self.text_after} "
            f"({why}) {end}; requests: {did or 'none concerned'}"
        )

    @property
    def text_before(self) -> str:
        """Return the units before it as text for people."""
        return units_text(self.before, self.before_layouts)

    @property
    def text_after(self) -> str:
        """Return the units after it as text for people."""
        return units_text(self.after, self.after_layouts)


class CorrectionView(msgspec.Struct, frozen=True):
    """How measured steps correct the cost model's (``cost.correction``)."""

    factor: float
    added_seconds: float
    measured: int
    """How many steps, or reports of steps, it has seen."""


class CandidateView(msgspec.Struct, frozen=True):
    """Why the node does not have another layout (``Plan.verdicts``). Seconds are of requests."""

    units: list[str]
    """The layouts of its units."""
    saved_seconds: float
    price_seconds: float
    fine_seconds: float
    foreseen_seconds: float | None
    has_room: bool


class MemoryView(msgspec.Struct, frozen=True):
    """One past change of memory between weights and KV (``memory_messages``)."""

    epoch: int
    at: float
    """Seconds since the epoch (wall clock), at its beginning."""
    engines: list[int]
    """The engines that were to change, also those that have died meanwhile."""
    before: int
    """How many engines shared weights; 1: each had whole weights."""
    after: int
    """How many share them when it has ended."""
    num_blocks: int
    """KV blocks of each of the engines when it has ended."""
    preempted: int
    """Requests whose KV was on blocks that were given up, and that were computed again."""
    duration_seconds: float
    reason: str
    outcome: str
    error: str | None = None
    stages: dict[str, float] = {}
    """Seconds of each stage (``memory_changes.Stage``), by its name in small letters."""
    before_stages: int = 1
    """The other number of the level that it had (``Level.stages``)."""
    after_stages: int = 1
    """The same of the level that it has when it has ended."""

    def line(self) -> str:
        """Return the change in one line, for people to read."""
        parts = ", ".join(f"{name} {took * 1e3:.1f}" for name, took in self.stages.items())
        took = f"{self.duration_seconds * 1e3:.1f} ms" + (f" ({parts})" if parts else "")
        end = f"failed after {took}: {self.error}" if self.error else f"took {took}"
        before = Level(self.before, self.before_stages).name
        after = Level(self.after, self.after_stages).name
        return (
            f"memory {self.epoch}: weights shared by {before} -> {after} on engines "
            f"{self.engines} ({self.reason}) {end}; {self.num_blocks} KV blocks each, "
            f"{self.preempted} requests preempted"
        )


class Phase(msgspec.Struct, frozen=True):
    """A phase of one group's bind or release (``statistics.PHASES``)."""

    name: str
    unit: Unit
    start: float
    """Monotonic seconds."""
    end: float


class SwitchTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """What tracing front ends are told about a switch, at its beginning and at its end."""

    traceparent: str
    """W3C context of the switch's own trace."""
    at: float
    """When it began or ended, in monotonic seconds."""
    epoch: int
    treatment: str
    """A ``messages.Treatment``."""
    reason: str
    units: list[Unit]
    """The partition that it leads to."""
    done: SwitchView | None = None
    """At its end: its result."""
    phases: list[Phase] = []
    paused: list[Unit] = []
    """At its end: units whose requests stay paused until the unit is back."""


def units_text(units: Iterable[Engines], layouts: Iterable[str] = ()) -> str:
    """Return units, or a partition, as text for people: ``[0,1]:pp2 [2]``.

    Args:
        units: the engines of each.
        layouts: names of their layouts. Of these, the ones with stages are shown.
    """
    shown = (f":{name}" if "pp" in name else "" for name in chain(layouts, repeat("")))
    return " ".join(
        f"[{','.join(map(str, unit))}]{name}" for unit, name in zip(units, shown, strict=False)
    )
