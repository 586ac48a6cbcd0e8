"""Which groups for urgent requests a node may be asked for."""

from argparse import ArgumentParser

import pytest

from shoal.server.errors import UserError
from shoal.server.options.urgent_options import add_urgent_option, check_urgent


def check(*argv: str, engines: int = 4, max_group: int = 4, policy: str = "adaptive") -> int:
    parser = ArgumentParser(exit_on_error=False)
    add_urgent_option(parser)
    args = parser.parse_args(argv)
    check_urgent(args, [policy], engines, max_group)
    size: int = args.urgent_engines
    return size


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_a_group_that_leaves_engines_to_the_others(size: int) -> None:
    assert check("--urgent-engines", str(size)) == size


def test_without_the_option_there_is_none() -> None:
    assert check(policy="manual", engines=1, max_group=1) == 0


@pytest.mark.parametrize(
    ("size", "engines", "max_group", "allowed"),
    [
        (4, 4, 4, "1, 2"),
        (3, 4, 4, "1, 2"),
        (-1, 8, 2, "1, 2"),
        (4, 8, 2, "1, 2"),
        (1, 1, 1, "0 only"),
    ],
)
def test_others_are_refused(size: int, engines: int, max_group: int, allowed: str) -> None:
    with pytest.raises(UserError, match=rf"--urgent-engines {size}: .* it is {allowed}$"):
        check(f"--urgent-engines={size}", engines=engines, max_group=max_group)


def test_other_policies_keep_no_group() -> None:
    with pytest.raises(UserError, match="needs --policy adaptive"):
        check("--urgent-engines=2", policy="static-dp")
