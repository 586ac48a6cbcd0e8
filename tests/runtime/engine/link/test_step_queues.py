"""The order in which a runner does what its queues say."""

from collections.abc import Iterator

import pytest
import zmq

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.link import instructions as steps
from shoal.runtime.engine.link.step_queues import StepQueues, Turns

OWN, GROUP = DP, Layout(tp=2)
RATIO = 3


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
        self.received = StepQueues(receivers, RATIO)

    def send(self, layout: Layout, *instructions: steps.Instruction) -> None:
        for instruction in instructions:
            self.senders[layout].send(steps.dumps(instruction))

    def attach(self, *, interleaves: bool = True) -> None:
        self.send(OWN, steps.Attach(GROUP, 5, interleaves))
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


def test_one_own_step_after_every_so_many_of_the_group(queues: Queues) -> None:
    queues.attach()
    queues.send(GROUP, *(step(seq) for seq in range(9)))
    queues.send(OWN, *(step(seq) for seq in range(9)))
    assert queues.order(12) == [GROUP, GROUP, GROUP, OWN] * 3


def test_whoever_works_alone_gets_every_turn(queues: Queues) -> None:
    queues.attach()
    queues.send(OWN, *(step(seq) for seq in range(4)))
    assert queues.order(4) == [OWN] * 4
    queues.send(GROUP, *(step(seq) for seq in range(8)))
    assert queues.order(8) == [GROUP] * 8
    queues.send(GROUP, steps.Rest())
    queues.send(OWN, *(step(seq) for seq in range(4)))
    assert queues.order(4) == [OWN] * 4


def test_a_turn_of_the_group_is_kept_until_it_says_that_it_rests(queues: Queues) -> None:
    """Its next step is not queued yet while its scheduler reads the result of the last one."""
    queues.attach()
    queues.send(GROUP, step(0))
    assert queues.order(1) == [GROUP]
    queues.send(OWN, step(0))
    queues.send(GROUP, step(1), step(2))
    assert queues.order(3) == [GROUP, GROUP, OWN]


def test_leases_of_the_group_take_no_turn(queues: Queues) -> None:
    queues.attach()
    queues.send(OWN, step(0), step(1))
    for seq in range(RATIO):
        queues.send(GROUP, step(seq), steps.Extend([], {}))
    assert queues.order(7) == [GROUP] * 5 + [OWN, GROUP]


def test_nothing_comes_between_a_step_and_its_sampling(queues: Queues) -> None:
    queues.attach()
    queues.send(OWN, step(0, sample=False))
    assert queues.order(1) == [OWN]
    queues.send(GROUP, step(0, sample=False))
    queues.send(OWN, steps.Sample(0, None), step(1))
    assert queues.take() == (OWN, steps.Sample(0, None))
    assert queues.order(1) == [GROUP]
    queues.send(GROUP, steps.Sample(0, None), steps.Rest())
    assert queues.take() == (GROUP, steps.Sample(0, None))
    assert queues.order(1) == [OWN]


def test_a_group_that_does_not_interleave_has_the_runner_alone(queues: Queues) -> None:
    queues.attach(interleaves=False)
    queues.send(OWN, step(0))
    queues.send(GROUP, step(0), steps.Rest(), *(step(seq) for seq in range(4)), steps.Detach(5))
    assert queues.order(7) == [GROUP] * 6 + [OWN]


def test_what_follows_the_release_comes_after_the_groups_last_step(queues: Queues) -> None:
    queues.attach()
    queues.send(OWN, step(0), steps.AwaitDetach(5), step(1), steps.Attach(GROUP, 6))
    queues.send(GROUP, *(step(seq) for seq in range(7)), steps.Detach(5), step(9))
    # Its second turn would be before the group's seventh step.
    assert queues.order(10) == [GROUP] * 3 + [OWN] + [GROUP] * 5 + [OWN]
    assert queues.take() == (GROUP, step(9)), "of the next bind"


def test_a_release_may_be_over_before_it_is_told_of(queues: Queues) -> None:
    queues.attach()
    queues.send(GROUP, step(0), steps.Detach(5))
    assert queues.order(2) == [GROUP] * 2
    queues.send(OWN, step(0), steps.AwaitDetach(5), step(1))
    assert queues.order(2) == [OWN] * 2


def test_a_start_reads_one_queue_until_it_is_over(queues: Queues) -> None:
    queues.send(OWN, step(0))
    queues.send(GROUP, steps.Call(0, "load_model"), steps.Detach(0))
    queues.received.read(GROUP)
    assert queues.order(3) == [GROUP, GROUP, OWN]


def test_members_take_their_own_turns_side_by_side() -> None:
    """Whatever each did alone, they count the same steps of the group."""
    members = [Turns(RATIO), Turns(RATIO)]
    for _ in range(5):
        members[0].own_step()
    due = []
    for _ in range(2 * RATIO):
        for turns in members:
            turns.group_step()
        due.append([turns.own_due for turns in members])
        members[0].own_step()
    assert due == [[False, False], [False, False], [True, True]] * 2


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
    queues.send(OWN, steps.Attach(GROUP, 5))
    queues.send(GROUP, step(1))
    assert queues.take() == (GROUP, step(1))
