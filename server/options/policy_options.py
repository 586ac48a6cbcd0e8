"""What decides the layout: ``--policy``, and the policy of a node for which none was asked."""

import argparse
from argparse import Namespace

from shoal.policies.adaptive import ADAPTIVE
from shoal.policies.registry import POLICIES
from shoal.policies.static import MANUAL


def add_policy_option(group: argparse._ArgumentGroup) -> None:
    """Add ``--policy``."""
    group.add_argument(
        "--policy",
        metavar="NAME",
        help=f"what decides the layout: {', '.join(POLICIES)}, one of an installed package, or "
        f"module:NAME (default: {ADAPTIVE.name} on several GPUs without pipelines, otherwise "
        f"{MANUAL.name})",
    )


def policy_of(args: Namespace, max_group: int, *, on_gpus: bool) -> str:
    """Return the policy that was asked for, or else the one that suits the node.

    Fake engines and those on CPUs share what they run on, so no layout is faster than another, and
    pipelines are only formed by operators.
    """
    if args.policy is not None:
        return str(args.policy)
    adapts = on_gpus and max_group > 1 and args.max_pp == 1
    return ADAPTIVE.name if adapts else MANUAL.name
