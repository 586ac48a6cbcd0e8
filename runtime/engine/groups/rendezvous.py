"""How the members of a group find each other: by themselves, and again after one of them has died.

``torch.distributed.new_group`` is collective over every process of a node, and names what it makes
by a counter that all of them must share: a process that comes back can never catch up. Here a group
is made by its members alone, through a store of its own for every time that it is made. torch's
default group only numbers the engines: it connects nobody, and a collective on it raises.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shoal.policies.values.layouts import Unit
from shoal.runtime.node.runtime_dir import remove_former

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


class SymmetricMemoryStore(dist.Store):  # type: ignore[misc]
    """A group's store, which numbers exchanges of symmetric memory from the group's first one.

    vLLM's all-reduce over symmetric memory has torch exchange addresses through the store of a gloo
    group. torch numbers these exchanges by a counter of the process (``StoreExchange``), which is
    equal only in processes that made every group together. A process that comes back would wait for
    keys that its peers write under other numbers, and they would wait for its keys.

    Args:
        store: the group's own store.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def _own(self, key: str) -> str:
        """Return a key, with its number counted from the first one if it has such a number."""
        match = _EXCHANGE.fullmatch(key)
        if match is None:
            return key
        number = int(match["number"])
        self._first = number if self._first is None else self._first
        return f"{match['before']}{number - self._first}{match['after']}"

    def set(self, key: str, value: Any) -> None:
        """See ``torch.distributed.Store``."""
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        """See ``torch.distributed.Store``."""
        value: bytes = self._store.get(self._own(key))
        return value

    def add(self, key: str, value: int) -> int:
        """See ``torch.distributed.Store``."""
        return int(self._store.add(self._own(key), value))

    def check(self, keys: list[str]) -> bool:
        """See ``torch.distributed.Store``."""
        return bool(self._store.check([self._own(key) for key in keys]))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """See ``torch.distributed.Store``."""
        self._store.wait([self._own(key) for key in keys], *timeout)

    def delete_key(self, key: str) -> bool:
        """See ``torch.distributed.Store``."""
        return bool(self._store.delete_key(self._own(key)))


_kept_alive: list[dist.Store] = []
"""torch keeps only their C++ objects. Their Python objects must live as long, which is for ever."""
_EXCHANGE = re.compile(r"(?P<before>.*SymmetricMemory\w*/)(?P<number>\d+)(?P<after>.*)")


class Rendezvous:
    """Where the members of one unit make the process groups of their layout.

    Args:
        directory: the node's private directory; the members meet at a file in it.
        unit: the unit.
        engine: this process's.
        generation: how often the unit's layout was made before.
        seconds: how long members wait for each other.
    """

    def __init__(
        self, directory: Path, unit: Unit, engine: int, generation: int, seconds: float
    ) -> None:
        self._directory = directory
        self._engine = engine
        self._name = f"{unit.name}-{'-'.join(map(str, unit.engines))}.{generation}"
        self._patience = timedelta(seconds=seconds)
        self._made = Counter[str]()
        """How often each members' groups were made: other members may have made others."""
        self._unit = unit
        # A file that is never used twice: one that a dying process wrote to may be damaged.
        path = directory / f"members-{self._name}"
        remove_former(path)
        store = dist.FileStore(str(path)) if unit.is_group else dist.HashStore()
        store.set_timeout(self._patience)
        self._store, self._stores = store, {"nccl": store, "gloo": store}
        if generation > 0:
            # Not for NCCL: it exchanges no such addresses, and reads from threads of its own.
            self._stores["gloo"] = SymmetricMemoryStore(store)
            _kept_alive.append(self._stores["gloo"])

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, backend: Any = None, **_: Any
    ) -> Any:
        """Return a process group of these engines; ``NON_GROUP_MEMBER`` if this is none of them.

        Stands in for ``torch.distributed.new_group``. Collective over ``ranks`` alone, which are
        members of the unit; each makes its groups in the same order.

        Args:
            ranks: engines, ascending.
            timeout: the collectives' time-out; None: the backend's default.
            backend: torch's name of the backend.

        Raises:
            RuntimeError: a member did not come in time.
        """
        if self._engine not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        members = "-".join(map(str, ranks))
        self._made[members] += 1
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(self._engine),
            list(ranks),
            dist.Backend(backend),
            dist.HashStore() if len(ranks) == 1 else self._stores[dist.Backend(backend)],
            c10d.GroupName(f"{self._name}/{members}/{self._made[members]}"),
            timeout=self._patience,
        )
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        c10d._set_pg_timeout(timeout or c10d._get_default_timeout(dist.Backend(backend)), group)
        return group

    @property
    def patience(self) -> float:
        """How long members wait for each other, in seconds."""
        return self._patience.total_seconds()

    def arrive(self, point: int) -> None:
        """Tell the other members that this one has come to a point, such as 3. Waits for nobody."""
        self._store.set(f"arrived/{point}/{self._engine}", "")

    def all_are_at(self, point: int) -> bool:
        """Return whether all members have come to a point. Waits for nobody."""
        arrived = [f"arrived/{point}/{engine}" for engine in self._unit.engines]
        return bool(self._store.check(arrived))

    @property
    def own_name(self) -> str:
        """A name that no other process has, for what this process shares with nobody."""
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
        name: what the values are about.
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
