"""The search measures windows of load at rates of its own, and refuses what does not go with it."""

import argparse
from argparse import Namespace

import pytest

from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.open_loop import Run
from shoal.loadgen.replay_results import Result
from shoal.loadgen.summary import Objective
from shoal.loadgen.validity import judge
from shoal.loadgen.workload import Workload
from shoal.server.errors import UserError
from shoal.server.options.dataset_options import add_dataset_options
from shoal.server.options.rate_search_options import (
    STEADY,
    add_rate_search_options,
    check_search,
    search,
)
from shoal.server.options.workload_options import add_workload_options

TARGET = [Objective(0, 1.0, 0.05)]


def arguments(*words: str) -> Namespace:
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    add_dataset_options(parser)
    add_rate_search_options(parser)
    parser.set_defaults(concurrency=None, html=None, check_metrics=False)
    return parser.parse_args(["--trace", "poisson", "--find-max-rate", "1:8", *words])


def served(workload: Workload, ttft: float) -> Result:
    """Return a run in which each request has its first token after so many seconds."""
    exchanges = []
    for k, arrival in enumerate(workload.arrivals):
        times = [arrival.at + ttft, arrival.at + ttft + 0.01]
        exchanges.append(
            Exchange(k, arrival, arrival.at, times, times[-1], Outcome.OK, output_tokens=2)
        )
    run = Run(exchanges, workload.requests, duration=workload.arrivals[-1].at + 1)
    return Result("w", workload.name, "/v1/completions", "m", judge(run), run)


async def test_windows_have_their_rate_and_a_seed_of_their_own() -> None:
    seen: list[tuple[float, int, float]] = []

    async def replay(window: Namespace, workload: Workload) -> Result:
        rate = len(workload.arrivals) / window.duration
        assert rate == pytest.approx(window.rate[0], rel=0.2)
        seen.append((window.rate[0], window.seed, window.duration))
        return served(workload, ttft=0.2 if window.rate[0] <= 3.0 else 2.0)

    args = arguments("--seed", "7", "--windows", "2", "--duration", "200")
    found = await search(args, TARGET, replay)
    assert found.kept is not None
    assert found.broken is not None
    assert found.kept <= 3.0 < found.broken <= found.kept * 1.05
    assert [seed for _, seed, _ in seen] == list(range(7, 7 + len(seen)))
    assert {duration for *_, duration in seen} == {200.0}
    assert args.rate is None, "the command's own arguments stay"


async def test_a_server_that_serves_nobody_breaks_the_targets() -> None:
    async def refuse(_: Namespace, workload: Workload) -> Result:
        exchanges = [
            Exchange(k, a, a.at, ended=a.at, outcome=Outcome.REFUSED_503)
            for k, a in enumerate(workload.arrivals)
        ]
        run = Run(exchanges, workload.requests, duration=1.0)
        return Result("w", workload.name, "/v1/completions", "m", judge(run), run)

    found = await search(arguments(), TARGET, refuse)
    assert (found.kept, found.broken, found.problem) == (None, 1.0, "")


async def test_a_window_that_was_stopped_ends_the_search() -> None:
    async def stop(_: Namespace, workload: Workload) -> Result:
        run = Run([], workload.requests, interrupted=True)
        return Result("w", workload.name, "/v1/completions", "m", judge(run), run)

    found = await search(arguments(), TARGET, stop)
    assert len(found.trials) == 1
    assert "it was stopped" in found.problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trace", "bursty"), f"needs a --trace with one rate: {', '.join(STEADY)}"),
        (("--trace", "x.csv"), "needs a --trace with one rate"),
        (("--rate", "3"), "--rate does not go with"),
        (("--requests", "3"), "--requests does not go with"),
        (("--windows", "0"), "--windows 0"),
        (("--precision", "0"), "--precision 0"),
        (("--attainment", "1.5"), "--attainment 1.5"),
    ],
)
def test_what_does_not_go_with_it_is_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_search(arguments(*words), TARGET)


def test_it_needs_a_target() -> None:
    check_search(arguments(), TARGET)
    with pytest.raises(UserError, match="needs a --target"):
        check_search(arguments(), [])


@pytest.mark.parametrize("bounds", ["1", "2:1", "0:1", "a:b", "1:inf"])
def test_what_are_no_bounds_is_named(bounds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("--find-max-rate", bounds)
    assert "argument --find-max-rate" in capsys.readouterr().err
