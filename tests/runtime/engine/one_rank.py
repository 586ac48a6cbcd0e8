"""vLLM's layers as one rank of a tensor parallel group that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import vllm.distributed
import vllm.model_executor.layers.fused_moe.config as experts_config
import vllm.model_executor.layers.fused_moe.layer as experts
import vllm.model_executor.layers.linear as linear
import vllm.model_executor.layers.vocab_parallel_embedding as vocab
import vllm.model_executor.parameter as parameter


@contextmanager
def tensor_parallel(rank: int, degree: int) -> Iterator[None]:
    """Let vLLM's layers believe that they are rank ``rank`` of ``degree``."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (linear, vocab, parameter, vllm.distributed, experts, experts_config):
            names = {"rank": rank, "world_size": degree}
            for name, value in names.items():
                function = f"get_tensor_model_parallel_{name}"
                if hasattr(module, function):
                    patch.setattr(module, function, lambda found=value: found)
        yield


def ranks(*degrees: int) -> list[tuple[int, int]]:
    """Return every (rank, degree) of some degrees."""
    return [(rank, degree) for degree in degrees for rank in range(degree)]
