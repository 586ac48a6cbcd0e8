"""Answers of runners find their futures; failures and silence become errors."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from shoal.policies.values.layouts import Unit, alone, tensor_parallel
from shoal.runtime.config import Addresses
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import (
    Elsewhere,
    Inbox,
    UnitChannel,
    UnitExecutor,
    channel_sockets,
    in_thread,
)
from shoal.runtime.protocol.messages import Mode

BEGUN = instructions.Begun([instructions.Rest("r", array("i", [1]), 4, ([2],))], ["other"])

GROUP = tensor_parallel((0, 1))


class Members:
    """A unit's members as its scheduler process meets them: their queues, and one way to answer."""

    def __init__(self, context: zmq.Context[Any], addresses: Addresses) -> None:
        self.queues: list[zmq.Socket[bytes]] = []
        for engine in GROUP.engines:
            queue: zmq.Socket[bytes] = context.socket(zmq.PULL)
            queue.bind(addresses.queue(GROUP, engine))
            self.queues.append(queue)
        self.inbox = Inbox(context, addresses.responses(0), engine=0)
        self.channel = UnitChannel(GROUP, channel_sockets(context, addresses, GROUP))
        self.inbox.add(self.channel)
        self._answers: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._answers.connect(addresses.responses(0))

    def received(self, engine: int) -> Any:
        return instructions.loads(self.queues[engine].recv())

    def answer(self, seq: int, engine: int, value: Any, unit: Unit = GROUP) -> None:
        result = instructions.Result(unit.name, seq, engine, value)
        self._answers.send(instructions.dumps(result))

    def fail(self, engine: int, error: str) -> None:
        self._answers.send(instructions.dumps(instructions.Failure(engine, error)))


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    context: zmq.Context[Any] = zmq.Context()
    yield Members(context, Addresses(tmp_path))
    context.destroy(linger=0)


@pytest.fixture
def executor(members: Members) -> UnitExecutor:
    UnitExecutor.connect(members.channel, members.inbox)
    executor = UnitExecutor.__new__(UnitExecutor)
    executor._init_executor()
    return executor


def test_every_member_gets_an_instruction_in_the_order_sent(members: Members) -> None:
    sent = [instructions.Detach(epoch) for epoch in range(3)]
    for instruction in sent:
        members.channel.send(instruction)
    for engine in GROUP.engines:
        assert [members.received(engine) for _ in sent] == sent


def test_one_answer_is_its_value(members: Members) -> None:
    seq, future = members.channel.expect(answers=1)
    members.answer(seq, 0, "tokens")
    assert members.inbox.wait(future, 60) == "tokens"


def test_several_answers_come_in_member_order_whatever_order_they_arrive_in(
    members: Members,
) -> None:
    seq, future = members.channel.expect(answers=2)
    members.answer(seq, 1, "second")
    members.answer(seq, 0, "first")
    assert members.inbox.wait(future, 60) == ["first", "second"]


def test_answers_out_of_order_find_their_own_futures(members: Members) -> None:
    first, early = members.channel.expect(answers=1)
    second, late = members.channel.expect(answers=1)
    members.answer(second, 0, "b")
    assert members.inbox.wait(late, 60) == "b"
    assert not early.done()
    members.answer(first, 0, "a")
    assert members.inbox.wait(early, 60) == "a"


def test_units_with_equal_numbers_do_not_mix_up_their_answers(members: Members) -> None:
    single = UnitChannel(alone(0), [])
    members.inbox.add(single)
    seq, own = single.expect(answers=1)
    group_seq, groups = members.channel.expect(answers=1)
    assert seq == group_seq
    members.answer(seq, 0, "own", unit=alone(0))
    assert members.inbox.wait(own, 60) == "own"
    assert not groups.done()


def test_an_answer_nobody_waits_for_is_an_error(members: Members) -> None:
    members.answer(5, 0, "stray")
    assert members.inbox.socket.poll(60_000)
    with pytest.raises(KeyError):
        members.inbox.drain()


def test_draining_an_empty_inbox_returns_at_once(members: Members) -> None:
    members.inbox.drain()


def test_the_failure_of_the_own_runner_is_the_end(members: Members, executor: UnitExecutor) -> None:
    _, future = members.channel.expect(answers=1)
    for notice in (
        lambda: members.inbox.wait(future, 60),
        members.inbox.drain,
        executor.check_health,
    ):
        members.fail(0, "ValueError: no")
        assert members.inbox.socket.poll(60_000)
        with pytest.raises(RunnerDied, match=r"^runner of engine 0: ValueError: no$"):
            notice()


def test_the_failure_of_another_runner_ends_what_it_was_to_answer(members: Members) -> None:
    single = UnitChannel(alone(0), [])
    members.inbox.add(single)
    seq, own = single.expect(answers=1)
    _, groups = members.channel.expect(answers=2)
    members.fail(1, "ValueError: no")
    with pytest.raises(RunnerDied, match=r"^runner of engine 1: ValueError: no$"):
        members.inbox.wait(groups, 60)
    members.answer(seq, 0, "own", unit=alone(0))
    assert members.inbox.wait(own, 60) == "own"


def test_what_others_answer_after_a_failure_is_dropped(members: Members) -> None:
    """A group's runners answer a copy that was begun before it was released."""
    single = UnitChannel(alone(0), [])
    members.inbox.add(single)
    seq, groups = members.channel.expect(answers=2)
    members.fail(1, "ValueError: no")
    members.fail(1, "ValueError: once more")
    members.answer(seq, 0, "late")
    own_seq, own = single.expect(answers=1)
    members.answer(own_seq, 0, "own", unit=alone(0))
    assert members.inbox.wait(own, 60) == "own"
    with pytest.raises(RunnerDied, match=r"^runner of engine 1: ValueError: no$"):
        groups.result()


@pytest.mark.parametrize("others", [[], [0]])
def test_the_last_answer_after_a_failure_changes_nothing(
    members: Members, others: list[int]
) -> None:
    seq, groups = members.channel.expect(answers=len(others) + 1)
    for engine in others:
        members.answer(seq, engine, "early")
    members.fail(1, "ValueError: no")
    with pytest.raises(RunnerDied):
        members.inbox.wait(groups, 60)
    members.answer(seq, 1, "late")
    assert members.inbox.socket.poll(60_000)
    members.inbox.drain()
    with pytest.raises(RunnerDied):
        groups.result()


def test_the_failure_of_another_runner_is_nothing_to_who_waits_for_none(members: Members) -> None:
    members.fail(1, "ValueError: no")
    assert members.inbox.socket.poll(60_000)
    members.inbox.drain()


def test_answers_for_a_group_without_a_channel_are_dropped(members: Members) -> None:
    seq, _ = members.channel.expect(answers=1)
    members.inbox.drop(GROUP)
    members.answer(seq, 0, "late")
    assert members.inbox.socket.poll(60_000)
    members.inbox.drain()


def test_a_thread_gets_the_answers_that_another_one_delivers(members: Members) -> None:
    UnitExecutor.connect(members.channel, Elsewhere())
    executor = UnitExecutor.__new__(UnitExecutor)
    executor._init_executor()
    answers = in_thread(lambda: executor.collective_rpc("method", timeout=60))
    for engine in GROUP.engines:
        assert members.received(engine) == instructions.Call(0, "method")
        members.answer(0, engine, engine)
    while not answers.done():
        members.inbox.drain()
    assert answers.result() == [0, 1]


def test_what_a_thread_raises_is_in_its_future() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_thread(fail).result(60)


def test_silence_is_a_time_out(members: Members) -> None:
    _, future = members.channel.expect(answers=1)
    with pytest.raises(TimeoutError, match="no answer from a runner for 0 s"):
        members.inbox.wait(future, 0.001)


def test_half_of_the_answers_is_a_time_out(members: Members) -> None:
    seq, future = members.channel.expect(answers=2)
    members.answer(seq, 0, "first")
    assert members.inbox.socket.poll(60_000)
    with pytest.raises(TimeoutError):
        members.inbox.wait(future, 0.001)
    assert not future.done()


# --- vLLM's executor interface ---


def test_a_call_reaches_every_member_and_returns_every_answer(
    members: Members, executor: UnitExecutor
) -> None:
    members.answer(0, 0, 10)
    members.answer(0, 1, 11)
    assert executor.collective_rpc("method", args=(1,), kwargs={"key": 2}) == [10, 11]
    expected = instructions.Call(0, "method", (1,), {"key": 2})
    assert [members.received(engine) for engine in GROUP.engines] == [expected, expected]


def test_a_call_that_is_not_answered_is_a_time_out(executor: UnitExecutor) -> None:
    with pytest.raises(TimeoutError):
        executor.collective_rpc("method", timeout=0.001)


def test_calls_of_functions_or_without_waiting_are_refused(executor: UnitExecutor) -> None:
    with pytest.raises(NotImplementedError):
        executor.collective_rpc(lambda worker: worker)
    with pytest.raises(NotImplementedError):
        executor.collective_rpc("method", non_block=True)


def test_a_step_goes_to_every_member_and_one_answers(
    members: Members, executor: UnitExecutor
) -> None:
    seq, future = executor.run_step("scheduled", None, sample=True, mode=Mode.TP, begun=BEGUN)
    step = instructions.Step(seq, "scheduled", None, sample=True, mode=Mode.TP, begun=BEGUN)
    assert [members.received(engine) for engine in GROUP.engines] == [step, step]
    members.answer(seq, 0, "output")
    assert members.inbox.wait(future, 60) == "output"


def test_a_deferred_step_is_answered_after_its_sampling(
    members: Members, executor: UnitExecutor
) -> None:
    seq, future = executor.run_step("scheduled", None, sample=False, mode=Mode.SP, begun=BEGUN)
    executor.sample_step(seq, "grammar")
    assert members.received(1) == instructions.Step(
        seq, "scheduled", None, sample=False, mode=Mode.SP, begun=BEGUN
    )
    assert members.received(1) == instructions.Sample(seq, "grammar")
    members.answer(seq, 0, "output")
    assert members.inbox.wait(future, 60) == "output"


def test_steps_are_numbered_one_after_the_other(executor: UnitExecutor) -> None:
    numbers = [
        executor.run_step("scheduled", None, sample=True, mode=Mode.TP, begun=BEGUN)[0]
        for _ in range(3)
    ]
    assert numbers == [0, 1, 2]


def test_it_supports_async_scheduling() -> None:
    assert UnitExecutor.supports_async_scheduling()
