"""Options of the command line that take a number."""

import math
from argparse import Namespace, _ActionsContainer

from shoal.server.errors import UserError


def add_number(group: _ActionsContainer, flag: str, default: int | float, text: str) -> None:
    """Add an option that takes a count if its default is an ``int``, and seconds if a ``float``.

    Args:
        group: the group that gets the option.
        flag: the option's name, with dashes.
        default: the option's default.
        text: the option's help, without the default.
    """
    group.add_argument(
        flag,
        type=type(default),
        default=default,
        metavar="SECONDS" if isinstance(default, float) else "N",
        help=f"{text} (default: %(default)s)",
    )


def flag_of(name: str) -> str:
    """Return the flag of the option that ``argparse`` stores under this name."""
    return "--" + name.replace("_", "-")


def check_positive(args: Namespace, *names: str) -> None:
    """Refuse options that are not above 0; one that is None was not given.

    Raises:
        UserError: the first that is 0 or less, infinite or no number.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag_of(name)} {value:g}: it must be more than 0")


def check_at_least(args: Namespace, least: int, *names: str) -> None:
    """Refuse options that are set and less than ``least``.

    Raises:
        UserError: the first that is less, infinite or no number.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"{flag_of(name)} {value:g}: it must be at least {least}")
