"""The workloads of ``shoal bench traffic``, and the traces that both load generators read."""

import itertools
import json
import shlex
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shoal.loadgen.shapes import SHAPES
from shoal.loadgen.traces import MOONCAKE_BLOCK_TOKENS
from shoal.loadgen.workload import Arrival, Block, Workload
from shoal.server.errors import UserError
from shoal.server.options.workload_options import QuotedWorkloadParser, read_workload


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload with one of its seeds.

    Attributes:
        name: the options that describe the workload, and the seed; the name of its table.
        workload: its requests. Of a trace, a seed changes only the prompts.
    """

    name: str
    workload: Workload


def read_traffic(text: str, seed: int) -> Traffic:
    """Return the workload that the options describe.

    Args:
        text: options as ``shoal replay`` takes them, as they are typed; ``--trace`` may be left
            out of the first one.
        seed: the seed of random draws.

    Raises:
        UserError: the options are not valid, or the requests have priorities or are turns of
            chats, which vLLM's client cannot send.
    """
    try:
        words = shlex.split(text)
        if words and not words[0].startswith("-"):
            words.insert(0, "--trace")
        args = QuotedWorkloadParser(seed).parse_args([*words, "--seed", str(seed)])
        workload = read_workload(args)
    except (UserError, ValueError) as error:
        raise UserError(f"--workload {text!r}: {error}") from error
    if any(arrival.priority for arrival in workload.arrivals):
        raise UserError(f"--workload {text!r}: vLLM's client sends no priorities")
    if workload.has_chats:
        raise UserError(f"--workload {text!r}: vLLM's client waits for no answers")
    rest = [word for word in words if word not in ("--trace", args.trace)]
    trace = args.trace if args.trace in SHAPES else Path(args.trace).stem
    return Traffic(f"{shlex.join([trace, *rest])} (seed {seed})", workload)


@dataclass
class TraceWriter:
    """Writes workloads as traces in Mooncake's format, no two of which have a prompt in common.

    A server caches the prompts of one way while it serves the next. So each trace gets new ids,
    and both clients make other tokens of other ids.

    Attributes:
        folder: where the files go.
    """

    folder: Path
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _files: Iterator[int] = field(default_factory=itertools.count)

    def write(self, workload: Workload) -> Path:
        """Return the file of a new trace.

        A common beginning is kept as far as it has whole blocks of ``MOONCAKE_BLOCK_TOKENS``.

        Raises:
            OSError: the file cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{next(self._files)}.jsonl"
        known: dict[Hashable, int] = {}
        lines = [json.dumps(self._line(arrival, known)) for arrival in workload.arrivals]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    def _line(self, arrival: Arrival, known: dict[Hashable, int]) -> dict[str, object]:
        blocks = -(-arrival.prompt_tokens // MOONCAKE_BLOCK_TOKENS)
        shared = [
            known.get(key) if key in known else known.setdefault(key, next(self._ids))
            for key in _whole_blocks(arrival.prefix)
        ][:blocks]
        own = [next(self._ids) for _ in range(blocks - len(shared))]
        return {
            "timestamp": 1000 * arrival.at,
            "input_length": arrival.prompt_tokens,
            "output_length": arrival.output_tokens,
            "hash_ids": shared + own,
        }


def _whole_blocks(prefix: Iterable[Block]) -> Iterator[Hashable]:
    """Yield what names each block of Mooncake's size in a common beginning, as far as it has some.

    A block of a trace may have several of them, or be one of several in it.
    """
    small, tokens = list[str](), 0
    for block in prefix:
        yield from ((block.id, n) for n in range(block.tokens // MOONCAKE_BLOCK_TOKENS))
        if block.tokens >= MOONCAKE_BLOCK_TOKENS:
            continue
        small.append(block.id)
        tokens += block.tokens
        if tokens >= MOONCAKE_BLOCK_TOKENS:
            yield tuple(small)
            small, tokens = [], 0
