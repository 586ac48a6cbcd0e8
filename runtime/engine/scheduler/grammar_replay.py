"""The grammar of a request that has outputs of other units: it takes these outputs in first."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

TOKENS_AT_ONCE = 1024
"""A look at a grammar takes in so many outputs at most, because the engine's loop waits for it."""


@dataclass(slots=True)
class _AsItWas:
    """A request as it was after each of its outputs: what vLLM's manager reads of a ``Request``."""

    request_id: str
    prompt_token_ids: list[int]
    structured_output_request: Any
    all_token_ids: list[int]
    use_structured_output: bool = True


class GrammarReplay:
    """Brings a request's grammar, and the state of its reasoning, to where its outputs end.

    The outputs go through vLLM's manager one by one, as they did when they were generated: only
    then does it see where the reasoning ended, if the model reasons before it obeys the grammar.

    Args:
        manager: vLLM's manager of the core.
        request: the request, with its outputs. Its grammar may still be compiling.
    """

    def __init__(self, manager: StructuredOutputManager, request: Request) -> None:
        self.request = request
        self._manager = manager
        prompt = list(request.prompt_token_ids or ())
        self._seen = _AsItWas(
            request.request_id, prompt, request.structured_output_request, list(prompt)
        )
        self._left: Iterator[int] = iter(list(request.output_token_ids))

    @property
    def is_due(self) -> bool:
        """Whether the grammar is compiled, or could not be."""
        return bool(self._seen.structured_output_request.is_grammar_ready)

    def advance(self) -> bool:
        """Take in some outputs; return whether the request can be queued.

        A request whose grammar could not be compiled, or does not take its outputs, gets the status
        with which vLLM's scheduler ends it with an error.
        """
        if not self.is_due:
            return False
        structured = self._seen.structured_output_request
        if not isinstance(structured.grammar, Exception):
            some = list(islice(self._left, TOKENS_AT_ONCE))
            if all(map(self._accept, some)):
                return len(some) < TOKENS_AT_ONCE
            structured.grammar = ValueError("the grammar does not take the request's own outputs")
        self.request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return True

    def _accept(self, token: int) -> bool:
        self._seen.all_token_ids.append(token)
        return bool(self._manager.accept_tokens(self._seen, [token]))
