"""``shoal report``: shows replays side by side."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from shoal.loadgen import page, text_tables
from shoal.loadgen.replay_results import ResultError, read
from shoal.server.errors import UserError
from shoal.server.files import write_file
from shoal.server.options.workload_options import add_target_option, read_objectives


def main(argv: Sequence[str]) -> int:
    """Run ``shoal report`` and return the exit code.

    Raises:
        UserError: a file does not hold a replay, or the report cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="shoal report", description="Show runs of 'shoal replay' side by side."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="made with --json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with a picture")
    add_target_option(parser)
    args = parser.parse_args(argv)
    objectives = read_objectives(args)
    try:
        results = [read(path) for path in args.files]
    except ResultError as error:
        raise UserError(str(error)) from error
    print(text_tables.side_by_side([result.report(objectives) for result in results]))
    for result in results:
        for problem in result.verdict.problems:
            print(f"INVALID RUN {result.name}: {problem}")
    if args.html is not None:
        write_file(args.html, page.page(results, objectives).encode())
    return 0
