"""What tests multiply FP8 values with is what torch's operator computes."""

import pytest
import torch

from tests.runtime.engine.exact_products import scaled_mm


@pytest.mark.parametrize("by_rows", [False, True])
def test_products_are_those_of_torchs_operator(by_rows: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, 64, generator=draw) for size in (16, 32))
    shapes = ((16, 1), (1, 32)) if by_rows else ((1,), (1,))
    scale_a, scale_b = (torch.rand(shape, generator=draw) for shape in shapes)
    given = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    scales = {"scale_a": scale_a, "scale_b": scale_b}

    found = scaled_mm(given[0], given[1].t(), out_dtype=torch.float32, **scales)

    plain = (given[0].float() @ given[1].float().t()) * scale_a * scale_b
    torch.testing.assert_close(found, plain)
    if not by_rows:  # torch has no others on CPUs
        expected = torch._scaled_mm(given[0], given[1].t(), out_dtype=torch.float32, **scales)
        torch.testing.assert_close(found, expected)
