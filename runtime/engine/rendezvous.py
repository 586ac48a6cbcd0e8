"""How the members of a group find each other: by themselves, and again after one of them has died.

``torch.distributed.new_group`` is collective over every process of a node, and names what it makes
by a counter that all of them must share: a process that comes back can never catch up. Here a group
is made by its members alone, through a store of its own for every time that it is made. torch's
default group only numbers the engines: it connects nobody, and a collective on it raises.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from policies.partition import Group

LOAD_SECONDS = 1800.0
"""How long engines that start together wait for each other: for the slowest one's compilation."""
REJOIN_SECONDS = 30.0
"""How long members of a running node wait for each other: they were all asked at once."""

_NUMBERING = "numbering"
"""Name under which torch knows the default group's backend."""


class _Numbering(dist.ProcessGroup):  # type: ignore[misc]
    """Rank and size, and no way to communicate."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return _NUMBERING


def number_process(engine: int, engines: int) -> None:
    """Make ``engine`` this process's rank among ``engines``, for torch. Waits for nobody."""
    dist.Backend.register_backend(
        _NUMBERING,
        lambda _store, rank, size, _timeout: _Numbering(rank, size),
        devices=["cpu", "cuda"],
    )
    dist.init_process_group(_NUMBERING, store=dist.HashStore(), rank=engine, world_size=engines)


class Rendezvous:
    """Where the members of one group make the process groups of their layout.

    Args:
        directory: the node's private directory; the members meet at a file in it.
        group: the engines of the group.
        engine: this process's.
        generation: how often the group was made before.
        seconds: how long members wait for each other.
    """

    def __init__(
        self, directory: Path, group: Group, engine: int, generation: int, seconds: float
    ) -> None:
        self._directory = directory
        self._engine = engine
        self._name = f"{'-'.join(map(str, group))}.{generation}"
        self._patience = timedelta(seconds=seconds)
        self._numbers = itertools.count()
        # A file that is never used twice: one that a dying process wrote to may be damaged.
        path = directory / f"members-{self._name}"
        self._store = dist.FileStore(str(path)) if len(group) > 1 else dist.HashStore()

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, backend: Any = None, **_: Any
    ) -> Any:
        """Return a process group of these engines; ``NON_GROUP_MEMBER`` if this is none of them.

        Stands in for ``torch.distributed.new_group``. Collective over ``ranks`` alone, which are
        members of the group; each makes its groups in the same order.

        Args:
            ranks: engines, ascending.
            timeout: of the collectives; None: the backend's default.
            backend: torch's name of it.

        Raises:
            RuntimeError: a member did not come.
        """
        if self._engine not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        alone = len(ranks) == 1
        members = "-".join(map(str, ranks))
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(self._engine),
            list(ranks),
            dist.Backend(backend),
            dist.HashStore() if alone else self._store,
            c10d.GroupName(f"{self._name}/{members}/{next(self._numbers)}"),
            timeout=self._patience,
        )
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        c10d._set_pg_timeout(timeout or c10d._get_default_timeout(dist.Backend(backend)), group)
        return group

    @property
    def own_name(self) -> str:
        """A name of this process for what it shares with nobody."""
        return f"{self._directory.name}-{self._engine}"


@contextmanager
def new_group_replaced(new_group: Callable[..., Any]) -> Iterator[None]:
    """Let what calls ``torch.distributed.new_group`` call this function."""
    original = dist.new_group
    torch.distributed.new_group = new_group
    try:
        yield
    finally:
        torch.distributed.new_group = original


def agreed_minimum(directory: Path, name: str, engine: int, engines: int, value: int) -> int:
    """Return the smallest ``value`` that the engines of a node have named; waits for all of them.

    An engine that comes back keeps to what it named in its first life.

    Args:
        directory: the node's private directory.
        name: what it is about.
        engine: this process's.
        engines: number of engines.
        value: what this engine names.

    Raises:
        RuntimeError: an engine named nothing in time.
    """
    store = dist.FileStore(str(directory / "agreed"))
    store.set_timeout(timedelta(seconds=LOAD_SECONDS))
    own = f"{name}/{engine}"
    if not store.check([own]):
        store.set(own, str(value))
    return min(int(store.get(f"{name}/{other}")) for other in range(engines))
