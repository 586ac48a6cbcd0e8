"""The options of the shift between TP and SP, of ``shoal serve`` and ``shoal simulate``."""

from argparse import ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Collection

from policies.partition import degrees
from policies.shift import (
    DEFAULT_THRESHOLD,
    SHIFT,
    ShiftThreshold,
    ShiftThresholdError,
    parse_threshold,
)
from server.errors import UserError


def add_shift_options(group: _ActionsContainer) -> None:
    """Add ``--max-sp`` and ``--shift-threshold``."""
    group.add_argument(
        "--max-sp",
        type=int,
        default=1,
        metavar="N",
        help="largest sequence-parallel degree of a group's steps; 1: none is run in SP "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--shift-threshold",
        type=_threshold,
        default=DEFAULT_THRESHOLD,
        metavar="TOKENS|auto|off",
        help="steps that batch more tokens are run in SP; auto: by the cost model "
        "(default: %(default)s)",
    )


def _threshold(text: str) -> ShiftThreshold:
    try:
        return parse_threshold(text)
    except ShiftThresholdError as error:
        raise ArgumentTypeError(str(error)) from None


def check_shift(args: Namespace, policies: Collection[str], max_group: int) -> None:
    """Refuse what no group of the node can do.

    Args:
        args: the parsed arguments.
        policies: names of those that are to decide.
        max_group: largest group of the node.

    Raises:
        UserError: ``--max-sp`` is no degree of the node's groups, or lacking.
    """
    if args.max_sp not in degrees(max_group):
        allowed = ", ".join(map(str, degrees(max_group)))
        raise UserError(f"--max-sp {args.max_sp}: with groups of up to {max_group} it is {allowed}")
    if args.max_sp == 1 and args.shift_threshold != DEFAULT_THRESHOLD:
        raise UserError("--shift-threshold needs --max-sp")
    if args.max_sp == 1 and SHIFT.name in policies:
        raise UserError(f"--policy {SHIFT.name} needs --max-sp")
