"""What the controller shows of the node: engines, units and past switches, as plain values."""

import msgspec

from policies.partition import Group


class EngineView(msgspec.Struct, frozen=True):
    """One engine in ``GET /admin/layout``."""

    engine: int
    state: str
    num_blocks: int
    lent_blocks: dict[str, int]
    """Blocks lent, by group, written like ``0,1``."""
    startup_seconds: dict[str, float] = {}
    """What its start took, by phase; empty until it is ready (see ``messages.EngineReady``)."""


class UnitView(msgspec.Struct, frozen=True):
    """One unit in ``GET /admin/layout``."""

    engines: Group
    layout: str
    state: str
    running: int
    waiting: int
    lease_blocks: int
    paused_requests: int
    interleaved_requests: int = 0
    """Requests of its single engines that go on in turn with its own."""


class SwitchView(msgspec.Struct, frozen=True):
    """One past switch: what, when, why, how long, and what it did to running requests."""

    epoch: int
    at: float
    """Seconds since the epoch (wall clock)."""
    before: list[Group]
    after: list[Group]
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
    """See ``policies.plan.SwitchReason``; empty: none was given."""

    def line(self) -> str:
        """Return the switch in one line, for people to read."""
        counts = {
            "paused": self.paused,
            "resumed": self.resumed,
            "waited for": self.drained,
            "moved": self.moved,
        }
        did = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        why = ", ".join(filter(None, (self.reason, self.treatment)))
        took = f"{self.duration_seconds * 1e3:.1f} ms"
        end = f"failed after {took}: {self.error}" if self.error else f"took {took}"
        return (
            f"switch {self.epoch}: {_units(self.before)} -> {_units(self.after)} ({why}) {end}; "
            f"requests: {did or 'none concerned'}"
        )


def _units(partition: list[Group]) -> str:
    return " ".join(f"[{','.join(map(str, group))}]" for group in partition)
