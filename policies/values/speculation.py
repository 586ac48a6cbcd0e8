"""What decodes check and accept of proposed tokens, where a node speculates, as measured steps say.

A step of a unit that speculates computes, for each request, its next token and the proposals that
follow it (drafts), and yields the accepted ones beside the request's own token. How many are
proposed and accepted depends on the requests, the method and the draft model, not on the layout: a
draft is accepted if it is what the model itself says.
"""

from dataclasses import dataclass

KEPT = 4096
"""Decodes after which older ones count less: an estimate follows the requests of the last seconds,
and not the mood of single ones."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Means over the latest decodes; without speculation all is 0."""

    drafts: float = 0.0
    """Proposed tokens that a decode checks in a step."""
    accepted: float = 0.0
    """Those of them that are right, so that the step yields so many tokens more."""
    seen: int = 0
    """Decodes behind these means, at most ``KEPT``."""

    @property
    def checked(self) -> float:
        """Tokens that a decode computes in a step."""
        return 1 + self.drafts

    @property
    def yielded(self) -> float:
        """Tokens that a decode gets of a step."""
        return 1 + self.accepted

    def see(self, decodes: int, drafts: int, accepted: int) -> "Speculation":
        """Return the means with some more decodes.

        Args:
            decodes: how many; nothing changes without any.
            drafts: all that they have checked.
            accepted: all that they have accepted.
        """
        if not decodes or not (drafts or self.seen):
            return self
        total = self.seen + decodes
        return Speculation(
            drafts=(self.drafts * self.seen + drafts) / total,
            accepted=(self.accepted * self.seen + accepted) / total,
            seen=min(total, KEPT),
        )


NOT_SEEN = Speculation()
"""Of a node that does not speculate, or has not done so yet."""
