"""A front end whose controller hangs: what waits for its word ends, and the rest goes on."""

from pathlib import Path

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.node.heartbeat import Heartbeat, HeartbeatMonitor
from shoal.runtime.protocol.messages import Ended, Outcome, Placed
from shoal.server.gate.placement import Placements
from shoal.server.gate.pool_door import PoolDoor
from shoal.server.gate.silence import Silence
from shoal.server.rejections import Rejection

TIMEOUT = 8.0
REASON = "the controller has not answered for 8 s"


class Front:
    """A front end with two requests: one runs, one waits for the controller's word."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock(50.0)
        self.heartbeat = Heartbeat(path)
        self.placements = Placements(self.clock)
        self.placement = self.placements.open()
        for name in ("runs", "waits"):
            self.placements.expect(name)
        self.placements.take(Placed("runs", alone(0)))
        self.counted: list[Outcome] = []
        self.ended: list[str] = []
        self.rejected: list[Rejection] = []
        self.door = PoolDoor(self._count, self.rejected.append)
        self.silence = Silence(
            HeartbeatMonitor(path, TIMEOUT, self.clock),
            TIMEOUT,
            self.door,
            self.placements,
            ended=self.placements.ended,
            end=self.ended.extend,
        )

    async def _count(self, outcome: Outcome) -> None:
        self.counted.append(outcome)

    def pass_time(self, seconds: float, *, turning: bool) -> None:
        for _ in range(int(2 * seconds)):
            self.clock.advance(0.5)
            if turning:
                self.heartbeat.beat()
            self.silence.look()


@pytest.fixture
def front(tmp_path: Path) -> Front:
    front = Front(tmp_path / "turns")
    front.pass_time(TIMEOUT, turning=True)
    return front


async def test_nothing_ends_while_the_controller_turns(front: Front) -> None:
    front.pass_time(100.0, turning=True)
    front.pass_time(TIMEOUT - 1.0, turning=False)
    assert front.ended == []
    assert front.placements.awaiting() == ["waits"]
    assert await front.door.refusal(None, 0) is None


def test_what_waits_for_its_word_ends_once_and_what_runs_goes_on(front: Front) -> None:
    front.pass_time(3 * TIMEOUT, turning=False)
    assert front.ended == ["waits"]
    assert front.placements.awaiting() == []
    assert front.placement.ended == Ended("waits", Outcome.UNAVAILABLE, 503, REASON, 10)


def test_what_comes_to_wait_meanwhile_ends_too(front: Front) -> None:
    front.pass_time(3 * TIMEOUT, turning=False)
    front.placements.expect_again("runs")
    front.pass_time(0.5, turning=False)
    assert front.ended == ["waits", "runs"]


async def test_newcomers_are_refused_until_it_turns_again(front: Front) -> None:
    front.pass_time(3 * TIMEOUT, turning=False)
    assert front.door.unavailable == REASON
    response = await front.door.refusal(None, 0)
    assert response is not None
    assert (response.status_code, response.headers["retry-after"]) == (503, "10")
    assert front.counted == [Outcome.UNAVAILABLE]
    assert front.rejected == [Rejection.UNAVAILABLE]
    front.pass_time(0.5, turning=True)
    assert front.door.unavailable is None
    assert await front.door.refusal(None, 0) is None
