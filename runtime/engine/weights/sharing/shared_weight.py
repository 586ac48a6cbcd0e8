"""One weight of an MLP that engines share: how it is divided, and how a part is loaded."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""vLLM's names of the layers whose weights are shared."""
ALIGNMENT = 256
"""Each weight begins at a multiple of so many bytes, as kernels like it."""
_WORD, _CHUNK = 8, 4096
"""Bytes of what a checksum adds up, and of what has a place in it."""


class Degree(NamedTuple):
    """Into how many parts a weight is divided, and how its first dimension is grouped."""

    parts: int
    """How many engines share the weights, each keeping one part."""
    groups: int
    """Groups of the rows of ``gate_up_proj`` (``fused``): a multiple of the parts."""


@dataclass
class SharedWeight:
    """One weight of an MLP, of which this engine keeps a part.

    Attributes:
        layer: number of the MLP in the model.
        kind: ``GATE_UP`` or ``DOWN``.
        shape: of the whole weight, ``[outputs, inputs]``.
        degree: how it is divided.
        own: which part this engine keeps (``nested_order``).
        begin: where the part begins in the engine's memory, in bytes.
        packed: whether each part of ``DOWN`` is a matrix of its own, with the outputs as rows, as
            FP8 kernels need it; parts are one after the other. If not, the inner units are rows.
    """

    layer: int
    kind: str
    shape: tuple[int, int]
    dtype: torch.dtype
    degree: Degree
    own: int
    begin: int
    packed: bool = False
    kept: torch.Tensor | None = None
    """This engine's part as it is stored, once there is memory for it."""
    was_filled: bool = False
    """Whether this memory came filled, and so cannot be written."""
    missing: set[int] = field(default_factory=set)
    """What of the part is still to be loaded: 0, of gate_up gate (0) and up (1)."""

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole weight."""
        return self.shape[0] * self.shape[1] * int(self.dtype.itemsize)

    @property
    def part_bytes(self) -> int:
        """Bytes of the part that an engine keeps."""
        return self.whole_bytes // self.degree.parts

    def stored(self, memory: torch.Tensor) -> torch.Tensor:
        """Return some parts as they are stored, ``[rows, columns]``, as a view of memory, uint8.

        Each part is a range of rows. The inner units of the MLP are the rows, so those of
        ``down_proj`` are stored transposed, unless they are ``packed``.
        """
        columns = self.shape[1] if self.kind == GATE_UP else self.shape[0]
        if self._has_packed_parts:
            columns = self.shape[1] // self.degree.parts
        return memory.view(self.dtype).view(-1, columns)

    @property
    def _has_packed_parts(self) -> bool:
        return self.packed and self.kind == DOWN

    def of_layer(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what is stored as the layer has it: ``[outputs, inputs]``.

        If parts are ``packed``, what has several of them has only the shape of a weight.
        """
        if self._has_packed_parts:
            return stored.view(self.shape[0], -1)
        return stored if self.kind == GATE_UP else stored.t()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the part and of its checksum, which an engine keeps behind it."""
        return self._checksum_begin + _WORD

    @property
    def _checksum_begin(self) -> int:
        return -(-self.part_bytes // _WORD) * _WORD

    def bytes_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return an engine's part, uint8, as a view of that engine's memory, uint8."""
        return memory[self.begin : self.begin + self.part_bytes]

    def checksum_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the checksum of an engine's part, int64, as a view of its memory, uint8."""
        begin = self.begin + self._checksum_begin
        return memory[begin : begin + _WORD].view(torch.int64)[0]

    def keep_checksum(self, memory: torch.Tensor) -> None:
        """Write the checksum of this engine's part, which is complete, to its memory, uint8."""
        self.checksum_in(memory).copy_(checksum(self.bytes_in(memory)))

    def part_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return an engine's part as it is stored, as a view of that engine's memory, uint8."""
        return self.stored(self.bytes_in(memory))

    def within(self, stored: torch.Tensor, part: int, parts: int) -> torch.Tensor:
        """Return one of so many equal parts of rows."""
        size = stored.shape[0] // parts
        return stored.narrow(0, part * size, size)

    def keep_in(self, memory: torch.Tensor, *, filled: bool) -> None:
        """Keep this engine's part in its memory, uint8, which may hold it already."""
        self.kept, self.was_filled = self.part_in(memory), filled
        self.missing = set() if filled else set(range(2 if self.kind == GATE_UP else 1))

    def load(self, loaded: torch.Tensor, half: Any = None) -> None:
        """Take this engine's part of a tensor of the checkpoint.

        Args:
            loaded: gate, up or down whole, as stored; or gate and up in one tensor.
            half: 0 for gate and 1 for up; anything else: all of the weight.
        """
        assert self.kept is not None, "there is no memory for it yet"
        if self.kind == DOWN:
            own = self.within(loaded.t(), self.own, self.degree.parts)
            self._take(0, self.kept, own.t() if self.packed else own)
            return
        halves = {half: loaded} if half in (0, 1) else dict(enumerate(loaded.chunk(2)))
        pairs = self.kept.view(self.degree.groups // self.degree.parts, 2, -1, self.shape[1])
        for number, rows in halves.items():
            own = self.within(rows, self.own, self.degree.parts)
            self._take(number, pairs[:, number], own.reshape(pairs[:, number].shape))

    def make_up(self, fill: Callable[[torch.Tensor], None]) -> None:
        """Fill what is missing with made-up values."""
        if self.missing and self.kept is not None:
            fill(self.kept)
            self.missing = set()

    def _take(self, number: int, target: torch.Tensor, source: torch.Tensor) -> None:
        if number in self.missing:  # else it is there, perhaps in memory that cannot be written
            target.copy_(source)
            self.missing.discard(number)


def checksum(part: torch.Tensor) -> torch.Tensor:
    """Return a checksum of bytes, int64, as a tensor.

    It is the sum of all words, each times an odd number that tells the place of its chunk of 4 KiB.
    So it is another one if one word is another one, or if chunks have changed places. It does not
    see words of one chunk that have changed places, and of many changes at random it misses one in
    2**64.

    Args:
        part: uint8; it begins at a multiple of a word.
    """
    chunk = math.gcd(part.numel(), _CHUNK)
    words = part.view(torch.int64) if chunk % _WORD == 0 else part
    sums = words.view(-1, chunk // words.element_size()).sum(1, dtype=torch.int64)
    places = torch.arange(1, 2 * sums.numel(), 2, device=part.device)
    return (sums * places).sum()
