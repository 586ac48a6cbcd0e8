"""Random loads: the same for one seed, of every kind, and at the share that is meant."""

import random
from pathlib import Path

import pytest

from shoal.loadgen.bench import random_loads
from shoal.loadgen.bench.random_loads import (
    FULL,
    KINDS,
    OUTPUT_COST,
    SECONDS,
    SHAPED,
    SHARES,
    SLOWNESS,
    draw,
)
from shoal.loadgen.traces import TraceError
from shoal.loadgen.workload import Workload
from shoal.server.commands.command_parser import CommandParser
from shoal.server.options.workload_options import add_workload_options, read_workload

ROW = '{"at": %s, "prompt_tokens": 1000, "output_tokens": 50}\n'
COST = 1000 + OUTPUT_COST * 50


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One request a second, for an hour."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(ROW % second for second in range(3601)))
    return path


def value(options: tuple[str, ...], name: str) -> str:
    return options[options.index(name) + 1]


def workload(options: tuple[str, ...]) -> Workload:
    parser = CommandParser(prog="shoal simulate")
    add_workload_options(parser)
    return read_workload(parser.parse_known_args(options)[0])


def test_more_loads_of_one_seed_begin_with_the_same_ones(trace: Path) -> None:
    few = draw(5, 3, [trace], [*KINDS])
    assert draw(20, 3, [trace], [*KINDS])[:5] == few
    assert draw(5, 4, [trace], [*KINDS]) != few


def test_every_kind_and_every_traffic_is_drawn(trace: Path) -> None:
    loads = draw(200, 0, [trace], [*KINDS])
    assert {value(load, "--trace") for load in loads} == {str(trace), *SHAPED}
    assert {(int(value(load, "--engines")), value(load, "--model-shape")) for load in loads} == {
        *random_loads.NODES
    }
    urgent = sum(any(word.startswith("--priorities=") for word in load) for load in loads)
    promised = sum("--target" in load for load in loads)
    assert min(urgent, promised, 200 - urgent - promised) > 40
    assert not any("--target" in load for load in draw(50, 0, [trace], ["plain", "urgent"]))


def test_a_window_of_a_trace_asks_for_the_drawn_share_of_the_node(trace: Path) -> None:
    windows = [load for load in draw(200, 1, [trace], ["plain"]) if str(trace) in load]
    assert len(windows) > 10
    for load in windows:
        full = int(value(load, "--engines")) * FULL / SLOWNESS[value(load, "--model-shape")]
        arrivals = workload(load).arrivals
        share = len(arrivals) * COST / SECONDS / full
        assert 0.8 * SHARES[0] <= share <= 1.1 * SHARES[1]


def test_made_up_traffic_asks_for_no_more_than_a_few_times_what_the_node_can_do() -> None:
    """Bursts may: they are short."""
    for load in draw(60, 2, [], ["plain"]):
        full = int(value(load, "--engines")) * FULL / SLOWNESS[value(load, "--model-shape")]
        arrivals = workload(load).arrivals
        cost = sum(one.prompt_tokens + OUTPUT_COST * one.output_tokens for one in arrivals)
        assert 0 < cost / SECONDS / full < 4


def test_a_trace_that_is_shorter_than_a_window_is_taken_whole(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("".join(ROW % second for second in range(3)))
    loads = draw(40, 0, [path], ["plain"])
    assert {value(load, "--start") for load in loads if str(path) in load} == {"0"}


def test_no_window_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    path.write_text("".join(ROW % (10_000 * day) for day in range(60)))
    windows = [load for load in draw(60, 0, [path], ["plain"]) if str(path) in load]
    assert windows
    assert all(workload(load).arrivals for load in windows)


def test_a_trace_of_requests_that_are_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"at": 0, "prompt_tokens": 100000, "output_tokens": 50}\n')
    with pytest.raises(TraceError, match="no request has 65,000 tokens or fewer"):
        draw(1, 0, [path], ["plain"])


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        draw(1, 0, [tmp_path / "missing.jsonl"], ["plain"])


def test_promises_are_longer_where_a_step_takes_longer() -> None:
    rng, other = random.Random(1), random.Random(1)
    _, fast = KINDS["promises"](rng, 1.0)
    _, slow = KINDS["promises"](other, 4.0)
    first, each = (float(part) for part in fast.split(":")[1:])
    assert slow == f"0:{4 * first:g}:{4 * each:g}"
