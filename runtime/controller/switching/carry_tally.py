"""What the carries of a switch have done to requests, for the answer about the switch."""

from collections import Counter

import msgspec


class Tally(msgspec.Struct):
    """What carries have done to requests."""

    carried: int = 0
    recomputed: Counter[str] = msgspec.field(default_factory=Counter)
    """Requests that went without their KV, by the reason."""
    ended_early: set[str] = set()
    """Requests that had ended before they could leave, as front ends are about to say."""
    bytes: int = 0
    precopied_bytes: int = 0
    precopy_seconds: float = 0.0
    """How long KV was copied while the requests went on."""
    began: float | None = None
    """When the first request was asked to leave."""
    ended: float = 0.0
    """When the last of them has ended."""

    @property
    def seconds(self) -> float:
        """Time in which requests were on their way."""
        return 0.0 if self.began is None else max(0.0, self.ended - self.began)
