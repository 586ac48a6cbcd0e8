"""Layouts and units: how engines share one model's work, and which engines share it.

Both are frozen values: they are compared, hashed, sorted, sent between processes and used as keys.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

Engines = tuple[int, ...]
"""Numbers of engines, ascending."""


class Place(NamedTuple):
    """Where one member of a unit stands in the unit's layout."""

    stage: int
    """The member's pipeline stage."""
    rank: int
    """The member's tensor parallel rank within that stage."""


class Layout(
    msgspec.Struct, frozen=True, order=True, array_like=True, omit_defaults=True, cache_hash=True
):
    """How the engines of a unit share one model's work.

    Members are numbered stage by stage, as vLLM numbers ranks: ``tp`` adjacent members share the
    layers of a stage, and ``pp`` stages follow one another.
    """

    tp: int = 1
    """Engines among which every layer of a stage is divided (tensor parallel)."""
    pp: int = 1
    """Stages into which the layers are divided (pipeline parallel)."""
    ep: int = 1
    """Engines among which the experts are divided (expert parallel); a part of ``tp``."""

    @property
    def world_size(self) -> int:
        """Number of engines in the layout; vLLM uses the same name."""
        return self.tp * self.pp

    @property
    def name(self) -> str:
        """Its name for people and labels: ``dp``, ``tp2``, ``pp2``, ``tp2-pp2``, ``tp4-ep4``."""
        return _name_of(self)

    def place(self, member: int) -> Place:
        """Return the place of a member.

        Args:
            member: the member's number among the unit's engines, from 0.
        """
        return Place(*divmod(member, self.tp))

    @property
    def answering_member(self) -> int:
        """Number of the member whose runner returns a step's tokens: the last stage's first."""
        return (self.pp - 1) * self.tp


@functools.cache  # every step's answer names its layout
def _name_of(layout: Layout) -> str:
    axes = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    return "-".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "dp"


DP = Layout()
"""The layout of an engine that serves alone."""


class Unit(msgspec.Struct, frozen=True, order=True, array_like=True, cache_hash=True):
    """Engines that serve requests as one."""

    engines: Engines
    """Their numbers, which are adjacent; a group is aligned to its size."""
    layout: Layout = DP
    tier: bool = False
    """Whether this is the part of the host's memory that one engine has for KV (its *tier*).
    Requests are carried there and back as between any units, but nothing is computed there."""

    @property
    def leader(self) -> int:
        """The engine that runs the unit's scheduler: its first."""
        return self.engines[0]

    @property
    def size(self) -> int:
        """Number of its engines."""
        return len(self.engines)

    @property
    def is_group(self) -> bool:
        """Whether several engines work together."""
        return len(self.engines) > 1

    @property
    def name(self) -> str:
        """The name of its layout."""
        return self.layout.name


@functools.cache  # one value for each engine: its hash is found once
def alone(engine: int) -> Unit:
    """Return the unit of one engine."""
    return Unit((engine,))


@functools.cache
def tier_of(engine: int) -> Unit:
    """Return the unit that stands for an engine's part of the host's memory for KV."""
    return Unit((engine,), tier=True)


def tensor_parallel(engines: Iterable[int]) -> Unit:
    """Return the unit in which these engines divide every layer; one engine is a unit by itself."""
    members = tuple(engines)
    return Unit(members, Layout(tp=len(members)))


def unit_of(engine: int, layout: Layout) -> Unit:
    """Return the aligned, adjacent engines with which an engine works in a layout."""
    first = engine - engine % layout.world_size
    return Unit(tuple(range(first, first + layout.world_size)), layout)


@functools.cache
def layouts_up_to(max_group: int, max_pp: int = 1) -> tuple[Layout, ...]:
    """Return the layouts of a node: DP, TP2, TP4 and so on, and those with stages if there are any.

    Narrow ones come first, and among those of one size the ones with the most stages: so the last
    one is the widest without stages, which every policy can choose.

    Args:
        max_group: size of the largest group, a power of two (``--max-group``).
        max_pp: most pipeline stages of a group, a power of two (``--max-pp``); 1: none has stages.
    """
    return tuple(
        Layout(tp=size // pp, pp=pp)
        for size in _powers(max_group)
        for pp in reversed(_powers(min(size, max_pp)))
    )


def _powers(largest: int) -> list[int]:
    return [1 << k for k in range(largest.bit_length()) if 1 << k <= largest]
