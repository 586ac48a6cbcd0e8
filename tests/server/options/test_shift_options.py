"""What options and callers say of the shift between TP and SP becomes what the node does."""

from argparse import ArgumentError, ArgumentParser, Namespace
from dataclasses import dataclass

import pytest

from shoal.policies.shift import ShiftRule
from shoal.server.errors import UserError
from shoal.server.options.shift_options import (
    AUTO,
    add_shift_options,
    automatic_max_sp,
    check_shift,
    choose_max_sp,
)


def parsed(*argv: str) -> Namespace:
    parser = ArgumentParser(exit_on_error=False)
    add_shift_options(parser.add_argument_group("Shoal"))
    return parser.parse_args(argv)


def test_a_node_is_refused_nothing_until_its_sp_is_chosen() -> None:
    args = parsed("--shift-threshold", "512")
    assert args.max_sp == AUTO
    check_shift(args, ["shift"], 4)
    args.max_sp = 1
    with pytest.raises(UserError, match="--shift-threshold needs --max-sp"):
        check_shift(args, ["shift"], 4)


def test_a_node_may_be_told_its_degree() -> None:
    assert parsed("--max-sp", "2").max_sp == 2
    with pytest.raises(ArgumentError, match="'many' is neither a number nor auto"):
        parsed("--max-sp", "many")


@dataclass
class Model:
    architecture: str = "Qwen3ForCausalLM"
    enable_prompt_embeds: bool = False
    uses_mrope: bool = False
    supports_multimodal_inputs: bool = False
    head_size: int = 128

    def get_head_size(self) -> int:
        return self.head_size


def test_on_gpus_the_largest_group_runs_by_sequence() -> None:
    assert automatic_max_sp(Model(), 4, on_gpus=True) == 4


@pytest.mark.parametrize(
    ("model", "on_gpus"),
    [
        pytest.param(Model(), False, id="on CPUs, or with fake engines"),
        pytest.param(Model("BloomForCausalLM"), True, id="an architecture nobody has tested"),
        pytest.param(Model(enable_prompt_embeds=True), True, id="inputs that are not tokens"),
        pytest.param(Model(supports_multimodal_inputs=True), True, id="images"),
        pytest.param(Model(uses_mrope=True), True, id="positions of several dimensions"),
        pytest.param(Model("LlamaForCausalLM", head_size=100), True, id="heads of odd sizes"),
    ],
)
def test_elsewhere_none_does(model: Model, on_gpus: bool) -> None:
    assert automatic_max_sp(model, 4, on_gpus=on_gpus) == 1


@pytest.mark.parametrize(
    ("argv", "on_gpus", "chosen"),
    [
        pytest.param((), True, 4, id="on GPUs"),
        pytest.param((), False, 1, id="on CPUs"),
        pytest.param(("--max-sp", "2"), True, 2, id="chosen by the user"),
    ],
)
def test_sp_is_the_default_on_gpus(argv: tuple[str, ...], on_gpus: bool, chosen: int) -> None:
    args = parsed(*argv)
    vars(args).update({"policy": "adaptive"})
    choose_max_sp(args, Model(), 4, on_gpus=on_gpus)
    assert args.max_sp == chosen


def test_a_policy_that_needs_sp_is_refused_where_there_is_none() -> None:
    args = parsed()
    vars(args).update(policy="shift")
    with pytest.raises(UserError, match="--policy shift needs --max-sp"):
        choose_max_sp(args, Model(), 4, on_gpus=False)


@pytest.mark.parametrize(
    ("text", "threshold"), [("512", 512), ("auto", ShiftRule.AUTO), ("off", ShiftRule.OFF)]
)
def test_thresholds(text: str, threshold: int | ShiftRule) -> None:
    args = parsed("--max-sp", "2", "--shift-threshold", text)
    check_shift(args, ["shift"], 2)
    assert args.shift_threshold == threshold


def test_what_is_no_threshold_is_named() -> None:
    with pytest.raises(ArgumentError, match="'some' is no threshold"):
        parsed("--shift-threshold", "some")


@pytest.mark.parametrize(
    ("argv", "policy", "named"),
    [
        (["--max-sp", "3"], "flying", "--max-sp 3: with groups of up to 4 it is 1, 2, 4"),
        (["--max-sp", "0"], "flying", "--max-sp 0"),
        (["--max-sp", "8"], "flying", "--max-sp 8"),
        (
            ["--max-sp", "1", "--shift-threshold", "512"],
            "flying",
            "--shift-threshold needs --max-sp",
        ),
        (["--max-sp", "1"], "shift", "--policy shift needs --max-sp"),
    ],
)
def test_what_no_group_can_do_is_refused(argv: list[str], policy: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_shift(parsed(*argv), [policy], 4)
