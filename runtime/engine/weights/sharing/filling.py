"""The copies that make an engine's weights whole, beside its steps.

A step of DP that streams has each layer for a moment in a slot, in the engine's own memory. So the
copies are made of the slots, one layer after the other, while a step goes on: nothing crosses the
link for them. If no such step comes, the engine copies from where the others keep the weights.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch

from shoal.runtime.clock import Clock
from shoal.runtime.engine.weights.sharing.shared_weight import checksum
from shoal.runtime.engine.weights.sharing.slots import Copier, Copy

PATIENCE_SECONDS = 0.25
"""How long after the last layer that a step has streamed the next one may come. Steps that decode
come sooner. One that takes longer gets longer by what is copied beside it."""
_FETCHED, _COMPARED = 8, 32
"""Layers that are fetched or compared before the host waits for them. While steps stream, a wait
may take as long as a step, because a GPU takes up work in the order in which it was begun. And what
is begun at once makes a step so much longer; comparing takes a tenth of the time of fetching."""


class Part(NamedTuple):
    """One engine's part of a weight. All tensors but the checksum are uint8."""

    name: str
    """Of the weight."""
    target: torch.Tensor
    """Where the copy comes to lie."""
    source: torch.Tensor
    """Where its engine keeps it."""
    slot: torch.Tensor | None
    """Where it is once a step of DP has streamed it; None: it is not streamed."""
    checksum: torch.Tensor
    """What its engine has found as the checksum."""

    @property
    def copy(self) -> Copy:
        """The copy once the layer is in its slot, all within the engine's own memory."""
        return Copy(self.target, self.source if self.slot is None else self.slot, is_own=True)


class Filled(NamedTuple):
    """How copies have been made."""

    streamed: int
    """Layers that were copied as steps had them in their slots."""
    fetched: int
    """Layers that were copied from where engines keep them."""
    copying_seconds: float
    comparing_seconds: float


class Filling:
    """The copies of one change to whole weights: each layer's are begun once.

    Args:
        layers: the parts of each layer, in the order in which they are fetched.
        patience: see ``PATIENCE_SECONDS``.
        clock: seconds.
    """

    def __init__(
        self,
        layers: Mapping[int, Sequence[Part]],
        patience: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._layers, self._left = layers, dict(layers)
        self._patience, self._clock = patience, clock
        self._started: list[Any] = []
        """What ``Copier.start`` has returned for each layer that was streamed."""
        self._is_given_up = False
        self._changed = threading.Condition()
        """Is held while any of these is used."""
        self._finishing = threading.Lock()
        self._device = next(iter(layers.values()))[0].target.device
        self._beside = _beside(self._device)

    def stream(self, layer: int, copier: Copier) -> Any:
        """Begin to copy a layer of which all that DP streams is in its slot.

        Args:
            layer: the layer's number.
            copier: of the slots; the layer is in its slot for what is begun now.

        Returns:
            What to wait for before the slot is filled anew; None: the layer's copies were begun
            before.
        """
        with self._changed:
            parts = self._left.pop(layer, None)
            if parts is None:
                return None
            started = copier.start([part.copy for part in parts])
            self._started.append(started)
            self._changed.notify_all()
        return started

    def finish(self, copier: Copier) -> Filled:
        """Copy what no step streams, and compare all copies; in any thread.

        Args:
            copier: which ``stream`` is given.

        Raises:
            ValueError: a copy differs from what its engine keeps, or all has been given up.
        """
        with self._finishing, self._beside, torch.inference_mode():
            times = [self._clock()]
            self._await_steps()
            fetched = self._fetch_rest()
            for started in self._started:
                copier.finish(started)
            times.append(self._clock())
            self._compare()
            times.append(self._clock())
        return Filled(len(self._started), fetched, times[1] - times[0], times[2] - times[1])

    def give_up(self) -> None:
        """Begin no further copy; copies that ``finish`` has begun are over when this returns."""
        with self._changed:
            self._is_given_up = True
            self._left.clear()
            self._changed.notify_all()
        with self._finishing:
            pass

    def _await_steps(self) -> None:
        """Wait as long as steps stream layers of which there are no copies yet."""
        with self._changed:
            while self._left:
                before = len(self._left)
                if not self._changed.wait(self._patience) and len(self._left) == before:
                    return

    def _fetch_rest(self) -> int:
        """Copy the other layers from where they are kept; return how many there were."""
        fetched = 0
        while layers := self._claim():
            for part in (part for layer in layers for part in layer):
                part.target.copy_(part.source)
            if self._device.type != "cpu":
                torch.cuda.current_stream(self._device).synchronize()
            fetched += len(layers)
        return fetched

    def _claim(self) -> list[Sequence[Part]]:
        with self._changed:
            self._check()
            return [self._left.pop(layer) for layer in list(islice(self._left, _FETCHED))]

    def _check(self) -> None:
        if self._is_given_up:
            raise ValueError("the change of memory has been given up")

    def _compare(self) -> None:
        layers = iter(self._layers.values())
        while batch := list(islice(layers, _COMPARED)):
            self._check()
            _compare([part for layer in batch for part in layer])


def rehearse(parts: Sequence[Part]) -> None:
    """Compare parts while no step runs, on a stream like that of a change.

    A GPU loads a kernel when it is first used, and that may hold steps up. In the first change
    after the start of two H200s, one engine stood still for 220 ms longer than in the second.
    PyTorch puts many results together by other kernels than a few, so the parts have to be as many
    as in a change.

    Args:
        parts: one or more; their targets may be where their engine keeps them.

    Raises:
        ValueError: one is not what its engine has taken the checksum of.
    """
    with _beside(parts[0].target.device), torch.inference_mode():
        _compare(parts)


def _compare(parts: Sequence[Part]) -> None:
    """Wait until the device has looked at all parts."""
    differ = torch.stack([_differs(part) for part in parts]).tolist()
    if any(differ):
        name = parts[differ.index(True)].name
        raise ValueError(f"{name} has another checksum than where its engine keeps it")


def _differs(part: Part) -> torch.Tensor:
    """Return whether a copy is another one, as a tensor: the device may not have looked yet."""
    return checksum(part.target) != part.checksum


def _beside(device: torch.device) -> AbstractContextManager[Any]:
    """On GPUs, return a stream beside steps, which is after all that this thread has begun."""
    if device.type == "cpu":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    beside: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return beside
