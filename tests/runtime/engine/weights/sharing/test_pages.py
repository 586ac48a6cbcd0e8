"""Memory that is put behind addresses and taken away again."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.runtime.engine.weights.sharing.device_pages import DevicePages
from shoal.runtime.engine.weights.sharing.devices import pages_on
from shoal.runtime.engine.weights.sharing.pages import Exchange, HostPages, Pages
from tests.runtime.engine.weights.sharing.simulated_cuda import HostDriver

PAGE = HostPages.page
HOST = torch.device("cpu")


def on_simulated_gpu() -> DevicePages:
    driver: Any = HostDriver()
    return DevicePages(HOST, driver)


@pytest.fixture(params=[HostPages, on_simulated_gpu])
def pages(request: pytest.FixtureRequest) -> Pages:
    made: Pages = request.param()
    return made


def filled(pages: Pages) -> tuple[torch.Tensor, ...]:
    """Return three pieces of a page each, filled with 1, 2 and 3."""
    pieces = pages.create([PAGE] * 3).split(PAGE)
    for number, piece in enumerate(pieces, 1):
        piece.fill_(number)
    return pieces


def test_pieces_appear_where_they_are_put_in_any_order(pages: Pages) -> None:
    pieces, at = filled(pages), pages.reserve(4 * PAGE).split(PAGE)
    pages.put([Exchange(at[place], pieces[piece]) for place, piece in enumerate((2, 0, 2, 1))])
    assert [int(there.float().mean()) for there in at] == [3, 1, 3, 2]
    pages.put([Exchange(at[0], pieces[0])])
    assert at[0][0] == 1
    at[0][0] = 9
    assert pieces[0][0] == 9, "it is the memory itself"
    assert at[1][0] == 9, "wherever it is"


def test_what_is_computed_with_the_addresses_sees_the_exchange(pages: Pages) -> None:
    pieces, at = filled(pages), pages.reserve(PAGE)
    pages.put([Exchange(at, pieces[0])])
    view = at.view(torch.int32)[:4]
    pages.put([Exchange(at, pieces[1])])
    assert view.tolist() == [0x02020202] * 4
    assert [int(piece[0]) for piece in pieces] == [1, 2, 3], "pieces stay at their own addresses"


def test_memory_and_addresses_that_there_are_not_are_an_error() -> None:
    pages = HostPages()
    with pytest.raises(OSError, match=r"Cannot allocate memory|Invalid argument"):
        pages.reserve(1 << 60)
    with pytest.raises(OSError, match="Bad address"):
        pages.put([Exchange(pages.reserve(PAGE), torch.empty(0, dtype=torch.uint8))])


def test_each_device_has_its_own_means(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(pages_on(HOST), HostPages)
    monkeypatch.setattr("shoal.runtime.engine.weights.sharing.devices.CudaDriver", HostDriver)
    assert isinstance(pages_on(torch.device("cuda", 1)), DevicePages)


TOUCH = """
from shoal.runtime.engine.weights.sharing.pages import Exchange
from tests.runtime.engine.weights.sharing.test_pages import {} as made
pages = made()
at = pages.reserve(2 * pages.page)
pages.put([Exchange(at[:pages.page], pages.create([pages.page]))])
at[0] = 1
print("alive", flush=True)
at[pages.page] = 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["HostPages", "on_simulated_gpu"])
def test_whoever_touches_addresses_without_memory_ends(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOUCH.format(kind)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["alive"], done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_what_is_put_somewhere_counts_to_the_process() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    pages, size = HostPages(), 4096 * PAGE
    memory, at = pages.create([size]).fill_(1), pages.reserve(size)
    before = resident()
    pages.put([Exchange(at, memory)])
    assert resident() - before > 0.9 * size
