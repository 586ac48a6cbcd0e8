"""The option of the host's memory for KV, of serving and of simulating."""

from argparse import Namespace, _ActionsContainer
from pathlib import Path
from typing import Any

from shoal.server.errors import UserError
from shoal.server.number_options import check_at_least

GIB = 2**30
FAKE_BLOCKS = 1024
"""Blocks for which a GiB is enough in a fake engine."""


def add_tier_option(group: _ActionsContainer) -> None:
    """Add ``--kv-tier-gib``."""
    group.add_argument(
        "--kv-tier-gib",
        type=int,
        metavar="GIB",
        default=0,
        help="pinned memory of the host, for each engine, in which the policy batch lets computed "
        "prompts wait until there is room to decode them; 0: none (default: %(default)s)",
    )


def check_tier(args: Namespace, engines: int, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Check that the host has as much memory as the engines are to have for KV.

    Args:
        args: the parsed arguments.
        engines: the number of engines.
        meminfo: where the system says what is available.

    Raises:
        UserError: it has less, or the number is negative.
    """
    check_at_least(args, 0, "kv_tier_gib")
    asked = args.kv_tier_gib * engines * GIB
    if not asked or args.fake_engine:
        return
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) << 10
    if asked > available:
        raise UserError(
            f"--kv-tier-gib {args.kv_tier_gib}: {engines} engines take {asked / GIB:.0f} GiB, and "
            f"the host has {available / GIB:.0f} GiB available"
        )


def carry_settings(args: Namespace) -> dict[str, Any]:
    """Return the fields of ``NodeConfig`` that say how KV goes from unit to unit, and waits."""
    return {
        "carry_path": args.carry_path,
        "precopy_tokens": args.precopy_tokens,
        "tier_bytes": args.kv_tier_gib * GIB,
    }
