"""Grammars of structured outputs: compiled in a process that can be killed, before an engine does.

vLLM compiles grammars in threads of the engine, and partly in the front end's event loop. A thread
cannot be ended: a schema that takes minutes keeps a core of the engine busy for as long. So every
grammar is first compiled once in a sandbox, with the engine's own code, and refused if that takes
too long. The verdict is remembered.
"""

import hashlib
import logging
import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import StructuredOutputRequest

from shoal.server.frontend.grammar_queue import Caller, GrammarQueue
from shoal.server.frontend.sandbox import RefusedError

REMEMBERED = 1024
"""How many grammars' verdicts are kept."""
MEMORY_BYTES = 2 << 30
"""Memory that one compilation may use."""
_FIELDS = (
    *("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    *("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
)
_XGRAMMAR = ("auto", "xgrammar")
_TRIVIAL = b'{"json_object": true}'


class GrammarCompiler:
    """Compiles grammars as vLLM's engine core does, in the calling thread.

    Args:
        vllm_config: vLLM's configuration of the engine.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._manager: Any = None

    def prepare(self) -> None:
        """Read the tokenizer's vocabulary, which takes longer than most grammars."""
        # The client is told what is wrong with a grammar, so the log need not say it.
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        self._manager = StructuredOutputManager(self._config)
        self._manager._use_async_grammar_compilation = False
        if self._config.structured_outputs_config.backend in _XGRAMMAR:
            self._manager.backend = XgrammarBackend(
                self._config,
                tokenizer=self._manager.tokenizer,
                vocab_size=self._config.model_config.get_vocab_size(),
            )
            self(_TRIVIAL)  # vLLM imports its backends when it validates

    def __call__(self, job: bytes) -> None:
        """Compile the grammar of a job that ``encoded`` has made.

        Raises:
            ValueError: the grammar is not valid.
        """
        params = SamplingParams(
            structured_outputs=StructuredOutputsParams(**msgspec.json.decode(job))
        )
        params._validate_structured_outputs(
            self._config.model_config,
            self._config.structured_outputs_config,
            self._manager.tokenizer,
        )
        request = SimpleNamespace(
            request_id="",
            sampling_params=params,
            structured_output_request=StructuredOutputRequest.from_sampling_params(params),
        )
        if params.structured_outputs._backend not in _XGRAMMAR:
            self._manager.backend = None  # the manager makes the one that is asked for
        self._manager.grammar_init(request)
        outcome = request.structured_output_request.grammar
        if isinstance(outcome, Exception):
            raise ValueError(f"the grammar cannot be compiled: {outcome}")
        if not self._lets_begin(outcome):
            raise ValueError(
                "the grammar allows no text at all, for instance because it has no end"
            )

    def _lets_begin(self, grammar: Any) -> bool:
        """Return whether a token may come first: an engine fails a request that can have none."""
        allowed = self._manager.backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(allowed, 0)
        return bool(allowed.any())


def encoded(constraint: Any) -> bytes:
    """Return vLLM's ``StructuredOutputsParams`` as a job of ``GrammarCompiler``."""
    fields = {name: getattr(constraint, name) for name in _FIELDS}
    return msgspec.json.encode({n: v for n, v in fields.items() if v is not None})


class GrammarCheck:
    """Decides whether a grammar may be used, and remembers the verdict.

    Args:
        queue: has grammars compiled by a ``GrammarCompiler``.
    """

    def __init__(self, queue: GrammarQueue) -> None:
        self._queue = queue
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, caller: Caller, constraint: Any) -> None:
        """Return normally if these ``StructuredOutputsParams`` may be used.

        Args:
            caller: who asks.
            constraint: the ``StructuredOutputsParams``.

        Raises:
            VLLMValidationError: the grammar is not valid, or costs too much to compile.
            QueueFullError: too many grammars of the caller wait to be compiled.
        """
        job = encoded(constraint)
        digest = hashlib.sha256(job).digest()
        if digest not in self._verdicts:
            verdict = await self._verdict(caller, job)
            self._verdicts[digest] = verdict
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        else:
            verdict = self._verdicts[digest]
            self._verdicts.move_to_end(digest)
        if verdict is not None:
            raise VLLMValidationError(verdict, parameter="structured_outputs")

    async def _verdict(self, caller: Caller, job: bytes) -> str | None:
        try:
            await self._queue.run(caller, job)
        except RefusedError as error:
            return str(error)
        return None
