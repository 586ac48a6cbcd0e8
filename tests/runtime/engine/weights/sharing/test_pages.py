"""Memory that is put behind addresses and taken away again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from shoal.runtime.engine.weights.sharing.pages import HostPages, pages_on
from shoal.runtime.engine.weights.sharing.shard_memory import HostShards

PAGES = HostPages()
PAGE = PAGES.page


@pytest.fixture
def file() -> Iterator[tuple[int, torch.Tensor]]:
    """Return three pages of shared memory, filled with 1, 2 and 3."""
    file, memory = HostShards("test").create(3 * PAGE)
    for number, page in enumerate(memory.split(PAGE), 1):
        page.fill_(number)
    yield file, memory
    os.close(file)


def resident(file: int) -> int:
    """Return how many bytes of memory a file has."""
    return os.fstat(file).st_blocks * 512


def test_pages_appear_where_they_are_put_in_any_order(file: tuple[int, torch.Tensor]) -> None:
    at = PAGES.reserve(4 * PAGE)
    for place, page in ((0, 2), (1, 0), (2, 2), (3, 1)):
        PAGES.map(at[place * PAGE : (place + 1) * PAGE], file[0], page * PAGE, writable=False)
    assert at.view(4, -1).float().mean(1).tolist() == [3, 1, 3, 2]
    PAGES.map(at[:PAGE], file[0], 0, writable=True)
    assert at[0] == 1
    at[0] = 9
    assert file[1][0] == 9, "it is the memory itself"


def test_what_is_computed_with_the_addresses_sees_the_exchange(
    file: tuple[int, torch.Tensor],
) -> None:
    at = PAGES.reserve(PAGE)
    PAGES.map(at, file[0], 0, writable=False)
    view = at.view(torch.int32)[:4]
    PAGES.map(at, file[0], PAGE, writable=False)
    assert view.tolist() == [0x02020202] * 4


def test_discarded_memory_is_given_back_for_all_who_have_it(
    file: tuple[int, torch.Tensor],
) -> None:
    at = PAGES.reserve(PAGE)
    PAGES.map(at, file[0], PAGE, writable=False)
    assert resident(file[0]) == 3 * PAGE
    PAGES.discard(file[1][PAGE : 2 * PAGE])
    assert resident(file[0]) == 2 * PAGE
    assert at.sum() == 0
    assert file[1].view(3, -1).float().mean(1).tolist() == [1, 0, 3]


def test_what_cannot_be_mapped_is_an_error(file: tuple[int, torch.Tensor]) -> None:
    at = PAGES.reserve(PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        PAGES.map(at, 1 << 20, 0, writable=False)
    with pytest.raises(OSError, match="Invalid argument"):
        PAGES.map(at, file[0], 1, writable=False)
    with pytest.raises(OSError, match=r"Cannot allocate memory|Invalid argument"):
        PAGES.reserve(1 << 60)


def test_gpus_cannot_exchange_memory_so_far() -> None:
    assert pages_on(torch.device("cpu")) is not None
    assert pages_on(torch.device("meta")) is None


TOUCH = """
from shoal.runtime.engine.weights.sharing.pages import HostPages
from shoal.runtime.engine.weights.sharing.shard_memory import HostShards
pages = HostPages()
file, memory = HostShards("test").create(2 * pages.page)
at = pages.reserve(2 * pages.page)
pages.map(at, file, 0, writable=True)
at.fill_(1)
{}
print("alive", flush=True)
at[pages.page] = 1
print("touched", flush=True)
"""


@pytest.mark.parametrize(("before", "lives"), [("", True), ("pages.block(at[pages.page:])", False)])
def test_whoever_touches_blocked_addresses_ends(before: str, lives: bool) -> None:
    script = [sys.executable, "-c", TOUCH.format(before)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.stdout.split() == (["alive", "touched"] if lives else ["alive"]), done.stderr
    assert done.returncode == (0 if lives else -signal.SIGSEGV)
