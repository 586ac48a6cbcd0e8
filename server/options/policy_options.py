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


def policy_of(args: Namespace, max_group: int, *, adapts: bool) -> str:
    """Return the policy that was asked for, or else the one that suits the node.

    Args:
        args: the parsed arguments.
        max_group: largest group of the node.
        adapts: whether a model of one's own is served on GPUs. Fake engines and those on CPUs share
            what they run on, and the demo model is there to try switches. Pipelines are only formed
            by operators.
    """
    if args.policy is not None:
        return str(args.policy)
    several = max_group > 1 and args.max_pp == 1
    return ADAPTIVE.name if adapts and several else MANUAL.name
