"""The option of a group for urgent requests, of ``shoal serve`` and ``shoal simulate``."""

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Collection

from shoal.policies.adaptive import ADAPTIVE
from shoal.policies.values.layouts import layouts_up_to
from shoal.server.errors import UserError


def add_urgent_option(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add ``--urgent-engines``."""
    parser.add_argument(
        "--urgent-engines",
        type=int,
        default=0,
        metavar="N",
        help="of the policy adaptive: while urgent requests (priority below 0) come, a group of N "
        "engines serves them alone (default: %(default)s: none does)",
    )


def check_urgent(args: Namespace, policies: Collection[str], engines: int, max_group: int) -> None:
    """Refuse a group for urgent requests that the node cannot form, or that nobody asks for.

    Args:
        args: the parsed arguments.
        policies: names of the policies that will decide.
        engines: of the node.
        max_group: largest group of the node.

    Raises:
        UserError: it is no size of a group, leaves no engine, or no policy keeps a group.
    """
    size = args.urgent_engines
    if not size:
        return
    able = [each.world_size for each in layouts_up_to(max_group) if each.world_size < engines]
    if size not in able:
        allowed = ", ".join(map(str, able)) or "0 only"
        raise UserError(
            f"--urgent-engines {size}: with {engines} engines and groups of up to {max_group} "
            f"it is {allowed}"
        )
    if ADAPTIVE.name not in policies:
        raise UserError(f"--urgent-engines needs --policy {ADAPTIVE.name}")
