"""Memory of GPUs that moves, with a driver that allows what CUDA allows."""

import os
from typing import Any

import pytest
import torch

from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.weights.sharing.cuda_driver import DriverError
from shoal.runtime.engine.weights.sharing.device_pages import DevicePages, tensor_at
from shoal.runtime.engine.weights.sharing.pages import Exchange
from tests.runtime.engine.weights.sharing.simulated_cuda import GRANULE as PAGE
from tests.runtime.engine.weights.sharing.simulated_cuda import HostDriver

HOST = torch.device("cpu")
SIZES = [PAGE, 3 * PAGE, 2 * PAGE]


@pytest.fixture
def driver() -> Any:
    return HostDriver()


@pytest.fixture
def pages(driver: Any) -> DevicePages:
    return DevicePages(HOST, driver)


def test_an_exchange_waits_then_unmaps_then_maps(driver: Any, pages: DevicePages) -> None:
    pieces, at = pages.create(SIZES).split(SIZES), pages.reserve(3 * PAGE)
    pages.put([Exchange(at, pieces[1])])
    driver.seen.clear()
    pages.put([Exchange(at, pieces[1])])
    size = 3 * PAGE
    assert driver.seen == [("settle",), ("unmap", size), ("map", size), ("allow", size, 0, True)]


def test_access_to_adjacent_pieces_is_given_by_one_call(driver: Any, pages: DevicePages) -> None:
    pages.create(SIZES)
    assert [what for what in driver.seen if what[0] == "allow"] == [("allow", 6 * PAGE, 0, True)]


def test_pieces_are_exchanged_whole(pages: DevicePages) -> None:
    pieces, at = pages.create(SIZES).split(SIZES), pages.reserve(4 * PAGE)
    with pytest.raises(DriverError, match="not the whole handle"):
        pages.put([Exchange(at[:PAGE], pieces[1][:PAGE])])
    with pytest.raises(KeyError):
        pages.put([Exchange(at[:PAGE], pieces[1][PAGE : 2 * PAGE])])
    pages.put([Exchange(at[: 3 * PAGE], pieces[1])])
    with pytest.raises(DriverError, match="not what was mapped"):
        pages.put([Exchange(at[:PAGE], pieces[0])])
    with pytest.raises(DriverError, match="something behind it"):
        pages.put([Exchange(at[PAGE : 2 * PAGE], pieces[0])])


@pytest.mark.parametrize("call", ["create", "map", "allow"])
def test_memory_that_cannot_be_made_is_named_in_one_line(
    driver: Any, pages: DevicePages, call: str
) -> None:
    driver.refuses = call
    line = rf"^GPU 0 has no 0.00 GB of memory that can move \({call}: NOT_PERMITTED\)$"
    with pytest.raises(NotSharedError, match=line):
        pages.create(SIZES)


def test_others_map_all_pieces_and_see_what_is_written(driver: Any, pages: DevicePages) -> None:
    memory = pages.create(SIZES)
    at = pages.reserve(3 * PAGE)
    pages.put([Exchange(at, memory.split(SIZES)[1])])
    files = pages.export(memory, SIZES)
    other: Any = HostDriver()
    opened = DevicePages(HOST, other).open(files, SIZES)
    memory.copy_((torch.arange(6 * PAGE) % 251).to(torch.uint8))
    assert torch.equal(tensor_at(opened.address, 6 * PAGE, HOST), memory)
    at.fill_(7)  # the piece of an exchange is the same memory for them
    assert torch.equal(tensor_at(opened.address, 6 * PAGE, HOST), memory)
    assert other.seen[-1] == ("allow", 6 * PAGE, 0, False), "they do not write"
    opened.close()
    assert other.seen[-4:] == [*(("unmap", size) for size in SIZES), ("free", 6 * PAGE)]
    for file in files:
        os.close(file)


@pytest.mark.parametrize("call", ["import", "map", "allow"])
def test_what_cannot_be_mapped_is_named_and_leaves_nothing_behind(
    driver: Any, pages: DevicePages, call: str
) -> None:
    files = pages.export(pages.create(SIZES), SIZES)
    other: Any = HostDriver()
    other.refuses = call
    line = rf"^GPU 0 cannot read another engine's memory \({call}: NOT_PERMITTED\)$"
    with pytest.raises(NotSharedError, match=line):
        DevicePages(HOST, other).open(files, SIZES)
    assert other.seen[-1] == ("free", 6 * PAGE)
    for file in files:
        os.close(file)


def test_addresses_that_are_not_there_are_named_too(driver: Any, pages: DevicePages) -> None:
    files = pages.export(pages.create(SIZES), SIZES)
    driver.refuses = "reserve"
    line = r"^GPU 0 cannot read another engine's memory \(reserve: NOT_PERMITTED\)$"
    with pytest.raises(NotSharedError, match=line):
        pages.open(files, SIZES)
    for file in files:
        os.close(file)


def test_memory_that_cannot_be_handed_out_is_named(driver: Any, pages: DevicePages) -> None:
    memory = pages.create(SIZES)
    driver.refuses = "export"
    with pytest.raises(NotSharedError, match="hands out no memory"):
        pages.export(memory, SIZES)
