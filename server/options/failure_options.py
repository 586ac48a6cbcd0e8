"""Options of failures: when a process counts as dead, and what then becomes of requests."""

import argparse
from argparse import Namespace
from functools import partial

from shoal.runtime.config import (
    MAX_RETRIES,
    OUTAGE_LIMIT_SECONDS,
    RESTART_BACKOFF_SECONDS,
    RESTART_LIMIT,
)
from shoal.runtime.node.restarts import WINDOW_SECONDS
from shoal.server.number_options import add_number, check_at_least, check_positive

ENGINE_TIMEOUT_SECONDS = 10.0
CONTROLLER_TIMEOUT_SECONDS = 10.0
STEP_TIMEOUT_SECONDS = 60.0


def add_failure_options(group: argparse._ArgumentGroup) -> None:
    """Add ``--max-retries``, ``--outage-limit``, ``--...-timeout`` and ``--restart-...``."""
    number = partial(add_number, group)
    number(
        "--max-retries",
        MAX_RETRIES,
        "how often a request whose engine has died goes on elsewhere",
    )
    number(
        "--engine-timeout",
        ENGINE_TIMEOUT_SECONDS,
        "an engine that does not answer for so long counts as dead",
    )
    number(
        "--controller-timeout",
        CONTROLLER_TIMEOUT_SECONDS,
        "while the controller has not answered for so long, /health is a 503 and so are "
        "requests that wait for it; after three times as long the node ends",
    )
    number(
        "--outage-limit",
        OUTAGE_LIMIT_SECONDS,
        "how long requests wait while no engine serves, before they end with a 503",
    )
    number(
        "--step-timeout",
        STEP_TIMEOUT_SECONDS,
        "an engine with a step that takes so long counts as dead; it need not take that long "
        "when many like it were much shorter",
    )
    number(
        "--restart-limit",
        RESTART_LIMIT,
        "how often an engine that died is started again within "
        f"{WINDOW_SECONDS / 60:.0f} minutes; 0: never",
    )
    number(
        "--restart-backoff",
        RESTART_BACKOFF_SECONDS,
        "pause before a restart; each further pause is twice as long",
    )


def check_failure_options(args: Namespace) -> None:
    """Refuse impossible values.

    Raises:
        UserError: the first such option; the message names it.
    """
    check_at_least(args, 0, "max_retries", "restart_limit")
    check_positive(args, "engine_timeout", "controller_timeout", "outage_limit")
    check_positive(args, "step_timeout", "restart_backoff")
