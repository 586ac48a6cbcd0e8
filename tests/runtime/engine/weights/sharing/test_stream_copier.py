"""On which streams a GPU copies weights, and what waits for what; CUDA is simulated."""

import pytest
import torch

from shoal.runtime.engine.weights.sharing.slots import Copy, WeightSlots
from shoal.runtime.engine.weights.sharing.stream_copier import StreamCopier
from tests.runtime.engine.weights.sharing.simulated_cuda import Event, HostDriver, simulate_streams

COMPUTES, PEERS, OWN = range(3)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    driver = HostDriver()
    simulate_streams(monkeypatch, driver.seen)
    return driver


def copier(driver: HostDriver) -> StreamCopier:
    return StreamCopier(torch.device("cpu"), driver)


def test_copies_wait_for_what_was_computed_and_what_is_computed_next_waits_for_them(
    driver: HostDriver,
) -> None:
    made, target, source = copier(driver), torch.zeros(2, 3), torch.ones(2, 3)
    started = made.start([Copy(target, source), Copy(target, source, is_own=True)])
    assert driver.seen == [
        *[("event", COMPUTES), ("wait", PEERS, COMPUTES), ("wait", OWN, COMPUTES)],
        *[("copy", PEERS), ("copy", OWN)],
        *[("event", PEERS), ("event", OWN)],
    ]
    driver.seen.clear()
    made.wait(started)
    assert driver.seen == [("wait", COMPUTES, PEERS), ("wait", COMPUTES, OWN)]


def test_the_host_waits_for_both_streams_if_it_is_to_know(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event.of))
    made = copier(driver)
    made.finish(made.start([Copy(torch.zeros(1), torch.ones(1), is_own=True)]))
    assert waited == [PEERS, OWN]


def test_streams_are_made_once(driver: HostDriver) -> None:
    made = copier(driver)
    for _ in range(2):
        made.start([])
    assert {seen[1] for seen in driver.seen} == {COMPUTES, PEERS, OWN}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_copied_as_they_lie(driver: HostDriver, dtype: torch.dtype) -> None:
    whole = torch.zeros(6, 8, dtype=dtype)
    rows = torch.arange(16).view(2, 8).to(dtype)
    copier(driver).start([Copy(whole[2:4], rows)])
    assert torch.equal(whole[2:4], rows)
    assert whole.count_nonzero() == 15


def test_a_slot_is_filled_when_its_last_layer_is_computed_and_used_when_it_is_filled(
    driver: HostDriver,
) -> None:
    slots = WeightSlots(copier(driver))
    slots.copies[1] = {layer: [Copy(torch.zeros(1), torch.ones(1))] for layer in range(4)}

    def compute(layer: int) -> None:
        slots.use(1, layer)
        driver.seen.append(f"compute {layer}")

    for layer in range(3):
        compute(layer)
    begins = driver.seen.index("compute 0")
    ends = driver.seen.index("compute 1")
    # The copies of layer 2, into the slot of layer 0, come after layer 0 on the computing stream.
    between = driver.seen[begins + 1 : ends]
    assert between.index(("event", COMPUTES)) < between.index(("wait", PEERS, COMPUTES))
    assert between.index(("wait", PEERS, COMPUTES)) < between.index(("copy", PEERS))
    # Layer 2 is computed after both streams have done that.
    after = driver.seen[ends + 1 : driver.seen.index("compute 2")]
    assert after[:2] == [("wait", COMPUTES, PEERS), ("wait", COMPUTES, OWN)]
