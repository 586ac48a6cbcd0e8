"""The options of ``shoal replay`` that say what requests contain, where nothing is made up."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from tokenizers import Tokenizer

from shoal.loadgen.client import Endpoint
from shoal.loadgen.datasets import CountTokens, DatasetError, read_dataset, with_contents
from shoal.loadgen.workload import Workload
from shoal.server.errors import UserError, one_line
from shoal.server.number_options import check_positive, flag_of

_THINK_SECONDS = 5.0
_MADE_UP = ("prompt_tokens", "shared_tokens", "turns", "max_request_tokens")
"""Options of prompts that are made up."""


def add_dataset_options(parser: ArgumentParser) -> None:
    """Add the options that ``with_dataset`` reads."""
    group = parser.add_argument_group("datasets")
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="send these chats or prompts at the times of --trace: ShareGPT's JSON, or JSON lines "
        "with 'prompt' or 'messages'",
    )
    group.add_argument(
        "--max-turns",
        type=int,
        metavar="N",
        help="the most turns of a dataset's chat (default: all)",
    )


def with_dataset(args: Namespace, workload: Workload) -> Workload:
    """Return the workload with the contents that ``--dataset`` names.

    Raises:
        UserError: the dataset cannot be read, or does not go with the other options.
    """
    check_positive(args, "max_turns")
    if args.dataset is None:
        if args.max_turns is not None:
            raise UserError("--max-turns needs --dataset")
        return workload
    for name in _MADE_UP:
        if getattr(args, name) is not None:
            raise UserError(f"{flag_of(name)} is for made-up prompts, not for --dataset")
    try:
        talks = read_dataset(args.dataset)
        filled = with_contents(
            workload,
            talks,
            seed=args.seed,
            think_seconds=args.think_seconds or _THINK_SECONDS,
            max_turns=args.max_turns,
            count=None if args.tokenizer is None else _counter(args.tokenizer),
        )
    except DatasetError as error:
        raise UserError(str(error)) from error
    if args.endpoint is not Endpoint.CHAT and any(
        isinstance(turn.content, tuple) for arrival in filled.arrivals for turn in arrival.turns()
    ):
        raise UserError(f"--dataset {args.dataset} has chats: it needs --endpoint chat")
    return filled


def _counter(path: Path) -> CountTokens:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise UserError(f"--tokenizer {path}: {one_line(error)}") from error
    return lambda text: len(tokenizer.encode(text))
