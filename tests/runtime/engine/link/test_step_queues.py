"""The order in which a runner does what its queues say."""

from collections.abc import Iterator

import pytest
import zmq

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.link import instructions as steps
from shoal.runtime.engine.link.step_queues import StepQueues

OWN, GROUP = DP, Layout(tp=2)


def step(seq: int, *, sample: bool = True) -> steps.Step:
    return steps.Step(seq, None, None, sample)


class Queues:
    """A runner's queues, both ends."""

    def __init__(self, context: zmq.Context) -> None:
        self.context = context
        self.senders: dict[Layout, zmq.Socket] = {}
        receivers: dict[Layout, zmq.Socket] = {}
        for layout in (OWN, GROUP):
            receivers[layout] = context.socket(zmq.PULL)
            receivers[layout].bind(f"inproc://{layout.name}")
            self.senders[layout] = context.socket(zmq.PUSH)
            self.senders[layout].connect(f"inproc://{layout.name}")
        self.prepared: list[tuple[Layout, steps.Instruction]] = []
        self.received = StepQueues(receivers, lambda *each: self.prepared.append(each))

    def send(self, layout: Layout, *instructions: steps.Instruction) -> None:
        for instruction in instructions:
            self.senders[layout].send(steps.dumps(instruction))

    def attach(self) -> None:
        self.send(OWN, steps.Attach(GROUP))
        self.send(GROUP, steps.Bind(5, [], {}, 0))
        assert self.take() == (GROUP, steps.Bind(5, [], {}, 0))

    def take(self) -> tuple[Layout, steps.Instruction]:
        return self.received.receive()

    def order(self, count: int) -> list[Layout]:
        """Take instructions and return whose they are."""
        return [self.take()[0] for _ in range(count)]


@pytest.fixture
def queues() -> Iterator[Queues]:
    context: zmq.Context = zmq.Context()
    yield Queues(context)
    context.destroy(linger=0)


def test_a_runner_reads_its_own_queue_until_it_is_attached(queues: Queues) -> None:
    queues.send(GROUP, step(0))
    queues.send(OWN, step(0), step(1), steps.Attach(GROUP), step(2))
    assert queues.order(3) == [OWN, OWN, GROUP]


def test_a_group_has_the_runner_alone_until_it_sends_it_back(queues: Queues) -> None:
    queues.attach()
    queues.send(OWN, step(0), steps.Attach(GROUP), step(1))
    queues.send(GROUP, *(step(seq) for seq in range(4)), steps.Detach(5), step(9))
    assert queues.order(6) == [GROUP] * 5 + [OWN]
    assert queues.take() == (GROUP, step(9)), "of the next bind"


def test_a_step_is_sampled_before_its_queue_is_left(queues: Queues) -> None:
    queues.send(OWN, step(0, sample=False), steps.Attach(GROUP), steps.Sample(0, None), step(1))
    queues.send(GROUP, step(0, sample=False), steps.Detach(5), steps.Sample(0, None))
    assert [queues.take() for _ in range(3)] == [
        (OWN, step(0, sample=False)),
        (OWN, steps.Sample(0, None)),
        (GROUP, step(0, sample=False)),
    ]
    assert queues.take() == (GROUP, steps.Detach(5))
    assert queues.take() == (GROUP, steps.Sample(0, None))
    assert queues.take() == (OWN, step(1))


def test_the_own_queue_is_read_beside_the_start_of_a_group(queues: Queues) -> None:
    queues.send(OWN, step(0), step(1))
    queues.send(GROUP, steps.Call(0, "load_model"), steps.Detach(0))
    received = queues.received
    assert received.receive_of(GROUP, 1.0) == steps.Call(0, "load_model")
    assert received.receive_own(1.0) == step(0)
    assert received.receive_of(GROUP, 1.0) == steps.Detach(0)
    assert queues.take() == (OWN, step(1))
    assert received.receive_own(0.0) is None


def test_the_own_queue_has_a_steps_sampling_before_anything_else(queues: Queues) -> None:
    queues.send(OWN, step(0, sample=False), steps.Sample(0, None))
    assert queues.received.receive_own(1.0) == step(0, sample=False)
    assert queues.received.awaits_sample
    assert queues.received.receive_own(1.0) == steps.Sample(0, None)
    assert not queues.received.awaits_sample


def test_the_own_queue_is_not_read_where_a_groups_is_next(queues: Queues) -> None:
    queues.send(OWN, steps.Attach(GROUP), step(0))
    assert queues.received.receive_own(1.0) is None
    assert queues.received.receive_own(1.0) is None
    queues.send(GROUP, steps.Detach(5))
    assert queues.order(2) == [GROUP, OWN]


def test_a_start_reads_one_queue_until_it_is_over(queues: Queues) -> None:
    queues.send(OWN, step(0))
    queues.send(GROUP, steps.Call(0, "load_model"), steps.Detach(0))
    queues.received.read(GROUP)
    assert queues.order(3) == [GROUP, GROUP, OWN]


def test_a_replaced_queue_is_read_and_what_the_former_one_held_is_dropped(
    queues: Queues,
) -> None:
    queues.send(GROUP, step(0))
    context = queues.context
    queue: zmq.Socket = context.socket(zmq.PULL)
    queue.bind("inproc://next generation")
    queues.received.replace(GROUP, queue)
    queues.senders[GROUP].close(linger=0)
    queues.senders[GROUP] = context.socket(zmq.PUSH)
    queues.senders[GROUP].connect("inproc://next generation")
    queues.send(OWN, steps.Attach(GROUP))
    queues.send(GROUP, step(1))
    assert queues.take() == (GROUP, step(1))


def test_other_queues_are_read_while_there_is_nothing_to_do(queues: Queues) -> None:
    queues.send(GROUP, steps.Call(0, "load_model"), step(0))
    assert queues.received.receive_own(0.05) is None
    queues.senders[GROUP].close(linger=0)
    queues.send(OWN, step(1))
    assert queues.take() == (OWN, step(1)), "what was read is not followed yet"
    queues.send(OWN, steps.Attach(GROUP))
    assert [queues.take(), queues.take()] == [
        (GROUP, steps.Call(0, "load_model")),
        (GROUP, step(0)),
    ]


def test_what_prepares_another_layout_is_followed_while_there_is_nothing_to_do(
    queues: Queues,
) -> None:
    more, later = steps.Extend([1], {0: [7]}), steps.Extend([2], {0: [8]})
    queues.send(GROUP, more, step(0), later)
    while queues.received.receive_own(0.05) is not None or not queues.prepared:
        pass
    assert queues.prepared == [(GROUP, more)]
    queues.send(OWN, steps.Attach(GROUP))
    assert [queues.take(), queues.take()] == [(GROUP, step(0)), (GROUP, later)]
    assert queues.prepared == [(GROUP, more)], "nothing overtakes what was sent before it"


def test_what_was_read_of_a_replaced_queue_is_dropped(queues: Queues) -> None:
    queues.send(GROUP, step(0))
    assert queues.received.receive_own(0.05) is None
    queue = queues.context.socket(zmq.PULL)
    queue.bind("inproc://another")
    queues.received.replace(GROUP, queue)
    assert queues.received.receive_of(GROUP, 0.0) is None
