"""FP8 products on CPUs, in place of those of torch.

On many CPUs torch has only slow reference code for them, with which a prompt of some 100 tokens
takes seconds.
"""

import torch


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """What torch's operator does, which many CPUs have only as slow reference code.

    In 64 bits sums of products of FP8 values are exact, so their order does not matter.
    """
    product = (a.double() @ b.double()) * scale_a * scale_b.view(-1)
    return (product if bias is None else product + bias).to(out_dtype)


def multiply_exactly() -> None:
    """Let this process, and those that are forked from it, multiply so."""
    # vLLM's attention uses AMX, which torch's own product would have asked the kernel for.
    torch.cpu._init_amx()
    torch._scaled_mm = scaled_mm
