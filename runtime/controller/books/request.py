"""One request, from its arrival at the node until it leaves it."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.controller.books.family import Family
from shoal.runtime.protocol import wire


class Request(msgspec.Struct, frozen=True):
    """One request, from its arrival on."""

    id: str
    client: int
    """Number of the front end that sent it."""
    frames: list[bytes]
    """vLLM's own payload, as it came."""
    seen: PoolRequest
    """What policies see of it."""
    movable: bool
    """Whether it can be moved once it has begun (``wire.RequestView.movable``)."""
    terms: wire.Terms = wire.Terms()
    """What its front end asked of the task pool."""
    family: Family | None = None
    """The HTTP request that it came of, if others came of it, too."""
    moved_at: float | None = None
    """When it was last taken out of a unit, seconds."""
    tokens: tuple[int, ...] = ()
    """What other units have generated of it: for its next one they are part of the prompt."""
    attempt: int = 0
    """How often it was begun again because its engine died."""
    deaths: int = 0
    """Engines that died while they computed it."""
    suspect: bool = False
    """The last of them did, and no output of it has come since: it may be what they died of."""
    guilty: bool = False
    """It is what its engine died of."""
    counted: bool = False
    """It is among the outcomes already: its last outputs were lost, and it had to go on."""

    @property
    def pooled_at(self) -> float:
        """When it came into the task pool, or came back there."""
        return self.seen.arrival if self.moved_at is None else self.moved_at

    @property
    def payload(self) -> list[bytes]:
        """What a unit is sent to begin it, or to go on with it."""
        if not self.tokens and not self.attempt:
            return self.frames
        return wire.continue_request(self.frames, self.tokens, self.attempt)

    @property
    def can_continue(self) -> bool:
        """Whether another unit can go on with it where it stands."""
        return not self.tokens or self.movable


def continued(request: Request, tokens: Sequence[int], now: float) -> Request:
    """Return a request that was taken out of a unit, as one that waits again.

    Args:
        request: that.
        tokens: every output token so far, whichever units generated them.
        now: seconds.
    """
    prompt = request.seen.prompt_tokens - len(request.tokens) + len(tokens)
    total = max(request.seen.total_tokens, prompt + 1)
    return msgspec.structs.replace(
        request,
        tokens=tuple(tokens),
        seen=replace(request.seen, prompt_tokens=prompt, total_tokens=total),
        moved_at=now,
    )


def pool_request(view: wire.RequestView, *, longest: int, now: float) -> PoolRequest:
    """Return what policies see of a request.

    Args:
        view: the request as it came.
        longest: tokens of the longest sequence that the node takes. A front end bounds a request
            without ``max_tokens`` by what this leaves: such a bound asks for no room.
        now: arrival, seconds.
    """
    sampling = view.sampling_params or wire.Sampling()
    bound = view.prompt_tokens + (sampling.max_tokens or 1)
    return PoolRequest(
        request_id=view.request_id,
        prompt_tokens=view.prompt_tokens,
        total_tokens=bound if bound < longest else min(view.prompt_tokens + 1, bound),
        priority=view.priority,
        arrival=now,
    )
