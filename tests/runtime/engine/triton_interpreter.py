"""Importing this before vLLM makes vLLM take Triton's interpreter for a CPU backend of Triton.

vLLM looks for an active backend when it is imported, and offers the V2 model runner only with one.
Afterwards the backend is taken away again: PyTorch must not compile for it.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from triton.backends import backends

_driver = SimpleNamespace(is_active=lambda: True)
backends["cpu"] = SimpleNamespace(driver=_driver, compiler=None)

import vllm.triton_utils  # noqa: E402 - after the backend is there

assert vllm.triton_utils.HAS_TRITON
del backends["cpu"]

from tests.runtime.engine import quick_interpreter  # noqa: E402 - it imports Triton

quick_interpreter.be_quick(find_overflows=False)  # the kernels are vLLM's
