"""Requests that are carried into new groups find room there for their next tokens too."""

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.config import FakeSettings
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.fake_scheduler import FakeScheduler
from shoal.runtime.protocol import messages as m
from tests.runtime.loopback_node import LoopbackNode
from tests.units import tp

SINGLES = tuple(alone(engine) for engine in range(4))
PAIRS, ALL = (tp(0, 1), tp(2, 3)), (tp(0, 1, 2, 3),)
SPACIOUS = FakeSettings(num_blocks=1024, block_tokens=16, max_num_seqs=64, max_model_len=4000)


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the requests that schedulers have preempted."""
    found: list[str] = []
    preempt = FakeScheduler.preempt

    def note(scheduler: FakeScheduler, request: FakeRequest) -> None:
        found.append(request.id)
        preempt(scheduler, request)

    monkeypatch.setattr(FakeScheduler, "preempt", note)
    return found


@pytest.mark.parametrize("prompt", [20, 200, 400])
@pytest.mark.parametrize("seed", [None, 1])
def test_no_request_is_preempted_when_memory_is_ample(
    preempted: list[str], prompt: int, seed: int | None
) -> None:
    node = LoopbackNode(4, seed=seed, settings=SPACIOUS)
    node.settle()
    for k in range(32):
        node.send(f"r{k}", prompt + 7 * k % 60, 300)
    node.turns(10)
    for layout in (PAIRS, ALL, PAIRS, SINGLES, ALL, SINGLES):
        node.set_layout(*layout, treatment=m.Treatment.CARRY)
        node.turns(60)
    node.settle()
    assert node.missing == []
    node.assert_exact()
    assert preempted == []
    assert node.value("shoal_carried_requests_total", outcome="carried") == 32 * 6


@pytest.mark.parametrize("answer", [300, 1400])
def test_caches_take_no_room_from_running_requests(preempted: list[str], answer: int) -> None:
    """They lie in two places while they are copied, with their answers, of any length."""
    settings = FakeSettings(
        num_blocks=512, block_tokens=16, max_num_seqs=64, max_model_len=4000, copy_seconds=4.0
    )
    node = LoopbackNode(2, settings=settings, precopy_tokens=1)
    node.settle()
    for k in range(8):
        node.send(f"ended {k}", 520, answer)
    node.settle()
    for k in range(24):
        node.send(f"runs {k}", 100, 80)
    node.turns(10)
    node.set_layout(tp(0, 1), treatment=m.Treatment.CARRY)
    node.run_for(20.0)
    assert node.partition == (tp(0, 1),)
    outcomes = [node.value("shoal_precopies_total", outcome=o) for o in ("copied", "nothing")]
    assert outcomes == [1, 0]
    assert preempted == []
    node.assert_exact()
