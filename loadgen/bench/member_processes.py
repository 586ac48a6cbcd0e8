"""What processes do that are the members of a group, in benchmarks without a server."""

import sys
from collections.abc import Iterator, Sequence
from queue import Empty
from typing import Any

from shoal.runtime.clock import process_seconds


def say(place: int, text: str) -> None:
    """Say on stderr what a member does."""
    print(f"{process_seconds():6.1f} s, member {place}: {text}", file=sys.stderr, flush=True)


def gathered(
    count: int, members: int, processes: Sequence[Any], out: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield so many names with what members have found, each when so many members have found it.

    Raises:
        SystemExit: a member has failed.
    """
    found = dict[Any, list[Any]]()
    while count:
        try:
            name, of_member = out.get(timeout=1.0)
        except Empty:
            if any(process.exitcode for process in processes):
                raise SystemExit("a member has failed; its error is above") from None
            continue
        found.setdefault(name, []).append(of_member)
        if len(found[name]) == members:
            count -= 1
            yield name, found.pop(name)
