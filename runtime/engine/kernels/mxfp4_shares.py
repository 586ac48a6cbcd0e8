"""Shares of each expert in MXFP4: the part that some inner features have of what is packed for all.

An inner feature is a gate row and an up row of ``w13``, which a checkpoint has in turn, and a
column of ``w2``. The order of bytes for Hopper keeps tiles of ``w13``'s rows and of ``w2``'s
columns together (``HopperMXValueLayout`` and ``HopperMXScaleLayout`` of ``triton_kernels``): 16
rows and 64 columns of values, 256 rows and 64 columns of scales. So what is packed of 128 features
is a range of one dimension, and the kernel reads it by its strides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch.nn import Parameter

from shoal.runtime.served_weights import HOPPER_MXFP4_UNIT, STORED_MXFP4_UNIT

Packed = Any
"""A tensor of all experts of a layer, or a ``triton_kernels.tensor.Tensor`` around one."""


@dataclass(frozen=True)
class Cut:
    """Where the inner features are in what one tensor of a layer is packed to.

    Attributes:
        dimension: the one that runs over them.
        elements: its elements for one feature.
        whole: its elements are padded to a multiple of these.
        shown: like ``elements``, of the shape that ``triton_kernels`` shows of a packed tensor.
        shown_whole: like ``whole``, of that shape.
    """

    dimension: int
    elements: Fraction
    whole: int = 1
    shown: Fraction = Fraction(0)
    shown_whole: int = 1

    def take(self, packed: Packed, features: range) -> Packed:
        """Return the view of some features; padding behind the last ones is part of it."""
        begin = int(features.start * self.elements)
        data = packed if isinstance(packed, torch.Tensor) else packed.storage.data
        length = _multiple(len(features) * self.elements, self.whole)
        view = data.data.narrow(self.dimension, begin, length)
        if isinstance(packed, torch.Tensor):
            return Parameter(view, requires_grad=False)
        shape, most = list(packed.shape), list(packed.shape_max)
        of_features = _multiple(len(features) * self.shown, self.shown_whole)
        shape[self.dimension] = most[self.dimension] = of_features
        storage = replace(packed.storage, data=view)
        return replace(packed, storage=storage, shape=shape, shape_max=most)


def _multiple(size: Fraction, of: int) -> int:
    return -(-size // of) * of


@dataclass(frozen=True)
class Cuts:
    """How the tensors of a layer can be divided among a group's members.

    Attributes:
        unit: a share begins at a multiple of so many features.
        of: the tensors that are divided.
    """

    unit: int
    of: Mapping[str, Cut]

    def share(self, features: int, rank: int, members: int) -> range:
        """Return the features of a member; none if there are fewer units than members."""
        units = -(-features // self.unit)
        begin, end = (of * units // members * self.unit for of in (rank, rank + 1))
        return range(begin, min(end, features))


AS_STORED = Cuts(
    unit=STORED_MXFP4_UNIT,
    of={
        "w13_weight": Cut(1, Fraction(2)),
        "w13_weight_scale": Cut(1, Fraction(2)),
        "w13_bias": Cut(1, Fraction(2)),
        "w2_weight": Cut(2, Fraction(1, 2)),
        "w2_weight_scale": Cut(2, Fraction(1, 32)),
    },
)
"""As a checkpoint has them: two values in a byte, and a scale for 32 values."""

FOR_HOPPER = Cuts(
    unit=HOPPER_MXFP4_UNIT,
    of={
        "w13_weight": Cut(2, Fraction(1, 2), shown=Fraction(2)),
        "w13_weight_scale": Cut(2, Fraction(1, 16), 8, shown=Fraction(2)),
        "w13_bias": Cut(1, Fraction(2)),
        "w2_weight": Cut(1, Fraction(2), shown=Fraction(1)),
        "w2_weight_scale": Cut(1, Fraction(1), 128, shown=Fraction(1, 32), shown_whole=4),
    },
)
"""As ``_swizzle_mxfp4`` of vLLM 0.32 packs them on Hopper, with ``triton_kernels`` 3.5.1.

It pads ``w13``'s scales to 256 rows, and those of ``w2`` to 128 columns.
"""
