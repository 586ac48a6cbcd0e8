"""vLLM's layers as one rank of a tensor parallel group that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import vllm.distributed
import vllm.model_executor.layers.linear as linear
import vllm.model_executor.layers.vocab_parallel_embedding as vocab
import vllm.model_executor.parameter as parameter


@contextmanager
def tensor_parallel(rank: int, degree: int) -> Iterator[None]:
    """Let vLLM's layers believe that they are rank ``rank`` of ``degree``."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (linear, vocab, parameter, vllm.distributed):
            patch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: degree)
        yield


def ranks(*degrees: int) -> list[tuple[int, int]]:
    """Return every (rank, degree) of some degrees."""
    return [(rank, degree) for degree in degrees for rank in range(degree)]
