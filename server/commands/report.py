"""``shoal report``: shows replays side by side."""

from collections.abc import Sequence
from pathlib import Path

from shoal.loadgen import page, plot, text_tables
from shoal.loadgen.replay_results import ResultError, read
from shoal.server.commands.command_parser import CommandParser
from shoal.server.errors import UserError
from shoal.server.files import write_file
from shoal.server.options.workload_options import add_target_option, read_objectives


def main(argv: Sequence[str]) -> int:
    """Run ``shoal report`` and return the exit code.

    Raises:
        UserError: a file does not hold a replay, or the report cannot be written.
    """
    parser = CommandParser(
        prog="shoal report", description="Show runs of 'shoal replay' side by side."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="made with --json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with a picture")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="write layouts, requests and throughput over time"
    )
    parser.add_argument("--title", metavar="TEXT", help="of the picture (default: the workloads)")
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
    if args.svg is not None:
        title = args.title or page.title_of(results)
        timelines = [result.timeline() for result in results]
        write_file(args.svg, plot.draw_overview(title, timelines).encode())
    return 0
