"""The options of batch work: where its files are, and how much there may be."""

import argparse
import os
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.server.errors import UserError
from shoal.server.number_options import add_number, check_at_least, flag_of

DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class BatchLimits:
    """What the holder of an API key may have, and how long it is kept."""

    file_bytes: int = 5 << 30
    """Bytes of one input file."""
    stored_bytes: int = 100 << 30
    """Bytes of all files of one key."""
    lines: int = 1_000_000
    batches: int = 32
    """Unfinished batches of one key."""
    keep_days: int = 30


DEFAULTS = BatchLimits()
_NUMBERS = (
    ("max_batch_file_bytes", DEFAULTS.file_bytes, "bytes of one input file"),
    ("max_stored_bytes", DEFAULTS.stored_bytes, "bytes of all files of one API key"),
    ("max_batch_lines", DEFAULTS.lines, "requests of one batch"),
    ("max_batches", DEFAULTS.batches, "unfinished batches of one API key"),
    ("batch_keep_days", DEFAULTS.keep_days, "days for which files and ended batches are kept"),
)


def add_batch_options(group: argparse._ArgumentGroup) -> None:
    """Add ``--batch-dir``, and the limits of batches."""
    group.add_argument(
        "--batch-dir",
        type=Path,
        metavar="DIR",
        help="directory of files and batches, which turns /v1/files and /v1/batches on; it should "
        "outlive the server",
    )
    number = partial(add_number, group)
    for name, default, text in _NUMBERS:
        number(flag_of(name), default, text)


def check_batch_options(args: Namespace) -> None:
    """Refuse limits that would allow nothing, and a directory that cannot be used.

    Raises:
        UserError: the first such option; the message names it.
    """
    check_at_least(args, 1, *(name for name, _, _ in _NUMBERS))
    if args.batch_dir is None:
        return
    try:
        args.batch_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"--batch-dir {args.batch_dir}: it is no directory") from None
    except OSError as error:
        raise UserError(f"--batch-dir {args.batch_dir}: {error.strerror}") from None
    if not os.access(args.batch_dir, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"--batch-dir {args.batch_dir}: it cannot be written")


def batch_limits(args: Namespace) -> BatchLimits:
    """Return the limits that the command line sets."""
    return BatchLimits(
        file_bytes=args.max_batch_file_bytes,
        stored_bytes=args.max_stored_bytes,
        lines=args.max_batch_lines,
        batches=args.max_batches,
        keep_days=args.batch_keep_days,
    )
