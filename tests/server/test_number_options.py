"""Options that take a number, as argparse reads and shows them."""

from argparse import ArgumentParser

import pytest

from shoal.server.number_options import add_number


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
