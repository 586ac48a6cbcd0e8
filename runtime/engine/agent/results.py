"""What a core says of its load, of its steps, and of requests that came to it."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shoal.policies.values.batch import NO_PROMPTS, PromptWork
from shoal.runtime.protocol.messages import Fallback, Mode, Work


class CoreOutputs(msgspec.Struct, frozen=True):
    """What one step produced: an encoded ``EngineCoreOutputs`` for one front end."""

    client_index: int
    frames: Sequence[Any]
    """Buffers to send as one multipart message."""


class CoreLoad(msgspec.Struct, frozen=True):
    """What a unit holds right now."""

    running: int
    waiting: int
    free_blocks: int
    begun: PromptWork = NO_PROMPTS
    """See ``messages.Load``."""

    @classmethod
    def of(
        cls, running: int, waiting: int, free_blocks: int, done: Iterable[tuple[int, int]]
    ) -> "CoreLoad":
        """Return the load of a unit.

        Args:
            running: requests in its batch.
            waiting: requests in no batch.
            free_blocks: KV blocks that a request could get.
            done: of each running request the tokens of its prompt, and how many of all its tokens
                steps have computed or compute now.
        """
        begun = NO_PROMPTS
        for prompt, computed in done:
            if computed < prompt:
                begun = begun.with_(PromptWork.of(prompt, prompt - computed))
        return cls(running, waiting, free_blocks, begun)


class EndedSteps(msgspec.Struct, frozen=True):
    """What a collected step computed, or several that followed each other."""

    mode: Mode
    work: Work
    """All its ``steps`` are of one kind, with prompts or without; the caller sets ``seconds``."""


class Collected(msgspec.Struct, frozen=True):
    """What came of the steps that have ended."""

    outputs: list[CoreOutputs]
    steps: list[EndedSteps]
    """Oldest first, without steps that only told the runners which requests had ended."""
    finished: list[str]
    """Requests that ended, for any reason but ``abort``."""


class Adoption(msgspec.Struct, frozen=True):
    """How a core has taken a request that was carried to it."""

    fallback: Fallback | None = None
    """Why the request's KV did not come along; None: it did, or there was none."""


class Copied(msgspec.Struct, frozen=True):
    """A copy that every member of a unit has ended."""

    request_ids: list[str]
    bytes: int
    """Bytes of KV that all members together have read."""
    seconds: float
    """What it took the slowest member."""
    problem: str = ""
    """Why the KV could not be read, in one line. The core has forgotten the requests then, and has
    sent no output of theirs."""
    host_bytes: int = 0
    """How many of the bytes have come through memory of the host."""
