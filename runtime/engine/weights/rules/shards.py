"""Which part of a layer's tensors a tensor parallel rank reads: ranges of outputs and of inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch


class UnviewableWeights(ValueError):
    """A layer whose weights another layout cannot view; the message names it."""


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put the layer's name before the message of an error in it."""
    try:
        yield
    except UnviewableWeights as error:
        raise UnviewableWeights(f"{name.lstrip('.')}: {error}") from error


class Shard(NamedTuple):
    """One of the equal shares into which a layout divides what a layer computes."""

    rank: int
    """Number of this share, from 0."""
    of: int
    """How many shares there are."""

    def cut(self, size: int) -> tuple[int, int]:
        """Return where this share of ``size`` outputs or inputs begins, and how many it has."""
        share = size // self.of
        return self.rank * share, share


@dataclass(frozen=True)
class Axes:
    """Which dimensions of a tensor are the outputs and the inputs of its linear layer.

    Attributes:
        outputs: dimension that runs over the outputs; None if all outputs share the tensor.
        inputs: the same for the inputs.
        output_block: outputs that one element stands for, as in block-wise scales.
        input_block: inputs that one element stands for.
    """

    outputs: int | None = None
    inputs: int | None = None
    output_block: int = 1
    input_block: int = 1

    def take_outputs(self, tensor: torch.Tensor, begin: int, size: int) -> torch.Tensor:
        """Return the view of ``size`` outputs from ``begin``.

        Raises:
            UnviewableWeights: the range cuts through a block.
        """
        return _narrow(tensor, self.outputs, begin, size, self.output_block)

    def take_inputs(self, tensor: torch.Tensor, begin: int, size: int) -> torch.Tensor:
        """Return the view of ``size`` inputs from ``begin``.

        Raises:
            UnviewableWeights: the range cuts through a block.
        """
        return _narrow(tensor, self.inputs, begin, size, self.input_block)


def _narrow(
    tensor: torch.Tensor, dimension: int | None, begin: int, size: int, block: int
) -> torch.Tensor:
    if dimension is None:
        return tensor
    if begin % block or size % block:
        raise UnviewableWeights(
            f"a shard of {size} does not consist of whole quantisation blocks of {block}"
        )
    return tensor.narrow(dimension, begin // block, size // block)
