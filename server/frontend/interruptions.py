"""Requests whose engines died: how far their clients have got, and from where they go on.

The controller asks how far an interrupted request has come. The answer must count every output that
was passed on to vLLM's output processor, so it is given between two messages, when the processor
has taken them all in. From then on, outputs of earlier attempts at the request are dropped; each
output says which attempt it belongs to (``shoal.runtime.protocol.wire.attempt_of``).

If an engine dies just after a request was moved out of it, the last outputs of the request there
may be lost. The outputs of the next unit would wait for them for ever, so the request is begun
again from the tokens that did arrive.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol.messages import GoesOn, Interrupted, Progress, Received
from shoal.runtime.protocol.wire import attempt_of
from shoal.server.frontend.ordering import InOrder
from shoal.server.observers import Observer

OVERDUE_SECONDS = 2.0
"""How long a moved request's outputs wait for the outputs that precede them."""

TokensOf = Callable[[str], Sequence[int] | None]
"""Returns the output tokens received for a request; None if it has ended."""
Send = Callable[[Received | GoesOn], None]
"""Sends a message to the controller."""


class Interruptions(Observer):
    """A front end's part in beginning requests again.

    Args:
        client: number of the front end.
        order: holds back outputs that are early.
        tokens_of: returns the tokens received for a request.
        send: sends the answers to the controller.
        expect: called with every request for which the controller will send another note.
        count_late: called with the number of outputs that were dropped.
    """

    def __init__(
        self,
        client: int,
        order: InOrder,
        tokens_of: TokensOf,
        *,
        send: Send,
        expect: Callable[[str], None],
        count_late: Callable[[int], None],
    ) -> None:
        self._client = client
        self._order = order
        self._tokens_of = tokens_of
        self._send = send
        self._expect = expect
        self._count_late = count_late
        self._attempts: dict[str, int] = {}
        """The latest attempt at each request that was begun again."""
        self._unheard: set[str] = set()
        """Requests that were begun again and have had no output since."""
        self._asked: dict[str, int] = {}
        self._is_settled = True

    def __len__(self) -> int:
        return len(self._attempts)

    def interrupted(self, note: Interrupted) -> None:
        """Take the controller's question, and answer it as soon as possible."""
        self._asked.update(note.attempts)
        self._answer()

    def settle(self) -> None:
        """Note that vLLM's output processor has taken in every output so far."""
        self._is_settled = True
        self._answer()

    def admit(self, unit: Unit | None, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of one message, without those of earlier attempts.

        Until ``settle`` is called, they are not yet counted as received.

        Args:
            unit: the unit that made them; None: the controller, whose outputs are always valid.
            outputs: ``EngineCoreOutput`` of the message.
        """
        self._is_settled = False
        if unit is None or not self._attempts:
            return list(outputs)
        valid = [output for output in outputs if self._is_valid(output)]
        if len(valid) < len(outputs):
            self._count_late(len(outputs) - len(valid))
        heard = [output.request_id for output in valid if output.request_id in self._unheard]
        if heard:
            self._unheard.difference_update(heard)
            self._send(GoesOn(heard))
        return valid

    def _is_valid(self, output: Any) -> bool:
        return attempt_of(output.trace_headers) >= self._attempts.get(output.request_id, 0)

    def begin_overdue_again(self) -> None:
        """Have requests begun again whose next outputs seem to be lost."""
        self.begin_again(self._order.overdue(OVERDUE_SECONDS))

    def begin_again(self, request_ids: Iterable[str]) -> None:
        """Have requests begun again, as outputs of theirs are lost."""
        for request_id in request_ids:
            self._asked.setdefault(request_id, self.attempts(request_id) + 1)
        self._answer()

    def attempts(self, request_id: str) -> int:
        """Return how often a request has been begun again."""
        return self._attempts.get(request_id, 0)

    def _answer(self) -> None:
        if not self._asked or not self._is_settled:
            return
        asked, self._asked = self._asked, {}
        progress: dict[str, Progress] = {}
        ended: list[str] = []
        self._forget_ended()
        for request_id, attempt in asked.items():
            tokens = self._tokens_of(request_id)
            if tokens is None:
                self._order.drop(request_id)
                ended.append(request_id)
            else:
                attempt = self._begin_again(request_id, attempt)
                progress[request_id] = Progress(attempt, list(tokens))
        self._send(Received(self._client, progress, ended))

    def _begin_again(self, request_id: str, attempt: int) -> int:
        attempt = max(attempt, self._attempts.get(request_id, 0))
        self._attempts[request_id] = attempt
        self._unheard.add(request_id)
        self._order.drop(request_id)
        self._expect(request_id)
        return attempt

    def _forget_ended(self) -> None:
        over = [request_id for request_id in self._attempts if self._tokens_of(request_id) is None]
        for request_id in over:
            del self._attempts[request_id]
        self._unheard.difference_update(over)
