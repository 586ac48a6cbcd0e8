"""From the decision to a group's first step, over a node whose runners are made up."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.loadgen.bench import first_step as first_step_module
from shoal.loadgen.bench.breakdown import NotRecordedError
from shoal.loadgen.bench.first_step import first_step, matched, starts
from shoal.loadgen.bench.measures import Round, Sizes
from shoal.loadgen.bench.systems import SHOAL, System, dp_layout, recording, tp_layout
from shoal.loadgen.bench.token_client import Answer
from shoal.runtime.protocol.recording import BoundPhase, append_phase, phases_file

SIZES = Sizes(switches=4, load=3, load_tokens=50, pause_seconds=0.0)
SYSTEM = System(SHOAL, ("serve",), (dp_layout(2, pinned=False), tp_layout(2)), switches=True)

Times = tuple[float | None, float | None, float | None]
"""Of a phase, seconds since the decision: freed, taken, began."""
LEADER: Times = (0.005, 0.001, 0.006)
OTHER: Times = (0.007, 0.002, 0.0075)
NO_STEP: Times = (0.005, None, None)


class Node:
    """Two engines as a client sees them; their runners write as recording ones do.

    Args:
        directory: where they write.
        times: by engine, of every round; the last counts for all that follow.
        ends: a request of the group's own ends with the release of its group that has this number.
    """

    def __init__(
        self, directory: Path, times: Sequence[Sequence[Times]], ends: frozenset[int] = frozenset()
    ) -> None:
        self.directory, self.times, self.ends = directory, times, ends
        self.silent = False
        self.together = False
        self.decoding, self.residents = 0, 0
        self.settled: list[int] = []
        """Binds after which a request was given to the group that stays in it."""
        self.left_alone = 0
        """Groups that had none of their own when they were released."""
        self._now, self._epochs, self._binds, self._bound = 1000.0, 0, 0, 0
        self._ended = asyncio.Event()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        assert path == "/admin/layout"
        if method == "GET":
            return {"units": self._units()}
        together = body["units"] == [[0, 1]]
        assert together != self.together, "there is nothing to switch"
        assert body["preempt"] == "hard"
        self.together = together
        self._epochs += 1
        switch = {"epoch": self._epochs, "at": self._now, "duration_seconds": 0.001}
        if together:
            self._epochs += 1
            self._bound = self._epochs
            self._binds += 1
        else:
            self._release()
        return switch

    def _units(self) -> list[dict[str, Any]]:
        if self.together:
            return [{"engines": [0, 1], "running": self.residents, "paused": self.decoding}]
        each = self.decoding // 2
        return [{"engines": [e], "running": each, "paused": 0} for e in (0, 1)]

    def _release(self) -> None:
        for engine, times in enumerate(self.times):
            freed, taken, began = (
                None if time is None else self._now + time
                for time in times[min(self._binds, len(times)) - 1]
            )
            if not self.silent:
                path = phases_file(self.directory, engine)
                append_phase(path, BoundPhase(self._bound, freed, taken, began))
        self.left_alone += not self.residents
        if self._binds in self.ends:
            self._ended.set()
            self._ended = asyncio.Event()
        self._now += 1.0

    async def generate(self, prompt: list[int], tokens: int, **_: Any) -> Answer:
        if tokens == 1:
            return Answer(0.0, 1.0, layout="tp2" if self.together else "dp")
        assert tokens == SIZES.load_tokens
        if self.together:
            await self._reside()
            return Answer(0.0, 1.0)
        self.decoding += 1
        await asyncio.Event().wait()
        raise AssertionError("it goes on for ever")

    async def _reside(self) -> None:
        self.residents += 1
        self.settled.append(self._binds)
        try:
            await self._ended.wait()
        finally:
            self.residents -= 1


def measured(directory: Path, *times: Sequence[Times], **settings: Any) -> dict[str, Any]:
    return asyncio.run(_measured(directory, times, settings))[0]


async def _measured(
    directory: Path, times: Sequence[Sequence[Times]], settings: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    node: Any = Node(directory, times, **settings)
    return await first_step(node, recording(SYSTEM, directory), SIZES), node


def ms(spread: dict[str, float]) -> list[float]:
    return [round(1000 * spread[name], 3) for name in ("p50", "max")]


# --- the measure ---


def test_it_counts_from_the_decision_for_the_leader_and_for_who_is_last(tmp_path: Path) -> None:
    found = measured(tmp_path, [LEADER], [OTHER])
    assert (found["switches"], found["without_step"]) == (4, 0)
    assert found["running"] == {"0": 3, "1": 3}
    leader, slowest = found["leader"], found["slowest"]
    assert {name: ms(spread) for name, spread in leader.items()} == {
        "start": [6.0, 6.0],
        "host": [1.0, 1.0],
        "in_flight": [5.0, 5.0],
        "after": [1.0, 1.0],
    }
    assert {name: ms(spread) for name, spread in slowest.items()} == {
        "start": [7.5, 7.5],
        "host": [2.0, 2.0],
        "in_flight": [7.0, 7.0],
        "after": [0.5, 0.5],
    }


def test_a_round_without_a_step_is_said_and_in_no_figure(tmp_path: Path) -> None:
    late: Times = (0.005, 0.001, 0.009)
    # The first bind is that in which the group gets its own request.
    found = measured(tmp_path, [late, LEADER, NO_STEP, LEADER], [late, OTHER, NO_STEP, OTHER])
    assert found["without_step"] == 1
    assert ms(found["leader"]["start"]) == [6.0, 6.0]
    assert ms(found["slowest"]["start"]) == [7.5, 7.5]


def test_nothing_but_rounds_without_a_step_is_no_figure(tmp_path: Path) -> None:
    found = measured(tmp_path, [NO_STEP], [NO_STEP])
    assert found["without_step"] == 4
    assert found["leader"]["start"] is None
    assert found["slowest"]["after"] is None


def test_every_group_has_a_request_of_its_own_to_go_on_with(tmp_path: Path) -> None:
    _, node = asyncio.run(_measured(tmp_path, ([LEADER], [OTHER]), {}))
    assert (node.settled, node.left_alone) == ([1], 0)
    assert node.residents == 0, "it is aborted in the end"


def test_a_request_that_has_ended_is_followed_by_another(tmp_path: Path) -> None:
    ends = {"ends": frozenset({2})}
    found, node = asyncio.run(_measured(tmp_path, ([LEADER], [OTHER]), ends))
    assert (node.settled, node.left_alone) == ([1, 3], 0)
    assert found["without_step"] == 0, "the bind in between is no round"


async def test_a_node_that_records_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_step_module, "LEAVING_SECONDS", 0.0)
    node: Any = Node(tmp_path, ([LEADER], [OTHER]))
    node.silent = True
    with pytest.raises(NotRecordedError, match="engine 0 has not recorded the last bind"):
        await first_step(node, recording(SYSTEM, tmp_path), SIZES)
    assert node.residents == 0


# --- rounds and phases ---


ROUND = Round(at=10.0, epochs=(4, 6), bind=0.1, release=0.1, first_token=0.2, layout="tp2")
ROUNDS = [ROUND, replace(ROUND, at=11.0, epochs=(7, 9))]


def phase(epoch: int) -> BoundPhase:
    return BoundPhase(epoch, 10.0, 11.0, 12.0)


def test_a_phase_is_of_the_round_between_whose_switches_it_was_bound() -> None:
    phases = [phase(epoch) for epoch in (2, 5, 8, 11)]
    assert [found.epoch for found in matched(0, ROUNDS, phases)] == [5, 8]


@pytest.mark.parametrize(
    ("epochs", "problem"),
    [
        ((2, 5, 11), "engine 3 recorded 0 binds in round 2 of 2"),
        ((4, 6, 8), "engine 3 recorded 0 binds in round 1 of 2"),
        ((5, 8, 8), "engine 3 recorded 2 binds in round 2 of 2"),
    ],
)
def test_a_round_without_its_one_phase_is_an_error(epochs: Sequence[int], problem: str) -> None:
    with pytest.raises(NotRecordedError, match=problem):
        matched(3, ROUNDS, [phase(epoch) for epoch in epochs])


def test_what_ended_before_the_decision_was_not_in_flight() -> None:
    idle = [BoundPhase(5, 9.0, 10.001, 10.002), BoundPhase(8, None, 11.001, 11.002)]
    found = starts(ROUNDS, {0: idle, 1: idle})
    assert ms(found["leader"]["in_flight"]) == [0.0, 0.0]
    assert ms(found["leader"]["after"]) == [2.0, 2.0]
    assert ms(found["slowest"]["after"]) == [2.0, 2.0]
