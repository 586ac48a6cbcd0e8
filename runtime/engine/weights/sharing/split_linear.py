"""Linear layers of which an engine keeps a part: its own part is used where it is kept.

Copying it into the slot beside what comes from peers would take as much of the memory's bandwidth
as they do, and more. ``torch.compile`` sees one opaque operator.
"""

from collections.abc import Iterator

import torch

_OPERATOR = "shoal::split_linear"
OUTPUTS, INPUTS = 0, 1
"""Dimensions of a weight, ``[outputs, inputs]``, along which it may be divided."""

torch.library.define(
    _OPERATOR, "(Tensor x, Tensor slot, Tensor own, int begin, int dimension) -> Tensor"
)


def split_linear(
    x: torch.Tensor, slot: torch.Tensor, own: torch.Tensor, begin: int, dimension: int
) -> torch.Tensor:
    """Return ``x @ weight.T``, ``[tokens, outputs]``, where a part of the weight is elsewhere.

    Args:
        x: ``[tokens, inputs]``.
        slot: room for the whole weight, ``[outputs, inputs]``; nothing is read of its part that is
            kept elsewhere.
        own: that part.
        begin: where in the weight it begins, in outputs or inputs.
        dimension: ``OUTPUTS`` or ``INPUTS``.
    """
    output: torch.Tensor = torch.ops.shoal.split_linear(x, slot, own, begin, dimension)
    return output


def _parts(
    slot: torch.Tensor, own: torch.Tensor, begin: int, dimension: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield where each part of the weight begins, and the part."""
    end = begin + own.shape[dimension]
    yield begin, own
    for first, last in ((0, begin), (end, slot.shape[dimension])):
        if last > first:
            yield first, slot.narrow(dimension, first, last - first)


def _compute(
    x: torch.Tensor, slot: torch.Tensor, own: torch.Tensor, begin: int, dimension: int
) -> torch.Tensor:
    output = x.new_empty(x.shape[0], slot.shape[0])
    for first, part in _parts(slot, own, begin, dimension):
        if dimension == OUTPUTS:
            torch.mm(x, part.t(), out=output.narrow(1, first, part.shape[0]))
            continue
        inputs = x.narrow(1, first, part.shape[1])
        if part is own:  # which comes first
            torch.mm(inputs, part.t(), out=output)
        else:
            output.addmm_(inputs, part.t())
    return output


# As a decorator it would leave None in the function's place.
torch.library.impl(_OPERATOR, "default", _compute)


@torch.library.register_fake(_OPERATOR)  # type: ignore[untyped-decorator]
def _empty(
    x: torch.Tensor,
    slot: torch.Tensor,
    own: torch.Tensor,  # noqa: ARG001 - the operator's signature
    begin: int,  # noqa: ARG001
    dimension: int,  # noqa: ARG001
) -> torch.Tensor:
    return x.new_empty(x.shape[0], slot.shape[0])
