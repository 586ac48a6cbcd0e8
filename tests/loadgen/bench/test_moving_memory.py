"""The benchmark of memory that moves, with a CPU's memory in place of GPUs'."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.loadgen.bench import moving_memory
from shoal.loadgen.bench.moving_memory import Found, Mover, kv_config, summary
from shoal.loadgen.bench.weight_streams import Member, Part, Sizes
from shoal.runtime.engine.weights.sharing.device_pages import DevicePages
from shoal.runtime.engine.weights.sharing.devices import memory_and_copier, pages_on
from shoal.runtime.engine.weights.sharing.pages import Pages
from tests.runtime.engine.weights.sharing.simulated_cuda import HostDriver

HOST = torch.device("cpu")
PART = Part(Sizes(hidden=96, inner=128, qkv=160, heads=96), 3, 2, torch.bfloat16)


def simulated_pages(_: torch.device) -> DevicePages:
    driver: Any = HostDriver()
    return DevicePages(HOST, driver)


@contextmanager
def movers(directory: Path) -> Iterator[list[Mover]]:
    members = [
        Member(place, PART, directory, HOST, *memory_and_copier("test", HOST)) for place in (0, 1)
    ]
    for member in members:
        member.fill()
    for member in members:
        member.meet()
    made = [Mover(member, directory) for member in members]
    with closing(members[0].descriptors), closing(members[1].descriptors):
        for mover in made:
            mover.meet()
        yield made


def changed(movers: list[Mover]) -> list[list[Found]]:
    """Return what each member finds in two changes, which both make at the same time."""
    wait = threading.Barrier(2, timeout=60.0).wait

    def all_of(mover: Mover) -> list[Found]:
        return [mover.change(number, wait, lambda: 0.0) for number in range(2)]

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(all_of, movers))


@pytest.mark.parametrize("of_device", [pages_on, simulated_pages])
def test_nothing_is_wrong_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_device: Callable[[torch.device], Pages]
) -> None:
    monkeypatch.setattr(moving_memory, "pages_on", of_device)
    with movers(tmp_path) as both:
        assert changed(both) == [[Found(0, 0, 0, 0, 0)] * 2] * 2


def test_weights_that_are_not_exchanged_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with movers(tmp_path) as both:
        monkeypatch.setattr(both[0].whole, "use_copies", lambda: None)
        first, second = changed(both)
    assert [found.wrong for found in first] == [12, 12], "each weight, and its sum"
    assert [found.wrong for found in second] == [0, 0]


def test_blocks_that_lose_what_they_hold_are_wrong_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with movers(tmp_path) as both:
        use = both[0].whole.use_copies
        monkeypatch.setattr(both[0].whole, "use_copies", lambda: (use(), both[0]._stays[1].zero_()))
        first, second = changed(both)
    assert [found.wrong for found in first] == [2, 2], "after the change, and after the way back"
    assert [found.wrong for found in second] == [1, 1]


def test_blocks_have_room_for_what_is_lent() -> None:
    config = kv_config(PART, 3 << 20)
    (tensor,) = config.kv_cache_tensors
    assert tensor.block_stride == 16 * 64 * 2
    assert 1.2 * (3 << 20) <= tensor.size <= 1.2 * (3 << 20) + 3 * 3 * tensor.block_stride


def test_the_slower_member_counts() -> None:
    found = [Found(0.001, 0.0123456, 0.1, 1, 0), Found(0.002, 0.01, 0.05, 2, 0)]
    assert summary(4, found) == {
        **{"change": 4, "fill ms": 2.0, "use ms": 12.35, "back ms": 100.0},
        **{"wrong": 3, "stale": 0},
    }
