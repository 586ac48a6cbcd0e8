"""Options that take a number, as argparse reads and shows them."""

import math
from argparse import ArgumentParser, Namespace

import pytest

from shoal.server.errors import UserError
from shoal.server.number_options import add_number, check_at_least, check_positive


@pytest.mark.parametrize(
    ("default", "given", "value", "shown"),
    [(3, "7", 7, "--limit N"), (2.0, "0.5", 0.5, "--limit SECONDS")],
)
def test_a_count_or_seconds_are_taken_as_the_default_is(
    default: float, given: str, value: float, shown: str
) -> None:
    parser = ArgumentParser()
    add_number(parser, "--limit", default, "how many")
    assert parser.parse_args([]).limit == default
    taken = parser.parse_args(["--limit", given]).limit
    assert (taken, type(taken)) == (value, type(default))
    text = " ".join(parser.format_help().split())
    assert f"{shown} how many (default: {default})" in text


def test_a_count_is_no_fraction(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_number(parser, "--limit", 3, "how many")
    with pytest.raises(SystemExit):
        parser.parse_args(["--limit", "0.5"])
    assert "--limit" in capsys.readouterr().err


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_what_is_not_above_0_is_refused_by_its_flag(value: float) -> None:
    check_positive(Namespace(some_time=0.5, not_given=None), "some_time", "not_given")
    with pytest.raises(UserError, match=f"--some-time {value:g}: it must be more than 0"):
        check_positive(Namespace(some_time=value), "some_time")


@pytest.mark.parametrize("value", [1, -1, math.inf, math.nan])
def test_what_is_too_little_is_refused_by_its_flag(value: float) -> None:
    check_at_least(Namespace(some_count=2), 2, "some_count")
    with pytest.raises(UserError, match=f"--some-count {value:g}: it must be at least 2"):
        check_at_least(Namespace(some_count=value), 2, "some_count")
