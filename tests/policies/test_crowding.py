"""What fewer units cost those whom they serve, by hand and against served requests."""

import math

import pytest

from shoal.policies.cost.cost_model import CostModel, Hardware, ModelShape
from shoal.policies.crowding import MOST_PROMPTS, STEPS_AHEAD, Crowding, Load
from shoal.policies.values.layouts import DP

# A step reads 8 GB of weights in 8 ms; a token of a prompt takes 80 us.
SHAPE = ModelShape(10, 1000, 8, 8, 125, parameters=4e9)
MODEL = CostModel(SHAPE, Hardware(1e12, 1e14, 1e11))
LOAD = Load(rate=2.0, running=1.0, prompt_tokens=1000, output_tokens=200)


def test_a_request_waits_only_if_no_unit_is_idle() -> None:
    prompt = Crowding(MODEL, DP, Load(0.0, 0.0, 1000, 200)).ttft(1)
    crowding = Crowding(MODEL, DP, Load(0.0, 1.0, 1000, 200))
    step = Crowding(MODEL, DP, Load(0.0, 0.0, 1000, 200)).tpot(1)
    none = math.exp(-1)
    assert crowding.ttft(1) == pytest.approx(prompt + STEPS_AHEAD * step * (1 - none))
    assert crowding.ttft(2) == pytest.approx(prompt + STEPS_AHEAD * step * (1 - 2 * none))
    assert crowding.ttft(8) == pytest.approx(prompt, rel=1e-4)


def test_prompts_queue_for_a_unit_as_in_m_d_1_and_less_for_several() -> None:
    prompt = Crowding(MODEL, DP, Load(0.0, 0.0, 1000, 200)).ttft(1)
    found = []
    for rate in (1.0, 4.0, 8.0):
        share = rate * prompt
        queue = Crowding(MODEL, DP, Load(rate, 0.0, 1000, 200)).ttft(1) - prompt
        assert queue == pytest.approx(prompt * share / (2 * (1 - share)))
        found.append(Crowding(MODEL, DP, Load(rate, 0.0, 1000, 200)).ttft(2) - prompt)
        assert found[-1] < queue / 2
    assert found == sorted(found)


def test_tokens_wait_for_the_prompts_of_others() -> None:
    crowding, prompt = Crowding(MODEL, DP, LOAD), Crowding(MODEL, DP, LOAD)._prompt
    calm = Crowding(MODEL, DP, Load(0.0, 1.0, 1000, 200))
    for units in (1, 2, 4):
        share = LOAD.rate * prompt / units
        assert 0.0 < share < MOST_PROMPTS
        assert crowding.tpot(units) == pytest.approx(calm.tpot(units) / (1 - share))


def test_fewer_units_are_never_faster_and_overload_is_finite() -> None:
    for rate in (0.0, 1.0, 10.0, 1000.0):
        crowding = Crowding(MODEL, DP, Load(rate, rate, 1000, 200))
        for latency in (crowding.ttft, crowding.tpot):
            found = [latency(units) for units in range(1, 9)]
            assert found == sorted(found, reverse=True)
            assert all(map(math.isfinite, found))
