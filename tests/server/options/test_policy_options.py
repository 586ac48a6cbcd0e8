"""Which policy a node has for which none was asked."""

from argparse import Namespace

import pytest

from shoal.server.options.policy_options import policy_of


@pytest.mark.parametrize(
    ("asked", "max_group", "max_pp", "on_gpus", "policy"),
    [
        (None, 2, 1, True, "adaptive"),
        (None, 8, 1, True, "adaptive"),
        (None, 1, 1, True, "manual"),
        (None, 2, 1, False, "manual"),
        (None, 4, 2, True, "manual"),
        ("static-dp", 4, 1, True, "static-dp"),
        ("manual", 4, 1, True, "manual"),
        ("adaptive", 2, 1, False, "adaptive"),
    ],
)
def test_only_several_gpus_adapt_unasked(
    asked: str | None, max_group: int, max_pp: int, on_gpus: bool, policy: str
) -> None:
    args = Namespace(policy=asked, max_pp=max_pp)
    assert policy_of(args, max_group, adapts=on_gpus) == policy
