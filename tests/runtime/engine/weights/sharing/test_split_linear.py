"""A product with a weight of which one part is kept elsewhere."""

import pytest
import torch

from shoal.runtime.engine.weights.sharing.split_linear import INPUTS, OUTPUTS, split_linear

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(12, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("begin", [0, 2, 6])
@pytest.mark.parametrize("dimension", [OUTPUTS, INPUTS])
def test_it_is_the_product_with_the_whole_weight(
    dimension: int, begin: int, compiled: bool
) -> None:
    own = WEIGHT.narrow(dimension, begin, 2).clone()
    slot = WEIGHT.clone()
    slot.narrow(dimension, begin, 2).fill_(float("nan"))  # what other layers have left there

    def product(x: torch.Tensor) -> torch.Tensor:
        return split_linear(x, slot, own, begin, dimension)

    given = torch.compile(product, backend="eager", fullgraph=True) if compiled else product
    torch.testing.assert_close(given(X), X @ WEIGHT.t())
