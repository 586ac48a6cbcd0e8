"""The fake engine keeps the interface's promises on its own."""

from typing import Any

import msgspec
import pytest

from shoal.policies.values.batch import Batch, Mode, PromptWork
from shoal.policies.values.layouts import alone
from shoal.policies.values.level import WHOLE, Level
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.agent.results import Collected, CoreLoad, EndedSteps
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.fake_core import FakeCore
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.engine.fake.faults import NO_FAULTS, Faults, Seam
from shoal.runtime.engine.fake.step_times import Devices, constant
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import CarriedRequest, Work
from tests.runtime.loopback_node import problems, request_payload
from tests.units import tp

SETTINGS = FakeSettings(
    step_seconds=0.5, num_blocks=10, block_tokens=4, max_num_seqs=3, max_model_len=30
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def make(
    clock: ManualClock, engine: int = 0, faults: Faults = NO_FAULTS, **settings: Any
) -> FakeBackend:
    fake = msgspec.structs.replace(SETTINGS, **settings)
    config = NodeConfig(2, 2, "manual", "unused", {}, fake=fake)
    return FakeBackend(config, engine, clock=clock, faults=faults)


def advance(core, ended: Collected | None = None) -> bool:
    """Take what has ended and go on, as an agent does; return whether there was anything.

    What has ended is added to ``ended``.
    """
    collected = core.collect()
    if collected is not None and ended is not None:
        ended.outputs.extend(collected.outputs)
        ended.steps.extend(collected.steps)
        ended.finished.extend(collected.finished)
    return core.dispatch() or collected is not None


def run(core, clock: ManualClock, steps: int = 200) -> Collected:
    """Step until nothing is left and return what came of it."""
    ended = Collected([], [], [])
    for _ in range(steps):
        clock.advance(SETTINGS.step_seconds)
        advance(core, ended)
        if not core.num_requests and not core.in_flight:
            return ended
    raise AssertionError("requests are left")


def tokens_of(ended: Collected) -> dict[str, list[int]]:
    """Return every token, by request."""
    tokens: dict[str, list[int]] = {}
    for outputs in ended.outputs:
        for output in msgspec.msgpack.decode(outputs.frames[0], type=wire.Outputs).outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_a_step_takes_its_time(clock: ManualClock) -> None:
    core = make(clock).own
    core.add(request_payload("a", [1, 2], 1))
    assert advance(core)
    assert core.in_flight == 1
    assert core.collect() is None
    clock.advance(0.5)
    ended = core.collect()
    assert ended is not None
    assert (core.in_flight, core.num_requests, ended.finished) == (0, 0, ["a"])


def test_steps_say_what_they_computed(clock: ManualClock) -> None:
    core = make(clock).own
    core.add(request_payload("a", [1, 2, 3, 4], 3))
    ended = run(core, clock)
    # Four prompt tokens attend to 1, 2, 3 and 4; the two decodes read 5 and 6.
    assert ended.steps == [
        EndedSteps(Mode.TP, Work(steps=1, prefill_tokens=4, prefill_pairs=10)),
        EndedSteps(Mode.TP, Work(steps=1, decodes=1, context_tokens=5)),
        EndedSteps(Mode.TP, Work(steps=1, decodes=1, context_tokens=6)),
    ]
    assert core.collect() is None


def test_steps_simulated_as_one_count_as_many(clock: ManualClock) -> None:
    settings = msgspec.structs.replace(SETTINGS, steps_at_once=64)
    config = NodeConfig(2, 2, "manual", "unused", {}, fake=settings)
    core = FakeBackend(config, 0, clock=clock).own
    core.add(request_payload("a", [1, 2, 3, 4], 9))
    ended = Collected([], [], [])
    for steps in (1, 1, 8):
        clock.advance(steps * SETTINGS.step_seconds)
        advance(core, ended)
    (_, decodes) = ended.steps
    assert decodes.work == Work(steps=8, decodes=8, context_tokens=sum(range(5, 13)))


def test_wakeup_is_the_end_of_the_step(clock: ManualClock) -> None:
    backend = make(clock)
    assert backend.next_wakeup() is None
    backend.own.add(request_payload("a", [1, 2], 1))
    advance(backend.own)
    clock.advance(0.2)
    assert backend.next_wakeup() == pytest.approx(0.3)


def test_preempted_requests_are_recomputed_to_the_same_tokens(clock: ManualClock) -> None:
    backend = make(clock)
    core = backend.own
    prompts = {f"r{k}": [k + 1] * 9 for k in range(3)}
    for request_id, prompt in prompts.items():
        core.add(request_payload(request_id, prompt, 18))
    # Three requests of 27 tokens want 21 blocks of the 10 there are.
    tokens = tokens_of(run(core, clock))
    assert tokens == {r: expected_tokens(p, 18) for r, p in prompts.items()}
    assert problems(backend) == []
    assert core.load == CoreLoad(0, 0, 10)


def test_batch_is_bounded(clock: ManualClock) -> None:
    core = make(clock).own
    for k in range(5):
        core.add(request_payload(f"r{k}", [k + 1], 3))
    advance(core)
    assert core.load == CoreLoad(3, 2, 7)


def test_the_load_says_what_is_left_of_a_prompt_that_takes_several_steps() -> None:
    done = [(10, 4), (5, 5), (3, 9)]
    assert CoreLoad.of(3, 2, 7, done).begun == PromptWork(6, 4 * 6 + 6 * 6 // 2)


@pytest.mark.parametrize("prompt", [[], [1] * 30])
def test_impossible_prompts_are_refused(clock: ManualClock, prompt: list[int]) -> None:
    core = make(clock).own
    with pytest.raises(ValueError, match="prompt of"):
        core.add(request_payload("a", prompt, 3))
    assert core.num_requests == 0


def test_output_ends_at_the_model_length(clock: ManualClock) -> None:
    core = make(clock).own
    core.add(request_payload("a", [1] * 28, None))
    assert len(tokens_of(run(core, clock))["a"]) == 2


def test_urgent_lending_preempts_the_latest_first(clock: ManualClock) -> None:
    backend = make(clock)
    core = backend.own
    for token, request_id in enumerate(("early", "late")):
        core.add(request_payload(request_id, [token] * 16, 3))
    advance(core)
    assert len(backend.own.lend(5)) == 2
    assert len(backend.own.lend(4, urgent=True)) == 4
    assert core.load == CoreLoad(1, 1, 0)
    backend.own.take_back(sorted(backend.own.lent))
    assert tokens_of(run(core, clock))["late"] == expected_tokens([1] * 16, 3)
    assert problems(backend) == []


def test_blocks_that_are_not_lent_cannot_come_back(clock: ManualClock) -> None:
    with pytest.raises(KeyError):
        make(clock).own.take_back([3])


def test_lease_opens_and_closes_row_by_row(clock: ManualClock) -> None:
    backend = make(clock)
    group = backend.groups[tp(0, 1)]
    mine = backend.own.lend(6)
    lease = {0: mine, 1: [9, 8, 7, 6, 5, 4]}
    pairs = set(zip(lease[0], lease[1], strict=True))
    group.bind(1, lease, seed=0)
    group.add(request_payload("a", [1] * 9, 8))  # two blocks of 8 tokens, then a third
    advance(group)
    first = group.shrink(3)
    assert group.lease_blocks == 3
    assert tokens_of(run(group, clock))["a"] == expected_tokens([1] * 9, 8)
    group.release(1)
    rest = group.shrink(6)
    assert (len(first[0]), len(rest[0]), group.lease_blocks) == (3, 3, 0)
    returned = set(zip([*first[0], *rest[0]], [*first[1], *rest[1]], strict=True))
    assert returned == pairs


def test_release_keeps_what_requests_hold(clock: ManualClock) -> None:
    backend = make(clock)
    group = backend.groups[tp(0, 1)]
    group.bind(1, {0: backend.own.lend(6), 1: [1, 2, 3, 4, 5, 6]}, seed=0)
    group.add(request_payload("a", [1] * 9, 8))
    advance(group)
    group.release(1)
    assert len(group.shrink(6)[0]) == 4
    assert group.lease_blocks == 2
    assert not advance(group)
    group.abort(["a"])
    assert len(group.shrink(6)[1]) == 2


def test_blocks_are_lacking_that_requests_need(clock: ManualClock) -> None:
    backend = make(clock)
    group = backend.groups[tp(0, 1)]
    group.bind(1, {0: backend.own.lend(1), 1: [1]}, seed=0)
    assert group.blocks_lacking == 0
    group.add(request_payload("a", [1] * 20, 8))
    assert group.blocks_lacking == 2
    group.grow({0: backend.own.lend(2), 1: [2, 3]})
    assert group.blocks_lacking == 0


def test_blocks_are_wanted_before_cached_ones_are_evicted(clock: ManualClock) -> None:
    backend = make(clock, max_num_batched_tokens=16)  # a step takes three blocks of 8 tokens
    group = backend.groups[tp(0, 1)]
    group.bind(1, {0: backend.own.lend(7), 1: [*range(1, 8)]}, seed=0)
    assert group.blocks_wanted == 0
    group.add(request_payload("a", [1] * 24, 1))
    run(group, clock)
    assert (group.load.free_blocks, group.blocks_lacking) == (7, 0)
    assert group.blocks_wanted == 2 * 3 + 3 - 4, "three of the seven cache the prompt"
    group.grow({0: backend.own.lend(3), 1: [*range(8, 11)]})
    assert group.blocks_wanted == 0


def test_nothing_is_wanted_for_a_cache_that_is_turned_off(clock: ManualClock) -> None:
    backend = make(clock, prefix_caching=False)
    group = backend.groups[tp(0, 1)]
    group.bind(1, {0: backend.own.lend(1), 1: [1]}, seed=0)
    assert group.blocks_wanted == 0


def test_lease_of_uneven_columns_is_refused(clock: ManualClock) -> None:
    backend = make(clock)
    with pytest.raises(ValueError, match="zip"):
        backend.groups[tp(0, 1)].bind(1, {0: backend.own.lend(3), 1: [1]}, seed=0)


def test_only_leaders_have_a_group_core(clock: ManualClock) -> None:
    assert set(make(clock, 0).cores) == {alone(0), tp(0, 1)}
    assert set(make(clock, 1).cores) == {alone(1)}


def test_utility_calls(clock: ManualClock) -> None:
    backend = make(clock)

    def ask(method: str) -> wire.UtilityOutput | None:
        (frame,) = backend.utility([msgspec.msgpack.encode([1, 5, method, []])])
        return msgspec.msgpack.decode(frame, type=wire.Outputs).utility_output

    tasks = ask("get_supported_tasks")
    assert tasks is not None
    assert tasks.result == (None, ["generate"])
    unknown = ask("sleep")
    assert unknown is not None
    assert "sleep" in (unknown.failure_message or "")


@pytest.mark.parametrize("seam", list(Seam))
def test_faults_strike_where_they_should(clock: ManualClock, seam: Seam) -> None:
    backend = make(clock, faults=Faults(die_at=seam))
    backend.own.add(request_payload("leaves", [1], 1))
    backend.own.expect("comes", request_payload("comes", [1], 1))
    comes = CarriedRequest("comes", [], 0, {}, 1)
    calls = {
        Seam.LEND: lambda: backend.own.lend(1),
        Seam.TAKE_BACK: lambda: backend.own.take_back([]),
        Seam.ATTACH: lambda: backend.attach(tp(0, 1)),
        Seam.BIND: lambda: backend.groups[tp(0, 1)].bind(1, {0: [], 1: []}, 0),
        Seam.RELEASE: lambda: backend.groups[tp(0, 1)].release(1),
        Seam.ANNOUNCE: lambda: backend.own.announce(["leaves"]),
        Seam.EXPORT: lambda: backend.own.export(["leaves"]),
        Seam.ALLOT: lambda: backend.own.allot(comes),
        Seam.ADOPT: lambda: backend.own.adopt(alone(1), comes, with_kv=True),
        Seam.COPY: lambda: backend.own.copy(),
        Seam.DROP: lambda: backend.own.abort(["leaves"]),
        Seam.KEEP: lambda: backend.own.keep([]),
        Seam.PIN: lambda: backend.own.pin(1, []),
        Seam.UNPIN: lambda: backend.own.unpin(1),
        Seam.RESERVE: lambda: backend.own.reserve(1, alone(1), []),
        Seam.SETTLE: lambda: backend.own.settle(1, copied=True),
        Seam.COPY_AHEAD: lambda: backend.own.copy_ahead(1, alone(1), alone(0), []),
        Seam.CLOSE: lambda: backend.own.withhold(1000),
        Seam.FILL: lambda: backend.fill_weights(alone(0), 1000, WHOLE),
        Seam.USE: lambda: backend.use_weights(alone(0), WHOLE),
        Seam.OPEN: lambda: backend.own.restore(),
    }
    for other, call in calls.items():
        if other is not seam:
            call()
    with pytest.raises(RunnerDied, match=seam.value):
        calls[seam]()


def timed(clock: ManualClock, **settings: int) -> FakeCore:
    """Return a core whose steps take a second, and a tenth more for every prompt token."""
    fake = msgspec.structs.replace(SETTINGS, **settings)
    config = NodeConfig(2, 2, "manual", "unused", {}, fake=fake)

    def times(degree: int, batch: Batch, mode: Mode = Mode.TP, /) -> float:
        return 1.0 + batch.prefill_tokens / 10

    return FakeBackend(config, 0, clock=clock, step_times=times).own


def test_long_prompts_are_computed_in_chunks(clock: ManualClock) -> None:
    core = timed(clock, max_num_batched_tokens=8)
    core.add(request_payload("a", [1] * 20, 2))
    for seconds, outputs in ((1.8, 0), (1.8, 0), (1.4, 1), (1.0, 1)):
        advance(core)
        clock.advance(seconds - 0.01)
        assert core.collect() is None
        clock.advance(0.02)
        ended = core.collect()
        assert ended is not None
        assert len(ended.outputs) == outputs
    assert core.num_requests == 0


def test_decodes_go_on_beside_a_chunked_prompt(clock: ManualClock) -> None:
    core = timed(clock, max_num_batched_tokens=6)
    core.add(request_payload("a", [1] * 4, 9))
    advance(core)
    clock.advance(2.0)
    core.add(request_payload("b", [2] * 10, 2))
    # Five of b's tokens beside one of a's, twice.
    for ids in (["a"], ["a", "b"]):
        advance(core)
        clock.advance(1.6)
        ended = core.collect()
        assert ended is not None
        (outputs,) = ended.outputs
        message = msgspec.msgpack.decode(outputs.frames[0], type=wire.Outputs)
        assert [output.request_id for output in message.outputs] == ids


def test_equal_steps_run_as_one_until_something_comes(clock: ManualClock) -> None:
    core = timed(clock, steps_at_once=64)
    core.add(request_payload("a", [1] * 2, 12))
    advance(core)
    clock.advance(1.2)
    advance(core)
    # Eleven tokens are left: eleven steps of a second.
    clock.advance(5.5)
    assert core.collect() is None
    core.pause()  # The caller has something else to do: cut after the sixth.
    clock.advance(0.6)
    ended = core.collect()
    assert ended is not None
    (outputs,) = ended.outputs
    (output,) = msgspec.msgpack.decode(outputs.frames[0], type=wire.Outputs).outputs
    assert output.new_token_ids == expected_tokens([1] * 2, 12)[1:7]
    assert core.check_integrity() == []


def test_a_new_request_ends_a_run_of_steps(clock: ManualClock) -> None:
    core = timed(clock, steps_at_once=64)
    core.add(request_payload("a", [1] * 2, 12))
    advance(core)
    clock.advance(1.2)
    advance(core)
    clock.advance(2.5)
    core.add(request_payload("b", [2] * 3, 1))
    assert core.due == pytest.approx(1.2 + 3.0)


@pytest.mark.parametrize(("asynchronous", "late"), [(True, 2), (False, 1)])
def test_a_step_that_was_scheduled_ahead_has_no_later_request(
    clock: ManualClock, asynchronous: bool, late: int
) -> None:
    settings = msgspec.structs.replace(SETTINGS, asynchronous=asynchronous)
    config = NodeConfig(2, 2, "manual", "unused", {}, fake=settings)
    core = FakeBackend(config, 0, clock=clock).own
    core.add(request_payload("early", [1] * 4, 8))
    advance(core)
    clock.advance(SETTINGS.step_seconds / 2)
    core.add(request_payload("late", [2] * 4, 8))
    clock.advance(SETTINGS.step_seconds / 2)
    seen: list[set[str]] = []
    for _ in range(4):
        ended = Collected([], [], [])
        advance(core, ended)
        seen.append(set(tokens_of(ended)))
        clock.advance(SETTINGS.step_seconds)
    first = next(number for number, names in enumerate(seen) if "late" in names)
    assert first == late, "the step under way is number 0"
    assert all("early" in names for names in seen)


def test_an_idle_unit_starts_a_request_at_once_though_it_schedules_ahead(
    clock: ManualClock,
) -> None:
    settings = msgspec.structs.replace(SETTINGS, asynchronous=True)
    core = FakeBackend(NodeConfig(2, 2, "manual", "unused", {}, fake=settings), 0, clock=clock).own
    for name in ("first", "second"):
        core.add(request_payload(name, [1] * 4, 1))
        assert advance(core)
        clock.advance(SETTINGS.step_seconds)
        ended = core.collect()
        assert ended is not None
        assert set(tokens_of(ended)) == {name}


def test_a_group_waits_for_the_steps_of_its_members(clock: ManualClock) -> None:
    config = NodeConfig(2, 2, "manual", "unused", {}, fake=SETTINGS)
    devices = Devices()
    first, second = (FakeBackend(config, e, clock=clock, devices=devices) for e in range(2))
    second.own.add(request_payload("m", [1], 5))
    clock.advance(0.3)
    advance(second.own)
    group = first.groups[tp(0, 1)]
    group.bind(1, {0: first.own.lend(2), 1: second.own.lend(2)}, 0)
    group.add(request_payload("g", [1], 5))
    clock.advance(0.1)
    advance(group)
    assert group.due == pytest.approx(0.3 + 2 * SETTINGS.step_seconds)


def test_starts_are_told_once(clock: ManualClock) -> None:
    started: list[tuple[str, float]] = []
    config = NodeConfig(2, 2, "manual", "unused", {}, fake=SETTINGS)
    backend = FakeBackend(config, 0, clock=clock, on_start=lambda *start: started.append(start))
    clock.advance(2.0)
    backend.own.add(request_payload("a", [1], 3))
    run(backend.own, clock)
    assert started == [("a", 2.5)]


def test_the_layers_of_a_stage_are_copied_in_a_part_of_the_time() -> None:
    settings = FakeSettings(whole_blocks=8, stage_blocks={2: 12}, fill_seconds=2.0)
    clock, config = ManualClock(), NodeConfig(2, 2, "manual", "", fake=settings, share_weights=2)
    backend = FakeBackend(config, 0, clock=clock)
    filled = backend.fill_weights(alone(0), 12, Level(2, 2))
    assert not filled.done()
    clock.advance(1.0)
    assert filled.done()


def test_a_change_of_memory_takes_its_time_and_then_steps_take_another() -> None:
    settings = FakeSettings(whole_blocks=8, fill_seconds=2.0, use_seconds=0.5)
    config = NodeConfig(2, 2, "manual", "", fake=settings, share_weights=2)
    clock, devices = ManualClock(), Devices()
    times = {WHOLE: constant(1.0), Level(2): constant(3.0)}
    backend = FakeBackend(config, 0, clock=clock, level_times=times, devices=devices)
    unit, core = alone(0), backend.own

    def step() -> float:
        core.add(request_payload(f"at {clock.now}", [1], 1))
        assert core.dispatch()
        return core.due - clock.now if core.due else 0.0

    assert step() == 3.0
    filled = backend.fill_weights(unit, 8, WHOLE)
    assert not filled.done()
    clock.advance(2.0)
    assert (filled.done(), filled.result()) == (True, "")
    used = backend.use_weights(unit, WHOLE)
    clock.advance(1.4)
    assert not used.done(), "behind the step in flight, which ends after 3 s"
    clock.advance(0.1)
    assert used.done()
    core.collect()
    assert step() == 1.0
    assert devices.level(unit) == WHOLE
