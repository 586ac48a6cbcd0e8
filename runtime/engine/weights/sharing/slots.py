"""Weights that are copied from peers while the layer before is computed (SiDP's WaS, 4.2).

Two static slots hold what is shared of two layers that follow each other. When the first of a
layer's shared weights is needed, the layer's slot has been filled, and the copies for the next
layer begin. They go on until that layer needs its slot. So a step takes the longer of computing and
copying. Layers that the engine has whole need no slot, and are left out.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from shoal.policies.values.layouts import DP

OPERATOR = "shoal::use_weights"
"""Has a layer's weights in its slot before the layer is computed."""
SLOTS = 2


class Copy(NamedTuple):
    """One copy: from a peer's memory, or this engine's own, to a part of a slot.

    The elements of either are adjacent, as rows of a weight are.
    """

    target: torch.Tensor
    source: torch.Tensor
    is_own: bool = False
    """Whether the source is in this engine's own memory."""


class Copier(Protocol):
    """Copies beside what is computed."""

    def start(self, copies: Sequence[Copy]) -> Any:
        """Begin copies once all is computed that was begun before; return what to wait for."""

    def wait(self, started: Any) -> None:
        """Let what is computed from now on see these copies."""

    def finish(self, started: Any) -> None:
        """Wait, in any thread, until these copies have ended."""


class Keeper(Protocol):
    """Wants layers that DP has streamed (``filling.Filling``)."""

    def stream(self, layer: int, copier: Copier) -> Any:
        """Begin to copy a layer out of its slot; return what to wait for, None: no copy begun."""


class HostCopier:
    """A thread of its own. On CPUs, an operator has computed when it returns."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weights")

    def start(self, copies: Sequence[Copy]) -> "Future[None]":
        """See ``Copier.start``."""
        return self._thread.submit(copy_all, copies)

    def wait(self, started: "Future[None]") -> None:
        """See ``Copier.wait``."""
        started.result()

    finish = wait


def copy_all(copies: Sequence[Copy]) -> None:
    """Copy, one after the other."""
    with torch.inference_mode():
        for copy in copies:
            copy.target.copy_(copy.source)


class _Contents(NamedTuple):
    """What a slot holds, or is being filled with."""

    tp: int
    """Members of the layout whose parts these are."""
    layer: int
    started: Any
    """What ``Copier.start`` returned."""


class WeightSlots:
    """The two slots of an engine, for all layouts that stream: one layout runs at a time.

    Args:
        copier: fills the slots.
    """

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self.copies: dict[int, Mapping[int, Sequence[Copy]]] = {}
        """How a layer gets into its slot, by the members of the layout and the layer's number."""
        self.stages: dict[tuple[int, int], Sequence[int]] = {}
        """The numbers of what this engine's stage computes, in its order, by the members among
        which a layer is divided and the stages of the layout. Others compute all layers."""
        self.whole: frozenset[int] = frozenset()
        """The numbers of what has whole weights, and is not copied into slots."""
        self._known: dict[tuple[int, int, int], Sequence[int]] = {}
        """What ``_ahead`` has found, by its arguments."""
        self._filled: list[_Contents | None] = [None] * SLOTS
        self._keeper: Keeper | None = None
        self._watch: Callable[[int], None] | None = None
        """See ``left_alone``."""
        self._read: list[Any] = [None] * SLOTS
        """For each slot, copies out of it that have begun, as ``Copier.start`` returned them."""

    def use(self, tp: int, layer: int, pp: int = 1) -> None:
        """Have a layer's weights in its slot, and begin to fill the other slot with the next one's.

        The layer that used the other slot has been computed by then. After the last layer comes the
        first one of the next step. If it needs the same slot, it waits for that step. A stage of a
        pipeline goes through its own layers only. While a layer is computed that is whole, both
        slots are filled.

        Args:
            tp: members of the layout among which the layer is divided.
            layer: the layer's number.
            pp: stages of the layout.
        """
        if self._watch is not None:
            self._watch(layer)
            return
        if layer not in self.whole:
            filled = self._fill(tp, layer)
            self.copier.wait(filled.started)
            if self._keeper is not None and tp == DP.tp:
                begun = self._keeper.stream(layer, self.copier)
                self._read[layer % SLOTS] = begun or self._read[layer % SLOTS]
        for following in self._ahead(tp, layer, pp):
            self._fill(tp, following)

    def _ahead(self, tp: int, layer: int, pp: int) -> Sequence[int]:
        """Return the layers with which slots are filled while a layer is computed."""
        known = self._known.get((tp, layer, pp))
        if known is None:
            stage = self.stages.get((tp, pp), range(len(self.copies[tp])))
            begin = stage.index(layer) + 1
            following = [n for n in (*stage[begin:], *stage[:begin]) if n not in self.whole]
            free = [slot for slot in range(SLOTS) if layer in self.whole or slot != layer % SLOTS]
            known = self._known[tp, layer, pp] = []
            for number in following[: len(free)]:
                if number % SLOTS not in free:
                    break  # it waits for the layer that has its slot before
                free.remove(number % SLOTS)
                known.append(number)
        return known

    def keep(self, keeper: Keeper | None) -> None:
        """Let DP's layers be copied out of their slots as steps stream them; None: no more.

        What is computed from now on is after the copies that a former keeper has begun.
        """
        self._keeper = keeper
        for slot in range(SLOTS):
            self._await_readers(slot)

    def leave_out(self, whole: Collection[int]) -> None:
        """Take note of what has whole weights from now on, and so is not copied into slots."""
        self.whole = frozenset(whole)
        self._known.clear()

    def streams(self, tp: int) -> bool:
        """Return whether steps of the layout with so many members copy any layer into a slot."""
        return not self.copies[tp].keys() <= self.whole

    @contextmanager
    def left_alone(self, watch: Callable[[int], None]) -> Iterator[None]:
        """While active, all is computed with what happens to be in the slots.

        Args:
            watch: is told the number of each layer that would use its slot.
        """
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def settle(self) -> None:
        """Wait for all copies, and forget what is in the slots."""
        self.keep(None)
        for filled in self._filled:
            if filled is not None:
                self.copier.wait(filled.started)
        self._filled = [None] * SLOTS

    def _fill(self, tp: int, layer: int) -> _Contents:
        filled = self._filled[layer % SLOTS]
        if filled is None or filled[:2] != (tp, layer):
            # Copies are done in order: what is still on its way to this slot comes first.
            self._await_readers(layer % SLOTS)
            filled = _Contents(tp, layer, self.copier.start(self.copies[tp][layer]))
            self._filled[layer % SLOTS] = filled
        return filled

    def _await_readers(self, slot: int) -> None:
        """Let what is begun from now on be after the copies out of a slot."""
        if self._read[slot] is not None:
            self.copier.wait(self._read[slot])
            self._read[slot] = None


_slots: list[WeightSlots] = []
"""Those of this process. A compiled graph, which may come from a cache, cannot name an object."""


def stream_by(slots: WeightSlots) -> None:
    """Let ``use_weights`` use these slots."""
    _slots[:] = [slots]


def use_weights(x: torch.Tensor, tp: int, layer: int, pp: int = 1) -> torch.Tensor:
    """Return the input of a layer's MLP or attention, once the layer's weights are in their slot.

    Compilers see an operator that changes ``x``, so they do not move it behind what reads ``x``.

    Args:
        x: of any shape.
        tp: see ``WeightSlots.use``.
        layer: see ``WeightSlots.use``.
        pp: see ``WeightSlots.use``.
    """
    torch.ops.shoal.use_weights(x, tp, layer, pp)
    return x


def streamed(
    forward: Callable[..., torch.Tensor], tp: int, layer: int, pp: int
) -> Callable[..., torch.Tensor]:
    """Return what computes a module's output once its weights are in their slot.

    Args:
        forward: of the module. Its first argument is what an MLP or experts compute with.
        tp: see ``WeightSlots.use``.
        layer: see ``WeightSlots.use``.
        pp: see ``WeightSlots.use``.
    """

    def after_use(hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return forward(use_weights(hidden_states, tp, layer, pp), *others, **named)

    return after_use


torch.library.define(
    OPERATOR,
    "(Tensor(a!) x, int tp, int layer, int pp) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


@torch.library.impl(OPERATOR, "default")  # type: ignore[untyped-decorator]
def _use(_x: torch.Tensor, tp: int, layer: int, pp: int) -> None:
    _slots[0].use(tp, layer, pp)


@torch.library.register_fake(OPERATOR)  # type: ignore[untyped-decorator]
def _fake(_x: torch.Tensor, _tp: int, _layer: int, _pp: int) -> None:
    return None
