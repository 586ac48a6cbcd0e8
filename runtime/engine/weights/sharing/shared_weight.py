"""One weight that engines share: how it is divided, and how a part is loaded."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shoal.runtime.engine.weights.sharing.nested_order import Order, nested_shard

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""vLLM's names of the layers of MLPs whose weights are shared."""
QKV, OUTPUT = "qkv_proj", "o_proj"
"""The same for attention."""
EMBEDDING, HEAD = "embed_tokens", "lm_head"
"""The same for the vocabulary: a part has the rows of some tokens."""
BY_INPUTS = (DOWN, OUTPUT)
"""Of which a part has some of the inputs."""
_NAMES = {"q": 0, "k": 1, "v": 2}
"""What vLLM calls the three parts of ``QKV``."""
ALIGNMENT = 256
"""Each weight begins at a multiple of so many bytes, as kernels like it."""
WORD, _CHUNK = 8, 4096
"""Bytes of what a checksum adds up, and of what has a place in it."""


class Degree(NamedTuple):
    """Into how many parts a weight is divided, and how its first dimension is grouped."""

    parts: int
    """How many engines share the weights, each keeping one part."""
    groups: int
    """Groups of the rows of ``gate_up_proj`` (``fused``): a multiple of the parts."""


@dataclass
class SharedWeight:
    """One weight of which this engine keeps a part: of an MLP, experts, attention or vocabulary.

    Attributes:
        layer: number of the layer in the model, that is of what is in a slot at a time.
        kind: ``GATE_UP``, ``DOWN``, ``QKV``, ``OUTPUT``, ``EMBEDDING`` or ``HEAD``; of experts the
            name of a tensor, of which each expert has a row (``shared_experts``).
        shape: of the whole weight, ``[outputs, inputs]``, or ``[experts, elements of one]``.
        degree: how it is divided.
        own: which part this engine keeps (``nested_order``).
        begin: where the part begins in the engine's memory, in bytes.
        packed: whether each part of ``BY_INPUTS`` is a matrix of its own, with the outputs as rows,
            as FP8 kernels need it; parts are one after the other. If not, the inputs are rows.
        order: which part each engine keeps.
        sections: outputs of each matrix of the whole weight: of gate and up, or of queries, keys
            and values. Empty: the kind says all.
        checksum_at: where the part's checksum is in the engine's memory, in bytes; None: behind
            the part.
    """

    layer: int
    kind: str
    shape: tuple[int, int]
    dtype: torch.dtype
    degree: Degree
    own: int
    begin: int
    packed: bool = False
    order: Order = nested_shard
    sections: tuple[int, ...] = ()
    checksum_at: int | None = None
    kept: torch.Tensor | None = None
    """This engine's part as it is stored, once there is memory for it."""
    was_filled: bool = False
    """Whether this memory came filled, and so cannot be written."""
    missing: set[int] = field(default_factory=set)
    """What of the part is still to be loaded: 0, of gate_up gate (0) and up (1), of QKV three."""

    @property
    def is_by_inputs(self) -> bool:
        """Whether a part has some of the inputs; others have some of the outputs."""
        return self.kind in BY_INPUTS

    @property
    def holders(self) -> list[int]:
        """The places of the engines that keep the parts, the first part's first."""
        places = range(self.degree.parts)
        return sorted(places, key=lambda place: self.order(place, self.degree.parts))

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

        Each part is a range of rows. The inner units of the MLP, or of the heads, are the rows. So
        ``down_proj`` and ``o_proj`` are stored transposed, unless they are ``packed``. A part of
        ``qkv_proj`` has its queries, then its keys, then its values.
        """
        columns = self.shape[0] if self.is_by_inputs else self.shape[1]
        if self._has_packed_parts:
            columns = self.shape[1] // self.degree.parts
        return memory.view(self.dtype).view(-1, columns)

    @property
    def _has_packed_parts(self) -> bool:
        return self.packed and self.is_by_inputs

    def of_layer(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what is stored as the layer has it: ``[outputs, inputs]``.

        If parts are ``packed``, what has several of them has only the shape of a weight.
        """
        if self._has_packed_parts:
            return stored.view(self.shape[0], -1)
        return stored.t() if self.is_by_inputs else stored

    @property
    def kept_bytes(self) -> int:
        """Bytes from the beginning of the part to the end of its checksum, which is behind it."""
        return self._checksum_begin + WORD

    @property
    def _checksum_begin(self) -> int:
        if self.checksum_at is not None:
            return self.checksum_at - self.begin
        return -(-self.part_bytes // WORD) * WORD

    def bytes_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return an engine's part, uint8, as a view of that engine's memory, uint8."""
        return memory[self.begin : self.begin + self.part_bytes]

    def checksum_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the checksum of an engine's part, int64, as a view of its memory, uint8."""
        begin = self.begin + self._checksum_begin
        return memory[begin : begin + WORD].view(torch.int64)[0]

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
        self.missing = set() if filled else set(range(len(self._targets())))

    def _targets(self) -> list[torch.Tensor]:
        """Return where the tensors of the checkpoint come to lie, as views of what is kept."""
        assert self.kept is not None, "there is no memory for it yet"
        if self.is_by_inputs or self.kind not in (GATE_UP, QKV):
            return [self.kept]
        if self.kind == QKV:
            return list(self.kept.split([size // self.degree.parts for size in self.sections]))
        pairs = self.kept.view(self.degree.groups // self.degree.parts, 2, -1, self.shape[1])
        return list(pairs.unbind(1))

    def load(self, loaded: torch.Tensor, half: Any = None) -> None:
        """Take this engine's part of a tensor of the checkpoint.

        Args:
            loaded: what the checkpoint has of it whole, as stored: all, or a half or section.
            half: 0 for gate and 1 for up, or "q", "k" or "v"; anything else: all of the weight.
        """
        targets = self._targets()
        if self.is_by_inputs:
            own = self.within(loaded.t(), self.own, self.degree.parts)
            self._take(0, targets[0], own.t() if self.packed else own)
            return
        number = _NAMES.get(half, half)
        rows = [loaded]
        if number not in range(len(targets)):
            number, rows = 0, list(loaded.split(self.sections or loaded.shape[0] // 2))
        for each, some in enumerate(rows, number):
            own = self.within(some, self.own, self.degree.parts)
            self._take(each, targets[each], own.reshape(targets[each].shape))

    def load_rows(self, loaded: torch.Tensor, first: int) -> None:
        """Take adjacent rows of a tensor of the checkpoint; where it has none, there are zeros.

        Args:
            loaded: what the checkpoint has, a row for each token.
            first: which row is the first of what this engine keeps.
        """
        (target,) = self._targets()
        if self.missing:  # see ``_take``
            rows = loaded[first : first + len(target)]
            target[: len(rows)].copy_(rows)
            target[len(rows) :].zero_()
            self.missing = set()

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
    words = part.view(torch.int64) if chunk % WORD == 0 else part
    sums = words.view(-1, chunk // words.element_size()).sum(1, dtype=torch.int64)
    places = torch.arange(1, 2 * sums.numel(), 2, device=part.device)
    return (sums * places).sum()
