"""The tables of stages and treatments: nothing is left open, and a new row needs nothing else."""

from collections.abc import Iterator
from typing import cast, get_args

import pytest
from msgspec.structs import asdict, replace

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.plan import TreatmentName
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.statistics import (
    BIND_OUTCOMES,
    PHASES,
    RELEASE_OUTCOMES,
    SwitchStatistics,
)
from shoal.runtime.controller.switching.carries import Carries
from shoal.runtime.controller.switching.moves import (
    Counts,
    Missing,
    Move,
    Node,
    Stage,
)
from shoal.runtime.controller.switching.stages import (
    ABORTING,
    COMMITTING,
    DONE,
    KEEPING,
    PREPARING,
    RELEASING,
    RESUMING,
    STAGES,
    WAITING,
)
from shoal.runtime.controller.switching.switch import Switch
from shoal.runtime.controller.switching.treatments import TREATMENTS, Rules
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import ControllerTransport
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

WAIT, PAUSE = m.Treatment.SEQUENTIAL, m.Treatment.HARD
PAIR = tp(0, 1)
ALONE = (alone(0), alone(1))
SOME = {
    m.Prepared: m.Prepared(0, 0, [1, 2], 3),
    m.Committed: m.Committed(0, 0),
    m.Released: m.Released(0, PAIR, {}, 3),
    m.Resumed: m.Resumed(0, 0, 3),
}
"""An answer of each type."""
TAKEN = {
    "waiting": set(),
    "preparing": {m.Prepared},
    "committing": {m.Committed},
    "aborting": {m.Resumed},
    "releasing": {m.Released},
    "keeping": {m.Committed, m.Released},
    "resuming": {m.Resumed},
    "done": set(),
}
TOGETHER = {"committing", "releasing", "keeping"}
"""Stages in which members may be inside the collectives of their unit."""

asking = pytest.mark.parametrize(
    "stage", [stage for stage in STAGES if stage.ask], ids=lambda stage: stage.name
)


class Bench:
    """One switch between two engines that are played by the test.

    Args:
        before: what the engines are.
        rules: what is done under ``HARD``, if not what always is.
    """

    def __init__(self, *before: Unit, rules: Rules = TREATMENTS[m.Treatment.HARD]):
        node = LoopbackNode(2)
        node.settle()
        self.clock, self.books = node.clock, node.controller.books
        if PAIR in before:
            self.books.units.bind(PAIR, self.books.units.next_epoch())
        self.sent: list[tuple[int, m.Message]] = []
        self.lost: list[set[int]] = []
        config = replace(node.config, prepare_timeout_seconds=5.0, seed=0)
        # Of the ways to everybody a switch takes the one to engines alone.
        transport = cast(ControllerTransport, self)
        env = Environment(config, transport, self.clock, self.clock)
        capacity = Capacity(config, self.books)
        self.node = Node(
            env,
            self.books,
            capacity,
            Carries(env, self.books, capacity),
            lose=lambda engines, _: self.lost.append(set(engines)),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TREATMENTS, m.Treatment.HARD, rules)
            self.switch = Switch(
                self.node,
                target=ALONE if PAIR in before else (PAIR,),
                treatment=m.Treatment.HARD,
                reason="manual",
                wait=0.0,
                gives_up=False,
            )
        (self.move,) = self.switch._moves

    def to_engine(self, engine: int, message: m.Message) -> None:
        """Take what the switch sends."""
        self.sent.append((engine, message))

    def put(self, stage: Stage) -> "Bench":
        """Let the move stand in a stage, its engines asked."""
        self.move.stage = stage
        self.move.awaiting = set(PAIR.engines)
        self.move.deadline = self.clock() + 5.0
        self.sent.clear()
        return self

    def answer(self, kind: type[m.Message], *engines: int) -> bool:
        """Give the answers of engines; of none: the leader's. Return whether all of them count."""
        given = [{"engine": engine} for engine in engines] or [{}]
        answers = [replace(SOME[kind], epoch=self.move.epoch, **fields) for fields in given]
        taken = [self.switch.handle(answer) for answer in answers]
        return all(taken)

    def names(self) -> list[tuple[int, str]]:
        """Return to whom which messages were sent."""
        return [(engine, type(message).__name__) for engine, message in self.sent]


def bench(stage: Stage) -> Bench:
    """Return a switch whose move stands in a stage."""
    releases = stage in (RELEASING, KEEPING, RESUMING)
    return Bench(*([PAIR] if releases else ALONE)).put(stage)


def followers(stage: Stage) -> Iterator[Stage]:
    """Yield the stages that one leads to, whatever engines were told and have answered."""
    for told in (WAIT, PAUSE):
        for returned in (None, {0: [1]}):
            move = Move(PAIR, 1, stage, told, Counts(), returned=returned)
            yield from (stage.then(move), stage.undo(move))


# --- stages ---


def test_every_stage_is_reached_and_leads_to_the_end() -> None:
    reached: dict[str, Stage] = {}
    rows = [WAITING, RELEASING]
    while rows:
        row = rows.pop()
        if reached.setdefault(row.name, row) is row:
            rows += [to for to in followers(row) if to.name not in reached]
    assert sorted(reached) == sorted(TAKEN)
    for row in STAGES[:-1]:
        assert any(to is not row for to in followers(row)), f"{row.name} has no end"
    assert all(to is DONE for to in followers(DONE))


def test_every_answer_is_sent_for_some_stage() -> None:
    assert {kind for row in STAGES for kind in row.answers} == set(get_args(m.SwitchAnswer))


def test_every_stage_has_its_cells() -> None:
    assert [row.name for row in STAGES] == list(TAKEN)
    for row in STAGES[:-1]:
        assert (row.ask is None) is (row.until is not None), "it asks, or waits for other moves"
        assert bool(row.answers) is (row.ask is not None), "what is asked is answered"
        assert row.missing is not None, "it says what a death means"
        assert row.missing is not Missing.BREAKS or row.count is not None, "a loss is counted"
    done = asdict(DONE)
    assert not any(done[cell] for cell in ("begin", "ask", "answers", "until", "end", "missing"))


def test_every_stage_is_counted_as_metrics_know_it() -> None:
    outcomes = {None: ("done",), SwitchStatistics.bound: BIND_OUTCOMES}
    move, names = bench(PREPARING).move, list[str]()
    for row in STAGES:
        assert row.outcome in outcomes.get(row.count, RELEASE_OUTCOMES), row.name
        names += [phase.name for phase in row.phases(move, 0.0)] if row.phases else []
    assert sorted(names) == sorted(PHASES)


@pytest.mark.parametrize("kind", get_args(m.ToController), ids=lambda kind: kind.__name__)
def test_every_answer_is_taken_or_stale(kind: type[m.Message]) -> None:
    for stage in STAGES:
        assert (kind in stage.answers) is (kind in TAKEN[stage.name])
        if kind not in SOME:
            continue
        node = bench(stage)
        before = asdict(node.move) | {"awaiting": set(node.move.awaiting)}
        assert node.answer(kind) is (kind in TAKEN[stage.name]), stage.name
        if kind not in TAKEN[stage.name]:
            assert asdict(node.move) == before
            assert (node.sent, node.switch.answers, node.switch.counts) == ([], 0, Counts())


def test_an_answer_of_another_epoch_is_stale() -> None:
    node = bench(PREPARING)
    assert not node.switch.handle(m.Prepared(node.move.epoch + 1, 0, [1], 0))


@asking
def test_a_time_out(stage: Stage) -> None:
    """It breaks a unit that may be inside its collectives; else the late engine is left alone."""
    node = bench(stage)
    node.move.awaiting = {1}
    node.clock.advance(5.0)
    node.switch.tick()
    if stage.name in TOGETHER:
        assert (node.lost, node.switch.error) == ([{0, 1}], None)
        return
    assert node.lost == []
    assert node.switch.status == 504
    assert "engines [1] did not" in str(node.switch.error)
    assert node.books.engines.in_state(EngineState.SILENT) == {1}
    assert node.move.stage is (ABORTING if stage is PREPARING else DONE)


@asking
def test_a_death(stage: Stage) -> None:
    """It takes the others along where they may be inside their unit's collectives."""
    node = bench(stage)
    assert node.switch.tied(1) == ({0, 1} if stage.name in TOGETHER else {1})
    node.books.engines.die([1], "it died")
    node.switch.lost({1}, "it died")
    assert (node.switch.status, node.switch.error) == (503, "it died")
    if stage.name in TOGETHER:
        assert node.move.stage is DONE
    elif stage is PREPARING:
        assert node.move.stage is ABORTING
        assert node.names() == [(0, "AbortBind")]
    else:
        assert node.move.awaiting == {0}, "the other is still waited for"
        node.switch.lost({0}, "so did this")
        assert node.move.stage is DONE


@pytest.mark.parametrize(
    ("stage", "told", "undone", "sent"),
    [
        (WAITING, PAUSE, DONE, []),
        (PREPARING, PAUSE, ABORTING, [(0, "AbortBind"), (1, "AbortBind")]),
        (PREPARING, WAIT, ABORTING, [(0, "AbortBind"), (1, "AbortBind")]),
        (COMMITTING, PAUSE, COMMITTING, []),
        (ABORTING, PAUSE, ABORTING, []),
        (RELEASING, WAIT, KEEPING, [(0, "KeepBound")]),
        (RELEASING, PAUSE, RELEASING, []),
        (KEEPING, WAIT, KEEPING, []),
        (RESUMING, PAUSE, RESUMING, []),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_a_failure_elsewhere_undoes(
    stage: Stage, told: m.Treatment, undone: Stage, sent: list[tuple[int, str]]
) -> None:
    node = bench(stage)
    node.move.told = told
    node.switch._fail(504, "another unit failed")
    assert node.move.stage is undone
    assert node.names() == sent


# --- treatments ---


def test_every_treatment_has_a_row() -> None:
    assert set(TREATMENTS) == set(m.Treatment) == set(get_args(TreatmentName))


def test_engines_are_told_to_wait_or_to_pause() -> None:
    assert {rules.told for rules in TREATMENTS.values()} == {WAIT, PAUSE}


def test_a_treatment_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no other is like: requests move at once, and the engines wait for none."""
    monkeypatch.setitem(TREATMENTS, m.Treatment.HARD, Rules(PAUSE, moves=True))
    node = LoopbackNode(2)
    node.settle()
    for name in ("one", "other"):
        node.send(name, 10, 30)
    node.turns(4)
    view = node.switch(PAIR)
    assert (view.moved, view.drained) == (2, 0)
    assert node.missing == []
    node.assert_exact()
    assert node.audit() == []
