"""Options of the command line that take a number."""

from argparse import _ActionsContainer


def add_number(group: _ActionsContainer, flag: str, default: int | float, text: str) -> None:
    """Add an option that takes a count if its default is an ``int``, and seconds if a ``float``.

    Args:
        group: to add it to.
        flag: its name, with dashes.
        default: what holds without it.
        text: its help, without the default.
    """
    group.add_argument(
        flag,
        type=type(default),
        default=default,
        metavar="SECONDS" if isinstance(default, float) else "N",
        help=f"{text} (default: %(default)s)",
    )
