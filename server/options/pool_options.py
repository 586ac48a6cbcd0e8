"""Options of the task pool: how much may wait and be kept, and in which order it is served."""

import argparse
from argparse import Namespace
from functools import partial
from typing import Any

from shoal.runtime.config import (
    AGING_SECONDS,
    MAX_HELD_BYTES,
    MAX_WAITING_REQUESTS,
    MAX_WAITING_TOKENS,
)
from shoal.server.number_options import add_number, check_at_least, check_positive, flag_of

_LIMITS = (
    ("max_waiting_requests", MAX_WAITING_REQUESTS, "requests that may wait in the task pool"),
    ("max_waiting_tokens", MAX_WAITING_TOKENS, "prompt tokens that may wait in the task pool"),
    ("max_held_bytes", MAX_HELD_BYTES, "bytes of all requests on the node together"),
)


def add_pool_options(group: argparse._ArgumentGroup) -> None:
    """Add the limits, and how requests are placed and ordered."""
    number = partial(add_number, group)
    for name, default, text in _LIMITS:
        number(flag_of(name), default, text)
    number("--priority-aging", AGING_SECONDS, "wait that makes up for one class of priority")
    add_placement_options(group)


def add_placement_options(group: argparse._ActionsContainer) -> None:
    """Add ``--place-by-prefix`` and ``--short-first``."""
    group.add_argument(
        "--place-by-prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send requests where their prefix is cached, if that costs less (default: on)",
    )
    group.add_argument(
        "--short-first",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let short prompts pass long ones that came shortly before them (default: on)",
    )


def check_pool_options(args: Namespace) -> None:
    """Refuse limits with which nothing could wait.

    Raises:
        UserError: the first such option; the message names it.
    """
    check_at_least(args, 1, *(name for name, _, _ in _LIMITS))
    check_positive(args, "priority_aging")


def pool_settings(args: Namespace) -> dict[str, Any]:
    """Return the fields of ``NodeConfig`` that these options set."""
    limits = {name: getattr(args, name) for name, _, _ in _LIMITS}
    return {
        **limits,
        "aging_seconds": args.priority_aging,
        "place_by_prefix": args.place_by_prefix,
        "short_first": args.short_first,
    }
