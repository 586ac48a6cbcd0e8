"""Runners are told what they will read before requests stop, and then only that they read it."""

from collections.abc import Sequence

import pytest

from shoal.runtime.config import LayoutConfigs
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from shoal.runtime.protocol.messages import CarriedRequest
from tests.runtime.engine.prompts import random_prompts
from tests.runtime.engine.scheduler.toy_engines import Make, ToyEngines, undisturbed

PROMPTS = random_prompts((20, 13, 22), seed=6)
NAMES = ["a", "b", "c"]


@pytest.fixture
def engines(configs: LayoutConfigs) -> ToyEngines:
    return running(ToyEngines(configs, v2=True))


def running(engines: ToyEngines) -> ToyEngines:
    """Let an engine run requests, which the group expects."""
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        engines.submit(engines.own[0], name, prompt)
    engines.step(engines.own[0], 3)
    engines.bind(60)
    expect(engines)
    return engines


def expect(engines: ToyEngines) -> None:
    for name in NAMES:
        engines.group.expect(name, engines.frames[name])


def export(engines: ToyEngines, names: Sequence[str] = NAMES) -> list[CarriedRequest]:
    announced = engines.foretell(engines.own[0], engines.group, names)
    return [each.whole(announced) for each in engines.own[0].export(names)]


def adopt(engines: ToyEngines, requests: Sequence[CarriedRequest]) -> None:
    for request in requests:
        assert engines.group.adopt(engines.own[0].unit, request, with_kv=True) is not None
    engines.group.copy()
    engines.own[0].abort(NAMES)


def sent(core: VllmCore, engines: ToyEngines, kind: type) -> int:
    return sum(isinstance(each, kind) for each in engines.runners[core.unit].sent)


def assert_end_well(engines: ToyEngines, make: Make, names: Sequence[str] = NAMES) -> None:
    engines.step(engines.group)
    engines.finish(engines.group)
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        if name in names:
            assert engines.tokens[name] == undisturbed(make, prompt)
    assert engines.audit() == []


@pytest.mark.parametrize("ahead", [False, True])
def test_what_comes_as_foretold_is_not_told_again(make: Make, ahead: bool) -> None:
    engines = running(make())
    runners = engines.runners[engines.group.unit]
    requests = export(engines)
    assert sent(engines.group, engines, instructions.Foresee) == runners.v2
    assert runners.read == 0
    if ahead:
        assert engines.group.send_first([(engines.own[0].unit, requests)]) is runners.v2
    adopt(engines, requests)
    assert engines.group.dispatch()
    assert (sent(engines.group, engines, instructions.Carry), runners.foretold_copies) == (
        *(1, runners.v2),
    )
    assert_end_well(engines, make)


def test_if_one_does_not_come_the_others_are_told_of_again(make: Make) -> None:
    engines = running(make())
    a, _, c = export(engines)
    engines.group.abort(["b"])
    adopt(engines, [a, c])
    assert engines.runners[engines.group.unit].foretold_copies == 0
    assert_end_well(engines, make, ["a", "c"])


def test_if_some_come_first_all_are_told_of_again(make: Make) -> None:
    engines = running(make())
    requests = export(engines)
    adopt(engines, requests[:1])
    adopt(engines, requests[1:])
    assert engines.runners[engines.group.unit].foretold_copies == 0
    assert_end_well(engines, make)


def test_one_that_comes_again_with_other_blocks_is_told_of_again(make: Make) -> None:
    """Its client has gone, and its blocks are another request's now."""
    engines = running(make())
    export(engines)
    engines.group.abort(NAMES)
    engines.own[0].keep(NAMES)
    engines.submit(engines.group, "other", PROMPTS[0])
    engines.step(engines.group, 2)
    expect(engines)
    announced = [each for name in NAMES for each in engines.own[0].announce([name])]
    requests = engines.own[0].export(NAMES)
    assert announced
    adopt(engines, [each.whole({one.request_id: one for one in announced}) for each in requests])
    assert engines.runners[engines.group.unit].foretold_copies == 0
    assert_end_well(engines, make)


def test_nothing_is_foretold_before_all_have_their_blocks(engines: ToyEngines) -> None:
    engines.group.tell_allotted([(engines.own[0].unit, NAMES)])
    assert sent(engines.group, engines, instructions.Foresee) == 0
