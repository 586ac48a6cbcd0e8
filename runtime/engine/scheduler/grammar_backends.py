"""Each request's grammar by the backend that its front end chose for it, all of them in one core.

vLLM's ``StructuredOutputManager`` makes one backend for a core, when the first structured request
comes. With ``auto`` its front end chooses a backend for each request: xgrammar, or guidance for
what xgrammar refuses. So a grammar would be compiled by what the core's first request needed, and a
request that was carried would go on with the grammar of another backend.
"""

from collections.abc import Iterator
from copy import copy
from typing import Any

from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


class GrammarBackends:
    """Makes the grammars of a core: has a manager for each backend that requests ask for.

    Only the making of a grammar needs its backend. All else that a manager does asks the grammars
    themselves, whose masks are the same bits for every backend: one for each token.

    Args:
        manager: the core's, which makes grammars through this object from now on.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        self._blank = copy(manager)
        """Has no backend, and shares the tokenizer and the threads."""
        self._by_name: dict[str, Any] = {}
        manager.grammar_init = self._init

    def _init(self, request: Request) -> None:
        """Begin to compile a request's grammar, as ``StructuredOutputManager.grammar_init`` does.

        Raises:
            ValueError: vLLM has no such backend.
        """
        if request.structured_output_request is None:
            return
        name = request.sampling_params.structured_outputs._backend
        manager = self._by_name.get(name) or copy(self._blank)
        manager.grammar_init(request)
        self._by_name[name] = manager
        if self._manager.backend is None:
            self._manager.backend = manager.backend  # it makes the masks of steps

    def close(self) -> None:
        """End the threads that compile, and free all backends."""
        backends = [manager.backend for manager in self._by_name.values()]
        first = self._manager.backend
        self._manager.clear_backend()
        for backend in backends:
            if backend is not first:
                backend.destroy()


def pending_grammars(scheduler: Any) -> Iterator[Any]:
    """Yield the grammars that requests of vLLM's scheduler wait for."""
    for request in scheduler.deferred_waiting:
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            yield request.structured_output_request


def is_any_ready(scheduler: Any) -> bool:
    """Return whether a request waits for its grammar although that is compiled."""
    return any(grammar.is_grammar_ready for grammar in pending_grammars(scheduler))
