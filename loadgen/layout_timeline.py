"""The layout of a Shoal server over time, seen from outside; empty for other servers."""

from dataclasses import dataclass, field

import msgspec

from shoal.loadgen.client import Client, ClientError
from shoal.loadgen.summary import Switching

LAYOUT_PATH = "/admin/layout"
SAMPLE_SECONDS = 1.0


class _Unit(msgspec.Struct):
    engines: list[int]


class Treated(msgspec.Struct, frozen=True):
    """What a switch did to running requests."""

    paused: int = 0
    moved: int = 0
    carried: int = 0


class Switch(msgspec.Struct, frozen=True):
    """One switch, as the server reports it."""

    epoch: int
    at: float
    """Seconds since 1970."""
    outcome: str
    duration_seconds: float
    requests: Treated = Treated()


class _View(msgspec.Struct):
    units: list[_Unit]
    switches: list[Switch] = []


@dataclass
class LayoutLog:
    """The layouts and switches in samples of ``GET /admin/layout``."""

    layouts: list[tuple[float, list[list[int]]]] = field(default_factory=list)
    """Times, and the engines of each unit from then on."""
    switches: dict[int, Switch] = field(default_factory=dict)
    """The switches since the first sample, by epoch."""
    since: int | None = None
    """Epoch of the last switch before the first sample; None before that sample."""

    async def sample(self, client: Client, now: float) -> bool:
        """Note the present layout; return False if the server does not tell it."""
        try:
            view = msgspec.convert(await client.ask_admin(LAYOUT_PATH), _View)
        except (ClientError, msgspec.ValidationError):
            return False
        units = [unit.engines for unit in view.units]
        if not self.layouts or self.layouts[-1][1] != units:
            self.layouts.append((now, units))
        if self.since is None:
            self.since = max((switch.epoch for switch in view.switches), default=0)
        self.switches |= {s.epoch: s for s in view.switches if s.epoch > self.since}
        return True

    def switching(self) -> Switching | None:
        """Return what the switches did; None for a server that has no layout."""
        if not self.layouts:
            return None
        done = self.switches.values()
        return Switching(
            switches=len(done),
            failed=sum(switch.outcome != "done" for switch in done),
            seconds=sum(switch.duration_seconds for switch in done),
            paused=sum(switch.requests.paused for switch in done),
            moved=sum(switch.requests.moved for switch in done),
            carried=sum(switch.requests.carried for switch in done),
        )
