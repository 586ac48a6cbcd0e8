"""Messages of a trial: an engine computes made-up requests, so that its steps are timed."""

from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol.messages.values import Message


class Try(Message, frozen=True):
    """Forget the requests of the last trial, and compute these of ``unit``; answer ``Tried``.

    ``prompts`` are the lengths of the prompts in tokens, each of which gets ``output_tokens`` more;
    without any the answer comes at once.
    """

    number: int
    unit: Unit
    prompts: list[int]
    output_tokens: int = 1


class Tried(Message, frozen=True):
    """Answer to ``Try``: its requests have ended, or could not begin (``error``, one line)."""

    engine: int
    number: int
    error: str = ""
