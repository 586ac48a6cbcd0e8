import torch
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

from shoal.runtime.engine.layouts.cpu_speculation import expand

TEMPERATURES = torch.tensor([0.5, 0.0, 2.0, 0.7])
ENDS = torch.tensor([2, 5, 5, 6], dtype=torch.int32)
OF_DRAFTS = [0.5, 0.5, 1.0, 1.0, 1.0, 0.7]
"""Greedy requests, of temperature 0, have 1 where everything is divided by it."""

_vllms = cpu_triton_utils._expand_kernel_impl


def test_each_draft_has_the_temperature_of_its_request() -> None:
    """As vLLM calls what stands for a kernel: with the kernel's own arguments, by name."""
    stand_in = KernelOverride(rejection_sampler.expand_kernel, expand)
    output = torch.full([6], -3.0)
    values = (output, TEMPERATURES, ENDS, 0, 1, 16)
    stand_in[4,](**dict(zip(stand_in.arg_names, values, strict=True)))
    torch.testing.assert_close(output, torch.tensor(OF_DRAFTS))


def test_vllms_own_function_still_writes_to_a_copy() -> None:
    """If this fails, vLLM was mended, and ours can go."""
    output = torch.full([6], -3.0)
    _vllms(output, TEMPERATURES, ENDS, 0, 1)
    assert output.tolist() == [-3.0] * 6
