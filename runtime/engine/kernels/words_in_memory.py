"""What the Triton kernels have in common that go to memory by its address, word by word.

Importing this module imports Triton, which only CUDA (or Triton's interpreter) has a use for.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import triton
import triton.language as tl


def one_form(kernel: Callable[..., None]) -> Any:
    """Return a kernel that is compiled once for each set of its ``tl.constexpr`` parameters.

    Triton would compile it again for numbers that are 1 or multiples of 16.
    """
    parameters = signature(kernel).parameters.values()
    numbers = [each.name for each in parameters if each.annotation is not tl.constexpr]
    return triton.jit(kernel, do_not_specialize=numbers)


@triton.jit
def words(address):  # type: ignore[no-untyped-def]
    """Return a pointer to the word at an address, which may be small enough for four bytes."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))
