"""The options that say what the load is."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from shoal.loadgen.summary import Objective
from shoal.loadgen.workload import Workload
from shoal.server.errors import UserError
from shoal.server.options.workload_options import (
    add_target_option,
    add_workload_options,
    read_objectives,
    read_workload,
)


def parser() -> ArgumentParser:
    made = ArgumentParser(prog="p")
    add_workload_options(made)
    add_target_option(made)
    return made


def workload(*arguments: str) -> Workload:
    return read_workload(parser().parse_args(arguments))


def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    lines = [
        f'{{"at": {k}, "prompt_tokens": {10 * (k + 1)}, "output_tokens": 4}}' for k in range(10)
    ]
    path.write_text("\n".join(lines))
    return str(path)


def test_a_trace_is_cut_and_scaled(tmp_path: Path) -> None:
    one = workload(
        *("--trace", trace(tmp_path), "--rate-scale", "2", "--length-scale", "0.5"),
        *("--duration", "3", "--requests", "4", "--max-request-tokens", "32"),
    )
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in one.arrivals] == [
        (0.0, 5, 2),
        (0.5, 10, 2),
        (1.0, 15, 2),
        (1.5, 20, 2),
    ]


def test_a_name_that_is_neither_a_file_nor_a_shape_is_told_the_shapes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--trace poison: there is no such file; .* poisson,"):
        workload("--trace", "poison")
    with pytest.raises(UserError, match="cannot read"):
        workload("--trace", str(tmp_path))


def test_a_made_up_workload_lasts_as_long_as_asked_at_any_rate() -> None:
    for scale in ("1", "4"):
        one = workload("--trace", "poisson", "--rate", "9", "--rate-scale", scale, "--duration=30")
        assert 29 < one.arrivals[-1].at < 30
    assert len(workload("--trace", "ramp", "--rate", "1:5", "--requests", "7").arrivals) == 7


def test_what_is_left_out_of_a_made_up_workload_does_not_count() -> None:
    whole = workload("--trace", "poisson", "--rate", "9", "--requests", "90")
    left = [arrival.at - 5 for arrival in whole.arrivals if arrival.at >= 5]
    one = workload("--trace", "poisson", "--rate", "9", "--requests", "30", "--start", "5")
    assert [arrival.at for arrival in one.arrivals] == left[:30]


def test_lengths_and_priorities_are_drawn() -> None:
    one = workload(
        *("--trace", "gamma", "--burstiness", "0.5", "--requests", "50", "--prompt-tokens", "3"),
        *("--output-tokens", "5:6", "--priorities=-10:1,4:1"),
    )
    assert {a.prompt_tokens for a in one.arrivals} == {3}
    assert {a.output_tokens for a in one.arrivals} == {5, 6}
    assert {a.priority for a in one.arrivals} == {-10, 4}


def test_objectives_come_in_the_order_of_urgency() -> None:
    args = parser().parse_args(["--trace", "x", "--target=0:1000:50", "--target=-10:500:20"])
    assert read_objectives(args) == [Objective(-10, 0.5, 0.02), Objective(0, 1.0, 0.05)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "none.csv"), "cannot read none.csv"),
        (("--trace", "none.csv", "--rate", "1"), "--rate is for made-up workloads"),
        (("--trace", "poisson", "--turns", "2"), "--turns is not for poisson"),
        (("--trace", "poisson", "--burstiness", "1"), "--burstiness is not for poisson"),
        (("--trace", "poisson", "--rate", "1:2"), "poisson takes one rate"),
        (("--trace", "poisson", "--rate-scale", "0"), "--rate-scale 0: it must be more than 0"),
        (("--trace", "poisson", "--duration", "inf"), "--duration inf"),
        (("--trace", "poisson", "--requests", "0"), "--requests 0"),
        (("--trace", "poisson", "--max-request-tokens", "1"), "no request is left"),
        (("--trace", "poisson", "--priorities", "1:0"), "the shares of priorities"),
    ],
)
def test_what_does_not_go_together_is_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        workload(*arguments)


@pytest.mark.parametrize(
    "argument",
    [
        *("--shared-tokens=-1", "--shared-tokens=a", "--turns=0"),
        *("--rate=0", "--rate=a", "--rate=1:inf", "--prompt-tokens=0", "--prompt-tokens=5:4"),
        *("--priorities=1", "--priorities=a:1", "--target=0:1", "--target=0:0:1", "--target=a:1:1"),
        "--target=0:inf:40",
    ],
)
def test_what_is_no_value_is_named(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        workload("--trace", "poisson", argument)
    assert f"argument {argument.partition('=')[0]}" in capsys.readouterr().err


def test_another_workload_comes_at_the_same_time(tmp_path: Path) -> None:
    path = trace(tmp_path)
    one = workload(
        *("--trace", path, "--requests", "2", "--rate-scale", "2", "--delay", "1"),
        *("--beside", f"--trace {path} --start 5 --duration 2"),
        *("--beside", "--trace poisson --requests 1 --priorities=-3:1"),
    )
    *of_trace, drawn = sorted(one.arrivals, key=lambda a: -a.priority)
    assert [(a.at, a.prompt_tokens) for a in of_trace] == [(0, 60), (1, 10), (1, 70), (1.5, 20)]
    assert drawn.priority == -3


def prefixes(one: Workload) -> set[str]:
    return {a.prefix[0].id for a in one.arrivals}


def test_only_windows_of_one_trace_have_prompts_in_common(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        line = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [7]}'
        path.write_text(line)
    same, other = (workload(f"--trace={paths[0]}", f"--beside=--trace {path}") for path in paths)
    assert prefixes(same) == {"7"}
    assert len(prefixes(other)) == 2
    chats = ("--trace", "chats", "--requests", "1")
    assert len(prefixes(workload(*chats, f"--beside={' '.join(chats)}"))) == 2


def test_the_seed_of_another_workload_is_the_first_ones(tmp_path: Path) -> None:
    chats = ("--trace", trace(tmp_path), "--beside", "--trace poisson --requests 5")
    first, second = workload(*chats, "--seed", "1"), workload(*chats, "--seed", "2")
    assert first != second
    own = (*chats[:2], "--beside", "--trace poisson --requests 5 --seed 1")
    assert workload(*own, "--seed", "2") == first


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--trace poison", "there is no such file"),
        ("--rate 3", "required: --trace"),
        ("--trace poisson --speed 3", "unrecognized arguments: --speed 3"),
        ("--trace 'poisson", "No closing quotation"),
    ],
)
def test_a_wrong_workload_beside_is_named(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as raised:
        workload("--trace", "poisson", "--beside", text)
    assert str(raised.value).startswith(f"--beside {text!r}: ")
