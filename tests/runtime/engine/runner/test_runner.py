"""What a runner keeps for each layout besides its worker."""

import random
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import zmq
from vllm.utils.torch_utils import set_random_seed

from shoal.policies.values.layouts import DP, Layout, Unit, alone, tensor_parallel
from shoal.runtime.config import Addresses
from shoal.runtime.engine.kv.kv_cache import BlockMap
from shoal.runtime.engine.layouts.layout_worker import LayoutWorker
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import push_socket
from shoal.runtime.engine.runner.runner import RandomStates, Responder, Runner

OWN, GROUP = DP, Layout(tp=2)


def draw() -> tuple[float, float, float]:
    return (float(torch.rand(1)), float(numpy.random.random()), random.random())


def drawn(seed: int, count: int) -> list[tuple[float, float, float]]:
    set_random_seed(seed)
    return [draw() for _ in range(count)]


@pytest.fixture
def states() -> Iterator[RandomStates]:
    states = RandomStates()
    states.switch(GROUP, OWN)
    yield states
    states.switch(OWN, GROUP)


def test_layouts_in_turn_each_draw_as_if_alone(states: RandomStates) -> None:
    own, group = drawn(5, 6), drawn(9, 3)
    set_random_seed(5)
    got_own, got_group = [draw()], []
    states.switch(OWN, GROUP)
    set_random_seed(9)
    for _ in range(3):
        got_group.append(draw())
        states.switch(GROUP, OWN)
        got_own.append(draw())
        states.switch(OWN, GROUP)
    states.switch(GROUP, OWN)
    got_own += [draw(), draw()]
    assert (got_own, got_group) == (own, group)


def test_a_forgotten_group_is_not_taken_up_again(states: RandomStates) -> None:
    """Members that are not reseeded must not look equal because they once were."""
    states.switch(OWN, GROUP)
    set_random_seed(9)
    states.switch(GROUP, OWN)
    states.forget(GROUP)
    set_random_seed(5)
    torch_draw = draw()[0]
    set_random_seed(5)
    states.switch(OWN, GROUP)
    assert draw()[0] == torch_draw
    states.switch(GROUP, OWN)


def test_an_answer_that_waits_for_the_device_holds_up_no_one_but_later_answers(
    tmp_path: Path,
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    addresses, copied = Addresses(tmp_path), Event()
    leader = context.socket(zmq.PULL)
    leader.bind(addresses.responses(0))
    responder = Responder(context, addresses, 0)

    def wait() -> instructions.Copied:
        assert copied.wait(60)
        return instructions.Copied(100, 0.5)

    responder.answer(alone(0), 1, "before")
    responder.answer(alone(0), 2, wait)
    responder.answer(alone(0), 3, "after")
    assert instructions.loads(leader.recv()).value == "before"
    assert not leader.poll(0)
    copied.set()
    answers = [instructions.loads(leader.recv()) for _ in range(2)]
    assert [(answer.seq, answer.value) for answer in answers] == [
        (2, instructions.Copied(100, 0.5)),
        (3, "after"),
    ]
    responder.close()
    leader.close()
    context.term()


class Worker:
    """A layout's worker without a model. It notes what it is told of requests."""

    map_blocks = LayoutWorker.map_blocks
    model_runner = None

    def __init__(self, unit: Unit, execute: Callable[..., str]) -> None:
        self.unit, self.execute, self.answers = unit, execute, True
        self.block_map: BlockMap | None = None
        self.told = list[Any]()
        self.ahead = list[bool]()
        """Whether requests that get rows are written by then."""
        self.introductions = SimpleNamespace(
            add=self.told.append,
            seat=self._seat,
            foresee=self.told.append,
            ahead=SimpleNamespace(leave=lambda: None),
        )

    def _seat(self, requests: Any, _: None, *, ahead: bool) -> None:
        self.told.append(requests)
        self.ahead.append(ahead)


def known(worker: Worker) -> dict[int, int]:
    """Return what a worker knows of blocks."""
    return {} if worker.block_map is None else dict(worker.block_map._physical)


class Units:
    """A runner without a model, the queues that it reads, and where it answers."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.units = {DP: alone(0), GROUP: tensor_parallel((0, 1))}
        self.workers = {layout: Worker(unit, self.execute) for layout, unit in self.units.items()}
        addresses = Addresses(directory)
        self.answers = self.context.socket(zmq.PULL)
        self.answers.bind(addresses.responses(0))
        loader: Any = SimpleNamespace(workers=self.workers)
        node: Any = SimpleNamespace(runtime_dir=str(directory))
        self.runner = Runner(node, 0, loader, self.context)
        self.queues = {
            layout: push_socket(self.context, addresses.queue(unit, 0))
            for layout, unit in self.units.items()
        }
        self.copied = Event()
        carrying: Any = SimpleNamespace(copy_ahead=self.copy_ahead, foresee=lambda *_: None)
        self.runner._carrying = carrying

    def execute(self, scheduled: str, *_: Any) -> str:
        return f"output of {scheduled}"

    def copy_ahead(self, ahead: instructions.CopyAhead) -> Any:
        def wait() -> instructions.Copied:
            assert self.copied.wait(60)
            return instructions.Copied(ahead.seq, 0.5)

        return wait

    def tell(self, layout: Layout, *told: instructions.Instruction) -> None:
        for instruction in told:
            self.queues[layout].send(instructions.dumps(instruction))
            self.runner._turn()

    def answer(self) -> tuple[int, Any]:
        result = instructions.loads(self.answers.recv())
        return result.seq, result.value

    def close(self) -> None:
        self.copied.set()
        self.runner._responder.close()
        self.runner._beside.close()
        self.context.destroy(linger=0)


@pytest.fixture
def units(tmp_path: Path) -> Iterator[Units]:
    units = Units(tmp_path)
    yield units
    units.close()


def test_steps_are_answered_while_kv_is_copied_ahead(units: Units) -> None:
    ahead = instructions.CopyAhead(1, alone(1), units.units[GROUP], [])
    units.tell(DP, ahead, instructions.Step(2, "a step", None, sample=True))
    assert units.answer() == (2, "output of a step")
    units.copied.set()
    assert units.answer() == (1, instructions.Copied(1, 0.5))


def test_rows_are_written_ahead_with_the_last_of_them_while_another_layout_runs(
    units: Units,
) -> None:
    group, rest = units.workers[GROUP], [instructions.Rest("r", array("i", [5]), 3, ([1],))]
    for is_last in (False, True):
        units.queues[GROUP].send(instructions.dumps(instructions.Seat(rest, is_last)))
    while units.runner._queues.receive_own(0.05) is not None or len(group.ahead) < 2:
        pass
    bind = instructions.Bind(1, [2], {0: [8], 1: [6]}, seed=0)
    units.queues[DP].send(instructions.dumps(instructions.Attach(GROUP)))
    units.queues[GROUP].send(instructions.dumps(bind))
    while units.runner._layout != GROUP:
        units.runner._turn()
    units.tell(GROUP, instructions.Seat(rest), instructions.Detach(1))
    assert group.ahead == [False, True, False], "its steps may be in flight"


def test_what_requests_will_have_computed_is_known_before_they_come(units: Units) -> None:
    arrival = instructions.Arrival("r", [], [], 8, None)
    units.tell(DP, instructions.Foresee(1, units.units[GROUP], [arrival]))
    assert units.workers[DP].told == [{"r": 8}]


def test_a_lease_may_grow_before_the_group_is_first_bound(units: Units) -> None:
    extend = instructions.Extend([1, 2], {0: [7, 8], 1: [5, 6]})
    bind = instructions.Bind(1, [3], {0: [9], 1: [4]}, seed=0)
    for queue, sent in ((GROUP, extend), (DP, instructions.Attach(GROUP)), (GROUP, bind)):
        units.queues[queue].send(instructions.dumps(sent))
    group = units.workers[GROUP]
    # The first may come before the second, and then needs no turn of its own.
    while units.runner._layout != GROUP or 3 not in known(group):
        units.runner._turn()
    assert known(group) == {0: 0, 1: 7, 2: 8, 3: 9}
    units.tell(GROUP, instructions.Detach(1))


def test_a_coming_group_is_prepared_while_there_is_nothing_else_to_do(units: Units) -> None:
    """Its numbers stay those of its bind: nothing draws from its generators before that."""
    group, seat = units.workers[GROUP], [instructions.Rest("r", array("i", [5]), 3, ([1],))]
    for each in (
        instructions.Introduce("a request"),
        instructions.Extend([1], {0: [7], 1: [5]}),
        instructions.Seat(seat),
        instructions.Bind(1, [2], {0: [8], 1: [6]}, seed=0),
        instructions.Introduce("another"),
    ):
        units.queues[GROUP].send(instructions.dumps(each))
    while units.runner._queues.receive_own(0.05) is not None or len(group.told) < 2:
        pass
    assert group.told == ["a request", seat]
    assert group.block_map is not None
    assert group.block_map._physical == {0: 0, 1: 7}, "before its bind"
    assert units.runner._layout == DP
    units.tell(DP, instructions.Step(1, "a step", None, sample=True))
    units.queues[DP].send(instructions.dumps(instructions.Attach(GROUP)))
    units.runner._turn()
    units.runner._turn()
    assert group.block_map._physical == {0: 0, 1: 7, 2: 8}
    assert group.told == ["a request", seat, "another"]
