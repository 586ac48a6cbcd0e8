"""How long an output is expected to be of which nobody knows it yet.

Lengths are drawn from those of outputs that have ended, evenly spread rather than at random.
"""

from bisect import bisect_right
from math import log1p

from shoal.policies.values.snapshot import Snapshot

LEAST_OUTPUTS = 16
"""So many outputs must have ended before lengths are drawn from theirs; until then, they are drawn
as if outputs ended at random times.
"""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly, however many there are."""


def drawn_output(snapshot: Snapshot, serial: int) -> int:
    """Return the tokens that the next request is expected to generate."""
    known, share = snapshot.outputs, serial * GOLDEN % 1
    if len(known) < LEAST_OUTPUTS:
        return max(1, round(-snapshot.output_tokens * log1p(-share)))
    return max(1, known[int(share * len(known))])


def longer_output(snapshot: Snapshot, serial: int, tokens: int) -> int:
    """Return the tokens that a request is expected to generate which has generated so many."""
    known, share = snapshot.outputs, serial * GOLDEN % 1
    if len(known) < LEAST_OUTPUTS:
        return tokens + max(1, round(-snapshot.output_tokens * log1p(-share)))
    longer = known[bisect_right(known, tokens) :]
    return longer[int(share * len(longer))] if longer else 2 * tokens


def rest_of_output(snapshot: Snapshot, share: float) -> int:
    """Return what is left of the output of a running request; ``share`` numbers them from 0 to 1.

    A running request is more likely a long one, and is seen anywhere in its course.
    """
    known = snapshot.outputs
    if len(known) < LEAST_OUTPUTS:
        return max(1, round(share * snapshot.output_tokens))
    place = share * sum(known)
    for tokens in known:
        if place < tokens:
            return max(1, round(place))
        place -= tokens
    return known[-1]
