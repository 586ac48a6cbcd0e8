"""How long an output is expected to be of which nobody knows it yet.

Lengths are drawn from those of outputs that have ended, evenly spread rather than at random. Who
sends long prompts often wants short answers, or the other way round. So they are drawn from the
outputs of prompts that were about as long, if these differ and as far as enough of them have ended.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from math import log1p, sqrt

from shoal.policies.values.snapshot import Snapshot

LEAST_OUTPUTS = 16
"""So many outputs must have ended before lengths are drawn from theirs; until then, they are drawn
as if outputs ended at random times. If fewer have ended of prompts that are about as long, as many
others count as make up for them.
"""
DEVIATIONS = 3.0
"""By so many standard deviations the mean output of prompts of one length must differ from that of
all. Otherwise the difference may be chance."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly, however many there are."""


def drawn_output(snapshot: Snapshot, serial: int, prompt: int) -> int:
    """Return the tokens that the next request is expected to generate.

    Args:
        snapshot: the node.
        serial: numbers the draws.
        prompt: tokens of its prompt.
    """
    share, alike = serial * GOLDEN % 1, _alike(snapshot, prompt)
    trust = min(1.0, len(alike) / LEAST_OUTPUTS)
    if share < trust:
        return max(1, alike[int(share / trust * len(alike))])
    known, share = snapshot.outputs, (share - trust) / (1 - trust)
    if len(known) < LEAST_OUTPUTS:
        return max(1, round(-snapshot.output_tokens * log1p(-share)))
    return max(1, known[int(share * len(known))])


def longer_output(snapshot: Snapshot, serial: int, prompt: int, tokens: int) -> int:
    """Return the tokens that a request is expected to generate which has generated so many.

    Args:
        snapshot: the node.
        serial: numbers the draws.
        prompt: tokens of its prompt.
        tokens: what it has generated.
    """
    share, alike, known = serial * GOLDEN % 1, _alike(snapshot, prompt), snapshot.outputs
    if len(known) < LEAST_OUTPUTS:
        return tokens + max(1, round(-snapshot.output_tokens * log1p(-share)))
    among = alike if len(alike) >= LEAST_OUTPUTS else known
    longer = among[bisect_right(among, tokens) :]
    return longer[int(share * len(longer))] if longer else 2 * tokens


def _alike(snapshot: Snapshot, prompt: int) -> Sequence[int]:
    """Return the latest outputs of prompts that were about as long, ascending.

    If their mean is that of all, as far as one sees, the latter say more, because they are more.
    """
    by_prompt, k, every = snapshot.outputs_by_prompt, prompt.bit_length(), snapshot.outputs
    alike = by_prompt[k] if k < len(by_prompt) else ()
    if not alike or not every:
        return ()
    mean, variance = _mean_and_variance(every)
    differs = abs(sum(alike) / len(alike) - mean) > DEVIATIONS * sqrt(variance / len(alike))
    return alike if differs else ()


@lru_cache(maxsize=4)
def _mean_and_variance(outputs: tuple[int, ...]) -> tuple[float, float]:
    """Return both of the latest outputs. Many draws ask for them before the next output ends."""
    mean = sum(outputs) / len(outputs)
    return mean, sum((tokens - mean) ** 2 for tokens in outputs) / len(outputs)


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
