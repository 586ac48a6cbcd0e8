"""One request, from its arrival at the node until it leaves it."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shoal.policies.values.snapshot import PoolRequest
from shoal.runtime.controller.books.family import Family
from shoal.runtime.controller.books.prompt_hashes import NO_HASHES, PromptHashes
from shoal.runtime.protocol import wire


class Request(msgspec.Struct, frozen=True):
    """One request, from its arrival on."""

    id: str
    client: int
    """Number of the front end that sent it."""
    frames: list[bytes]
    """vLLM's own payload, as it came."""
    seen: PoolRequest
    """What policies see of the request."""
    prompt: PromptHashes = NO_HASHES
    """By which it is known where its prompt may be cached."""
    terms: wire.Terms = wire.Terms()
    """What its front end asked of the task pool."""
    family: Family | None = None
    """The HTTP request of which it is a part, if that has several engine requests."""
    moved_at: float | None = None
    """When it was last taken out of a unit, seconds."""
    tokens: tuple[int, ...] = ()
    """Output tokens that earlier units have generated for it; the next unit takes it up there."""
    attempt: int = 0
    """How often it was started again because its engine died."""
    deaths: int = 0
    """How often it was blamed for an engine's death because the engine was computing it."""
    suspect: bool = False
    """Whether it may have killed an engine: it was blamed, and has had no output since."""
    guilty: bool = False
    """Whether it was a suspect and an engine died of it again."""
    counted: bool = False
    """Whether its outcome was counted already: it had ended, but its last outputs were lost."""

    @property
    def size(self) -> int:
        """Bytes of its payload, its images' features included."""
        return sum(map(len, self.frames))

    @property
    def pooled_at(self) -> float:
        """When the request came into the task pool, or last came back."""
        return self.seen.arrival if self.moved_at is None else self.moved_at

    @property
    def payload(self) -> list[bytes]:
        """The frames that a unit is sent; its outputs tell of which attempt they are."""
        return wire.mark_attempt(self.frames, self.attempt) if self.attempt else self.frames


def continued(request: Request, tokens: Sequence[int], now: float) -> Request:
    """Return a request that leaves a unit: what another unit would have to compute of it has grown.

    Args:
        request: the request.
        tokens: all output tokens so far, whichever units generated them.
        now: the clock, seconds.
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
        longest: tokens of the longest sequence that the node takes. The front end derives the bound
            of a request without ``max_tokens`` from it; such a bound reserves no room.
        now: time of arrival, seconds.
    """
    sampling = view.sampling_params or wire.Sampling()
    bound = view.prompt_tokens + (sampling.max_tokens or 1)
    return PoolRequest(
        request_id=view.request_id,
        prompt_tokens=view.prompt_tokens,
        total_tokens=bound if bound < longest else min(view.prompt_tokens + 1, bound),
        priority=view.priority,
        arrival=now,
        output_limit=sampling.max_tokens if bound < longest else None,
    )
