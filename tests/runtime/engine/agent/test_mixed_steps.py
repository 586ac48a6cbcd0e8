"""How much of prompts a step computes in which requests decode."""

import pytest

from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.engine.agent.mixed_steps import mixed_limit


@pytest.mark.parametrize(
    ("layout", "limit"),
    [(DP, 2048), (Layout(tp=2), 2048), (Layout(tp=4), 2048), (Layout(tp=8), 4096)],
)
def test_each_member_of_a_wide_group_computes_at_least_a_quarter_of_it(
    layout: Layout, limit: int
) -> None:
    assert mixed_limit(layout, 2048) == limit
    assert mixed_limit(layout, 0) == 0


def test_stages_compute_the_same_tokens_one_after_the_other() -> None:
    assert mixed_limit(Layout(tp=2, pp=4), 2048) == mixed_limit(Layout(tp=2), 2048)
