"""Requests with a seed whose prompt is computed in parts, on CPUs.

A step samples a token for every request, also for one whose prompt goes on in the next step. vLLM
throws that token away and rewinds the request's generator (``GPUModelRunner._bookkeeping_sync``).
CPU generators refuse that with an error, and the engine would die of such a request.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from vllm.platforms import current_platform

_NOTHING = nullcontext()


def thrown_away_unseeded(model_runner: Any) -> AbstractContextManager[None]:
    """While entered, let tokens that are thrown away come from no request's own generator.

    So nothing has to be rewound. Only on CPUs; V2 model runners have no such generators.
    """
    if not current_platform.is_cpu():
        return _NOTHING
    batch: Any = getattr(model_runner, "input_batch", None)
    return _put_aside(model_runner) if getattr(batch, "generators", None) else _NOTHING


@contextmanager
def _put_aside(model_runner: Any) -> Iterator[None]:
    batch = model_runner.input_batch
    generators = batch.generators
    thrown_away = model_runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    aside = {index: generators.pop(index) for index in thrown_away if index in generators}
    try:
        yield
    finally:
        generators.update(aside)
