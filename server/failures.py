"""When an engine counts as dead, and what then becomes of it and its requests: from options."""

import argparse
import math
from argparse import Namespace

from runtime.config import MAX_RETRIES, RESTART_BACKOFF_SECONDS, RESTART_LIMIT
from runtime.restarts import WINDOW_SECONDS
from server.errors import UserError

ENGINE_TIMEOUT_SECONDS = 10.0
STEP_TIMEOUT_SECONDS = 60.0


def add_failure_options(group: argparse._ArgumentGroup) -> None:
    """Add ``--max-retries``, ``--engine-timeout``, ``--step-timeout`` and ``--restart-...``."""
    group.add_argument(
        "--max-retries",
        type=int,
        default=MAX_RETRIES,
        metavar="N",
        help="how often a request goes on elsewhere when an engine has died that computed it "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--engine-timeout",
        type=float,
        default=ENGINE_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="an engine that does not answer for so long counts as dead (default: %(default)s)",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        default=STEP_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="an engine with a step that takes so long counts as dead; it need not take that long "
        "when many like it were much shorter (default: %(default)s)",
    )
    group.add_argument(
        "--restart-limit",
        type=int,
        default=RESTART_LIMIT,
        metavar="N",
        help="how often an engine that died is started again within "
        f"{WINDOW_SECONDS / 60:.0f} minutes; 0: never (default: %(default)s)",
    )
    group.add_argument(
        "--restart-backoff",
        type=float,
        default=RESTART_BACKOFF_SECONDS,
        metavar="SECONDS",
        help="pause before that; each further one is twice as long (default: %(default)s)",
    )


def check_failure_options(args: Namespace) -> None:
    """Refuse what cannot be.

    Raises:
        UserError: the first such option; the message names it.
    """
    if args.max_retries < 0:
        raise UserError(f"--max-retries {args.max_retries}: it must not be negative")
    if args.restart_limit < 0:
        raise UserError(f"--restart-limit {args.restart_limit}: it must not be negative")
    for name in ("engine_timeout", "step_timeout", "restart_backoff"):
        value = getattr(args, name)
        if not 0 < value < math.inf:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {value:g}: it must be more than 0")
