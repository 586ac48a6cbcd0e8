"""Whatever happens at any moment of a carry, every request ends once, with exactly its tokens.

One switch is lived through again and again. Each time, something else happens after another turn of
one process: an engine dies, or does not answer, or requests are aborted, or the node goes back.
"""

import dataclasses
from collections.abc import Callable, Iterator

import msgspec
import pytest

from shoal.policies.values.layouts import alone
from shoal.policies.values.partition import Partition, singles
from shoal.runtime.config import FakeSettings
from shoal.runtime.controller.books.engine_book import EngineState
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.faults import Faults, Seam
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.wire import FinishReason
from tests.depth import how_many
from tests.runtime.computed_tokens import ComputedTokens
from tests.runtime.loopback_node import SMALL, LoopbackNode
from tests.units import tp, tp_units

ENGINES = 4
CARRY = m.Treatment.CARRY
TICK = 0.01
"""Seconds that all processes take for a turn each."""
TIMED = msgspec.structs.replace(SMALL, step_seconds=TICK, copy_seconds=2 * TICK)
SLOW = msgspec.structs.replace(TIMED, step_seconds=6 * TICK, num_blocks=200)
"""Steps that take so long that requests get their blocks before their last step has ended."""
TIGHT = msgspec.structs.replace(TIMED, num_blocks=16)
"""So few blocks that requests come in portions, or are computed again."""
AHEAD = msgspec.structs.replace(TIMED, num_blocks=200)
TIGHT_AHEAD = msgspec.structs.replace(TIMED, num_blocks=70)
"""With these, KV is copied ahead of the switch, which takes some steps; engines that are in groups
have lent them 64 blocks."""
IDLE_TICK = 0.5
"""The same while all of them only wait."""
MOST_TURNS = 400
STRIDE = how_many("SHOAL_MOMENT_STRIDE", few=13, many=3)
"""Turns from one moment to the next; 1 tries every one, which takes minutes."""
MOST_ROUNDS = 1000
PROMPTS = (9, 17, 1, 30, 12, 5, 24, 40)
TOKENS = 24

SINGLES, PAIRS, FOUR = singles(ENGINES), tp_units(ENGINES, 2), tp_units(ENGINES, 4)
LEFT: Partition = (tp(0, 1), alone(2), alone(3))
RIGHT: Partition = (alone(0), alone(1), tp(2, 3))
WAYS = {
    "dp-tp4": (SINGLES, FOUR),
    "tp4-dp": (FOUR, SINGLES),
    "tp2-tp4": (PAIRS, FOUR),
    "tp4-tp2": (FOUR, PAIRS),
    "mixed": (LEFT, RIGHT),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


class Life:
    """A node in the middle of a switch; see the module."""

    def __init__(self, way: str, settings: FakeSettings = TIMED) -> None:
        before, after = WAYS[way]
        ahead = settings in (AHEAD, TIGHT_AHEAD)
        self.node = LoopbackNode(
            ENGINES, settings=settings, restart_limit=1, precopy_tokens=int(ahead)
        )
        self.node.settle()
        self.node.switch(*before)
        for number, prompt in enumerate(PROMPTS):
            self.node.send(f"r{number}", prompt, TOKENS, client=number % 2)
        ticks = 20 if settings == SLOW else 8 if ahead else 3  # 20 are three steps and a third
        for _ in range(ticks * (ENGINES + 1)):
            self.turn()
        self.call = self.node.set_layout(*after, treatment=CARRY)

    _turns = 0

    def turn(self) -> None:
        """Give the next process a turn."""
        node, who = self.node, self._turns % (ENGINES + 1)
        self._turns += 1
        if who == ENGINES:
            node.controller.turn()
            node.clock.advance(TICK)
            node.collect()
            self.bury()
        elif who in node.agents and who not in node.hung:
            node.turn_agent(who)

    def bury(self) -> None:
        """Start dead engines again, as the supervisor does."""
        node = self.node
        for engine in node.controller.books.engines:
            known = engine.incarnation == node.incarnations[engine.number]
            if engine.state is EngineState.DEAD and known:
                node.restart(engine.number)

    @property
    def another(self) -> int:
        """An engine: at each moment another one."""
        return self._turns // STRIDE % ENGINES

    @property
    def is_over(self) -> bool:
        return self.node.reply(self.call) is not None

    def go_on(self) -> None:
        """Leave the node alone until all requests have ended, which needs nobody's help."""
        self._run()
        self.node.hung.clear()
        self._run()
        self.node.run_for(self.node.config.prepare_timeout_seconds, tick=1.0)

    def _run(self) -> None:
        node = self.node
        for _ in range(MOST_ROUNDS):
            if self.is_over and not node.missing:
                break
            for _ in range(ENGINES + 1):
                self.turn()
            if node.is_quiet:
                node.clock.advance(IDLE_TICK)

    def assert_sound(self) -> None:
        """Every request has ended as it should, and all books are right."""
        node = self.node
        assert node.missing == []
        node.assert_exact()
        assert set(node.finish.values()) <= {FinishReason.LENGTH}
        assert sum(node.outcomes.values()) == len(node.prompts)
        assert node.controller.books.requests.interrupted == {}
        assert len(node.controller.books.carries) == 0
        assert node.audit() == []


def damage(backend: FakeBackend, faults: Faults) -> None:
    """Let an engine have faults from now on."""
    backend.faults = faults
    for core in backend.cores.values():
        core._around = dataclasses.replace(core._around, faults=faults)


def moments(way: str, first: int, settings: FakeSettings = TIMED) -> Iterator[Life]:
    """Yield a node in the middle of a switch, each time after a few more turns."""
    for turns in range(first, MOST_TURNS, STRIDE):
        life = Life(way, settings)
        for _ in range(turns):
            life.turn()
        if life.is_over:
            assert turns > 2 * STRIDE, "the switch took no time"
            return
        yield life
    raise AssertionError("the switch takes for ever")


def whenever(
    event: Callable[[Life], None], way: str, first: int = 0, settings: FakeSettings = TIMED
) -> None:
    """Let something happen at one moment of a switch after the other; check what comes of it."""
    for life in moments(way, first, settings):
        event(life)
        life.go_on()
        life.assert_sound()


@EVERY_WAY
@pytest.mark.parametrize("engine", [0, 1, 3])
def test_an_engine_dies(way: str, engine: int) -> None:
    whenever(lambda life: life.node.kill(engine), way, engine)


@EVERY_WAY
def test_an_engine_dies_where_there_is_no_room(way: str) -> None:
    whenever(lambda life: life.node.kill(1), way, 2, TIGHT)


@EVERY_WAY
@pytest.mark.parametrize("engine", [0, 3])
def test_an_engine_does_not_answer_for_a_while(way: str, engine: int) -> None:
    whenever(lambda life: life.node.hung.add(engine), way, engine)


@EVERY_WAY
@pytest.mark.parametrize("aborted", [slice(1), slice(None)], ids=["one", "all"])
@pytest.mark.parametrize("settings", [TIMED, TIGHT], ids=["room", "no room"])
def test_requests_are_aborted(way: str, aborted: slice, settings: FakeSettings) -> None:
    def abort(life: Life) -> None:
        for number in range(len(PROMPTS))[aborted]:
            life.node.abort(f"r{number}", client=number % 2)

    whenever(abort, way, 1, settings)


# --- KV is copied ahead ---

EITHER_ROOM = pytest.mark.parametrize("settings", [AHEAD, TIGHT_AHEAD], ids=["room", "no room"])


@EVERY_WAY
@EITHER_ROOM
def test_an_engine_dies_while_kv_goes_ahead(way: str, settings: FakeSettings) -> None:
    whenever(lambda life: life.node.kill(life.another), way, 1, settings)


@EVERY_WAY
def test_an_engine_does_not_answer_while_kv_goes_ahead(way: str) -> None:
    whenever(lambda life: life.node.hung.add(life.another), way, 3, AHEAD)


@EVERY_WAY
@EITHER_ROOM
def test_requests_are_aborted_while_kv_goes_ahead(way: str, settings: FakeSettings) -> None:
    def abort(life: Life) -> None:
        for number in range(len(PROMPTS))[:: life.another + 1]:
            life.node.abort(f"r{number}", client=number % 2)

    whenever(abort, way, 5, settings)


# --- every message of a carry ---

SEAMS = [Seam.EXPORT, Seam.ADOPT, Seam.COPY, Seam.DROP, Seam.LEND, Seam.ATTACH, Seam.BIND]
SEAMS_AHEAD = [Seam.PIN, Seam.RESERVE, Seam.COPY_AHEAD, Seam.SETTLE, Seam.UNPIN]


@EVERY_WAY
@pytest.mark.parametrize("seam", SEAMS)
def test_an_engine_dies_of_a_message(way: str, seam: Seam) -> None:
    died = die_of(seam, way, TIMED)
    group_is_new = any(unit.is_group and unit not in WAYS[way][0] for unit in WAYS[way][1])
    assert died or (seam in (Seam.LEND, Seam.ATTACH, Seam.BIND) and not group_is_new)


@EVERY_WAY
@pytest.mark.parametrize("seam", SEAMS_AHEAD)
def test_an_engine_dies_of_a_message_of_a_pre_copy(way: str, seam: Seam) -> None:
    assert die_of(seam, way, AHEAD)


def die_of(seam: Seam, way: str, settings: FakeSettings) -> int:
    """Let each engine die of a message, in a life of its own; return how many died."""
    died = 0
    for engine in range(ENGINES):
        life = Life(way, settings)
        damage(life.node.backends[engine], Faults(die_at=seam))
        life.go_on()
        died += engine in life.node.deaths
        life.assert_sound()
    return died


# --- nothing happens ---


def undisturbed(way: str, settings: FakeSettings) -> Life:
    life = Life(way, settings)
    life.go_on()
    life.assert_sound()
    reply = life.node.reply(life.call)
    assert isinstance(reply, m.SwitchDone), reply
    return life


@EVERY_WAY
@pytest.mark.parametrize("settings", [TIMED, AHEAD], ids=["at once", "ahead"])
def test_no_token_is_computed_twice(
    way: str, settings: FakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = ComputedTokens(monkeypatch)
    life = undisturbed(way, settings)
    copied = life.node.value("shoal_precopies_total", outcome="copied")
    assert (copied > 0) == (settings is AHEAD)
    assert life.node.value("shoal_carried_requests_total", outcome="carried") >= 4
    assert computed.requests == len(PROMPTS)
    assert computed.again == {}


@EVERY_WAY
def test_where_there_is_no_room_some_are(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    computed = ComputedTokens(monkeypatch)
    undisturbed(way, TIGHT)
    assert computed.again != {}


def ends_well(way: str, faults: Faults, settings: FakeSettings) -> bool:
    """Return whether the checks find nothing if the engines have these faults."""
    life = Life(way, settings)
    for engine in range(ENGINES):
        damage(life.node.backends[engine], faults)
    life.node.send("new", 20, TOKENS)
    try:
        life.go_on()
        life.assert_sound()
    except AssertionError:
        return False
    return life.node.deaths == {}


@pytest.mark.parametrize("way", ["dp-tp4", "tp4-tp2"])
@pytest.mark.parametrize("fault", ["lose_token", "wrong_block", "repeat_token"])
@pytest.mark.parametrize("settings", [TIMED, AHEAD, SLOW], ids=["at once", "ahead", "foretold"])
def test_damage_is_noticed(way: str, fault: str, settings: FakeSettings) -> None:
    assert ends_well(way, Faults(), settings)
    assert not ends_well(way, Faults(**{fault: True}), settings)
