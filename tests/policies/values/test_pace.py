"""The formula of a step's time: what is written out for speed gives the same, to the last bit."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.policies.values.pace import Pace

seconds = st.floats(0.0, 1.0)
PACES = st.builds(
    Pace,
    members=st.sampled_from([1, 2, 4, 8]),
    weights=seconds,
    token=seconds,
    latency=seconds,
    moved=seconds,
    read=seconds,
    attend=seconds,
    host=seconds,
    mixed_host=seconds,
    overhead=st.floats(1e-6, 1.0),
    request=seconds,
    slope=st.floats(0.01, 20.0),
    offset=st.floats(-1.0, 1.0),
)
COUNTS = st.integers(1, 10_000)


@given(PACES, COUNTS, st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 10_000))
def test_a_step_without_experts_and_peers_takes_what_the_whole_formula_says(
    pace: Pace, tokens: int, context: float, pairs: float, decodes: int
) -> None:
    work = tokens, context, pairs, decodes
    assert pace.step(*work) == pace.computed(*work)


@given(PACES, COUNTS)
def test_one_with_them_takes_longer(pace: Pace, tokens: int) -> None:
    plain = replace(pace, slope=1.0, offset=0.0)
    experts = replace(plain, experts=1.0, weights=100.0)
    assert experts.step(tokens, 0, 0, tokens) >= replace(plain, weights=100.0).step(
        tokens, 0, 0, tokens
    )
    assert replace(plain, fetch=1000.0, fetch_slope=1.0).step(tokens, 0, 0, tokens) >= 1000.0
