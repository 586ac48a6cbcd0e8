"""What vLLM's platform for CPUs needs so that several layouts of a process can speculate.

Where there is no Triton, vLLM replaces Triton's kernels by functions of ``cpu_triton_utils``.
"""

import functools

import torch
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils


@functools.cache
def speculate_on_cpus() -> None:
    """Mend two things of vLLM, before a process makes its first worker.

    vLLM replaces the kernels for each worker, and looks for them in all modules that are loaded. It
    fails to look into one of numba's, which the n-grams of the first worker have loaded; but they
    are replaced already when the second worker is made. And one function writes its result to a
    copy: temperatures of drafts, which are then whatever was in that memory.
    """
    cpu_triton_utils._expand_kernel_impl = expand
    replace = current_platform.register_triton_kernel_overrides
    current_platform.register_triton_kernel_overrides = functools.cache(replace)


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    most_tokens: int = 0,  # noqa: ARG001 - vLLM passes all arguments of the kernel, in its order
) -> None:
    """Repeat each request's value for each of its tokens (``rejection_sampler.expand_kernel``).

    Args:
        output: ``[tokens]``, written to.
        values: ``[requests]``.
        ends: ``[requests]``, how many tokens all requests up to this one have.
        replace_from: a value that stands for another.
        replace_to: what it stands for.
        most_tokens: of a request.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    meant = torch.where(values == replace_from, replace_to, values)
    output.copy_(meant.repeat_interleave(counts))
