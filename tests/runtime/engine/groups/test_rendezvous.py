"""Process groups that their members make by themselves, again and again, in any process."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.policies.values.layouts import Unit, tensor_parallel
from shoal.runtime.engine.groups.rendezvous import agreed_minimum

ENGINES = 4
PAIR = tensor_parallel((2, 3))
PATIENCE_SECONDS = 120.0


class Engine:
    """A process that is one of the node's engines, and does what it is told."""

    def __init__(self, directory: Path, engine: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, directory, engine))
        self._process.start()

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    @property
    def answer(self) -> Any:
        assert self._pipe.poll(PATIENCE_SECONDS)
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, directory: Path, engine: int) -> None:
    from shoal.runtime.engine.groups.rendezvous import number_process

    number_process(engine, ENGINES)
    groups: dict[Unit, Any] = {}
    while True:
        function, args = pipe.recv()
        try:
            pipe.send(function(directory, engine, groups, *args))
        except RuntimeError as error:
            pipe.send(f"RuntimeError: {error}")


def make(
    directory: Path,
    engine: int,
    groups: dict[Unit, Any],
    unit: Unit,
    generation: int,
    seconds: float = PATIENCE_SECONDS,
    alone: int = 1,
) -> int:
    """Make a unit's process group, and groups of this engine alone before it, as vLLM does."""
    from shoal.runtime.engine.groups.rendezvous import Rendezvous

    rendezvous = Rendezvous(directory, unit, engine, generation, seconds)
    for _ in range(alone):
        for other in range(ENGINES):
            rendezvous.new_group([other], backend="gloo")
    groups[unit] = rendezvous.new_group(unit.engines, backend="gloo")
    return groups[unit].size()


def total(directory: Path, engine: int, groups: dict[Unit, Any], unit: Unit | None) -> int:
    """Return the sum of the members' numbers; of no unit: of torch's default group."""
    import torch
    import torch.distributed as dist

    number = torch.tensor([engine])
    dist.all_reduce(number, group=None if unit is None else groups[unit])
    return int(number)


def exchange(
    directory: Path, engine: int, groups: dict[Unit, Any], unit: Unit, number: int, found: str
) -> list[int]:
    """Return the members' numbers, told as torch's symmetric memory tells: its ``number``-th time.

    Args:
        found: whose keys: those of ``symmetric memory``, or ``bare`` ones.
    """
    from datetime import timedelta

    from torch.distributed import distributed_c10d as c10d

    store = c10d._get_process_group_store(groups[unit])
    part = "Others" if found == "bare" else "CUDASymmetricMemory"
    keys = [f"{part}/{number}/{place}" for place in range(len(unit.engines))]
    store.set(keys[unit.engines.index(engine)], str(engine))
    store.wait(keys, timedelta(seconds=0.3 if found == "bare" else PATIENCE_SECONDS))
    return [int(store.get(key)) for key in keys]


def ask(engines: Sequence[Engine], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Let engines do something together."""
    for engine in engines:
        engine.tell(function, *args)
    return [engine.answer for engine in engines]


def test_a_group_is_made_by_its_members_and_again_when_one_was_replaced(tmp_path: Path) -> None:
    survivor, victim = (Engine(tmp_path, engine) for engine in PAIR.engines)
    try:
        assert ask([survivor, victim], make, PAIR, 0) == [2, 2]
        assert ask([survivor, victim], total, PAIR) == [5, 5]
        # Nobody talks to all engines: two of them are not even there.
        assert "No backend" in ask([survivor], total, None)[0]

        victim.kill()
        (alone,) = ask([survivor], make, PAIR, 1, 0.2)
        assert alone.startswith("RuntimeError: "), "the other one did not come in time"
        victim = Engine(tmp_path, 3)
        assert ask([survivor, victim], make, PAIR, 2) == [2, 2]
        assert ask([survivor, victim], total, PAIR) == [5, 5]
        assert [path.name for path in tmp_path.glob("members-*")] == ["members-tp2-2-3.2"]

        # torch counts what a process did, and the one that came back did less.
        for number in (0, 1):
            survivor.tell(exchange, PAIR, 7 + number, "symmetric memory")
            victim.tell(exchange, PAIR, number, "symmetric memory")
            assert [survivor.answer, victim.answer] == [[2, 3], [2, 3]]
        survivor.tell(exchange, PAIR, 9, "bare")
        victim.tell(exchange, PAIR, 2, "bare")
        assert all(
            answer.startswith("RuntimeError: ") for answer in (survivor.answer, victim.answer)
        )
    finally:
        survivor.kill()
        victim.kill()


def test_members_meet_though_one_of_them_has_made_other_groups_before(tmp_path: Path) -> None:
    """It lacks a narrower layout, say, whose groups the other one uses again."""
    engines = [Engine(tmp_path, engine) for engine in PAIR.engines]
    try:
        for engine, alone in zip(engines, (1, 2), strict=True):
            engine.tell(make, PAIR, 0, PATIENCE_SECONDS, alone)
        assert [engine.answer for engine in engines] == [2, 2]
        assert ask(engines, total, PAIR) == [5, 5]
    finally:
        for engine in engines:
            engine.kill()


def test_all_agree_on_the_least(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        agreed = threads.map(
            lambda engine, value: agreed_minimum(tmp_path, "bytes", engine, 3, value),
            range(3),
            (30, 10, 20),
        )
        assert list(agreed) == [10, 10, 10]


@pytest.mark.parametrize("value", [5, 500])
def test_one_that_comes_back_keeps_to_what_was_agreed(tmp_path: Path, value: int) -> None:
    test_all_agree_on_the_least(tmp_path)
    assert agreed_minimum(tmp_path, "bytes", 1, 3, value) == 10
