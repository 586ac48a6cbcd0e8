"""Made-up requests of a trial, which go through a core like any others, so that steps are timed.

Their outputs go to nobody, and the controller's books know nothing of them.
"""

import random
from collections.abc import Sequence

from shoal.runtime.engine.agent.interface import EngineBackend
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.transport import AgentTransport

TOKEN_IDS = range(5, 100)
"""Every vocabulary has these."""


class Trials:
    """Runs one trial at a time.

    Args:
        backend: the engine.
        transport: the way to the controller.
    """

    def __init__(self, backend: EngineBackend, transport: AgentTransport) -> None:
        self._backend = backend
        self._transport = transport
        self._trial: m.Try | None = None
        self._left: set[str] = set()
        self._error = ""

    def take(self, message: m.Try) -> None:
        """Begin a trial; the last one is over."""
        self._forget()
        self._trial, self._error = message, ""
        try:
            self._begin(message)
        except (KeyError, ValueError) as problem:
            self._error = str(problem).split("\n")[0] or "no such unit"
            self._forget()

    def _begin(self, trial: m.Try) -> None:
        # vLLM may stop a request early, at a token that ends its text.
        sampling = {"max_tokens": trial.output_tokens, "ignore_eos": True}
        for place, tokens in enumerate(trial.prompts):
            name = f"trial-{trial.number}-{place}"
            prompt = random.Random(name).choices(TOKEN_IDS, k=tokens)
            payload = wire.encode_request(name, prompt, sampling, client=wire.NOBODY)
            self._backend.cores[trial.unit].add([payload])
            self._left.add(name)

    @property
    def running(self) -> bool:
        """Whether requests of a trial have not ended; the engine has no others meanwhile."""
        return bool(self._left)

    def without_own(self, finished: Sequence[str]) -> list[str]:
        """Return those of the requests that have ended which are no trial's."""
        if not self._left:
            return list(finished)
        others = [name for name in finished if name not in self._left]
        self._left.difference_update(finished)
        return others

    def tell(self) -> None:
        """Tell the controller if the trial is over; what its steps took has been told."""
        trial = self._trial
        if trial is not None and not self._left:
            self._trial = None
            answer = m.Tried(self._backend.engine, trial.number, self._error)
            self._transport.to_controller(answer)

    def _forget(self) -> None:
        if self._trial is not None and self._left:
            self._backend.cores[self._trial.unit].abort(sorted(self._left))
        self._left = set()
