"""vLLM's ``AsyncLLM``, which checks grammar, log probabilities and images of a request first."""

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache.base import MultiModalCache
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from shoal.server.frontend.grammar_queue import FIRST_SECONDS, QueueFullError
from shoal.server.frontend.grammars import GrammarCheck
from shoal.server.gate.bounds import BoundsError
from shoal.server.gate.placement import Placements
from shoal.server.rejections import Refused


class CheckedAsyncLLM(AsyncLLM):  # type: ignore[misc]
    """vLLM's ``AsyncLLM`` with checks of requests, and with metrics for each engine.

    Args:
        grammars: checks grammars.
        placements: the HTTP requests in progress; the reason of a refusal is noted there.
        image_bytes: the most bytes of what a request's images are for the encoder.
        options: ``AsyncLLM``'s own.
    """

    def __init__(
        self, grammars: GrammarCheck, placements: Placements, image_bytes: int, **options: Any
    ) -> None:
        super().__init__(**options)
        self._grammars = grammars
        self._placements = placements
        self._image_bytes = image_bytes

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *rest: Any, **more: Any
    ) -> Any:
        """Add a request as vLLM does, if its grammar and its log probabilities are within bounds.

        The grammar is checked in the sandbox first: vLLM would validate it in the event loop.
        """
        constraint = getattr(params, "structured_outputs", None)
        try:
            if isinstance(prompt, dict):
                self._count_logprobs(params, len(prompt.get("prompt_token_ids") or ()))
                self._count_bytes(prompt.get("mm_kwargs") or {}, getattr(params, "n", 1))
            if constraint is not None:
                await self._grammars.check(self._placements.holder, constraint)
            return await super().add_request(request_id, prompt, params, *rest, **more)
        except VLLMValidationError as error:
            self._placements.refuse(Refused(400, str(error)))
            raise
        except QueueFullError as error:
            self._placements.refuse(Refused(429, str(error), FIRST_SECONDS))
            raise VLLMValidationError(str(error), parameter="structured_outputs") from error

    def _count_logprobs(self, params: Any, prompt_tokens: int) -> None:
        placement = self._placements.current
        if placement is not None and placement.logprobs is not None:
            try:
                placement.logprobs.take(params, prompt_tokens)
            except BoundsError as error:
                raise VLLMValidationError(str(error), parameter=error.param) from None

    def _count_bytes(self, images: Mapping[str, Any], answers: int) -> None:
        size = MultiModalCache.get_item_size(images) * answers if images else 0
        if size > self._image_bytes:
            most = f"at most {self._image_bytes} are allowed (--max-image-bytes)"
            message = f"the images are {size} bytes for the encoder, {most}"
            raise VLLMValidationError(message, parameter="messages")

    def count_per_engine(self, engines: int, *, aggregate: bool) -> None:
        """Label metrics with the engine that leads the unit of a step, not with one engine core.

        Args:
            engines: number of engines.
            aggregate: whether vLLM logs one line for all of them.
        """
        if self.log_stats:
            self.logger_manager: Any = StatLoggerManager(
                vllm_config=self.vllm_config,
                engine_idxs=list(range(engines)),
                client_count=self._client_count,
                aggregate_engine_logging=aggregate,
            )
            self.logger_manager.log_engine_initialized()
            for engine in range(engines):  # prometheus_client hides gauges that were never set
                self.logger_manager.record(SchedulerStats(), None, engine_idx=engine)
            # The output handler runs already, and looks here for the loggers.
            self._logger_ref[0] = self.logger_manager
