"""What prompts cost others is found in the times of tokens alone."""

import itertools
import random
from collections.abc import Sequence

import pytest

from shoal.loadgen.bench.prompt_gaps import prompt_gaps
from shoal.loadgen.bench.traffic_pictures import Requests
from shoal.loadgen.bench.traffic_tables import Figures, markdown

USUAL, PROMPT, AFTER = 0.005, 0.011, 0.006


class Unit:
    """Steps of one unit. All its requests get a token in each."""

    def __init__(self, begin: float = 0.0) -> None:
        self.now = begin
        self.requests: list[list[float]] = []

    def step(self, seconds: float, *, new: bool = False) -> None:
        self.now += seconds
        if new:
            self.requests.append([])
        for tokens in self.requests:
            tokens.append(self.now)

    def prompts(self, count: int) -> "Unit":
        """Let so many requests come, with ten steps between two."""
        for _ in range(count):
            self.step(PROMPT, new=True)
            self.step(AFTER)
            for _ in range(10):
                self.step(USUAL)
        return self


def seen(units: Sequence[Unit], late: float = 0.0) -> Requests:
    """Return what a client notes, each token up to so many seconds late."""
    draw = random.Random(0)
    starts, ttfts, itls = list[float](), list[float](), list[list[float]]()
    for tokens in (tokens for unit in units for tokens in unit.requests):
        times = sorted(token + draw.uniform(0.0, late) for token in tokens)
        starts.append(times[0] - 0.03)
        ttfts.append(0.03)
        itls.append([after - before for before, after in itertools.pairwise(times)])
    return Requests("load", "stock-dp", starts, ttfts, itls, [1 + len(one) for one in itls])


@pytest.mark.parametrize("late", [0.0, 0.001])
def test_steps_are_told_apart(late: float) -> None:
    found = prompt_gaps(seen([Unit().prompts(8)], late))
    assert found is not None
    assert found.prompts == 6, "two must run before, and nobody knows of the first two"
    assert found[1:] == pytest.approx((USUAL, PROMPT, AFTER), abs=1e-9 + late)


def test_requests_of_another_unit_are_not_beside_a_prompt() -> None:
    other = Unit(begin=0.0023)
    for _ in range(3):
        other.step(0.0, new=True)
    for _ in range(150):
        other.step(0.0071)
    alone = Unit(begin=0.05).prompts(1)
    assert prompt_gaps(seen([other, alone])) is None
    assert prompt_gaps(seen([other, alone, Unit(begin=0.05).prompts(8)])) is not None


def test_a_load_without_requests_beside_each_other_says_nothing() -> None:
    assert prompt_gaps(seen([])) is None
    assert prompt_gaps(seen([Unit().prompts(1)])) is None


def test_the_report_has_a_line_for_each_system_and_load() -> None:
    report = markdown(Figures("shape", 2, {}), [seen([Unit().prompts(8)]), seen([])])
    assert "| load | stock-dp | 6 | 5.00 | 11.00 | 6.00 |" in report
    assert "| load | stock-dp | 0 | - | - | - |" in report
