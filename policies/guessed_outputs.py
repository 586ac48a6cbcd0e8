"""How long an output is expected to be of which nobody knows it yet.

Lengths are drawn from those of outputs that have ended, evenly spread rather than at random. Who
sends long prompts often wants short answers, or the other way round. So they are drawn from the
outputs of prompts that were about as long, if these differ and as far as enough of them have ended.

While a node fills up, what has ended is mostly short: the long outputs that began as early still
run. So these count, too, as being at least as long as they are now (``uncensored``).
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log, log1p, sqrt

from shoal.policies.values.snapshot import ALIKE_KEPT, OUTPUTS_KEPT, Snapshot

LEAST_OUTPUTS = 16
"""So many outputs must have ended before lengths are drawn from theirs; until then, they are drawn
as if outputs ended at random times. If fewer have ended of prompts that are about as long, as many
others count as make up for them.
"""
DEVIATIONS = 3.0
"""By so many standard deviations the mean output of prompts of one length must differ from that of
all. Otherwise the difference may be chance."""
GOLDEN = 0.6180339887498949
"""1 over the golden ratio. Multiples of it, modulo 1, are spread evenly, however many there are."""


def uncensored(snapshot: Snapshot, running: Iterable[tuple[int, int]]) -> Snapshot:
    """Return a snapshot in whose lengths of outputs those count, too, that still run.

    This needs all outputs since some moment, ended ones and running ones. So where earlier outputs
    have been forgotten, lengths stay as they are: the others are then taken to be the usual ones.

    Args:
        snapshot: the node.
        running: for each request that runs the tokens of its prompt and of its output so far.
    """
    alike = defaultdict[int, list[int]](list)
    for prompt, tokens in running:
        alike[prompt.bit_length()].append(tokens)
    known = snapshot.outputs
    by_prompt = tuple(
        _with_running(ended, sorted(alike[k])) if len(ended) < ALIKE_KEPT else ended
        for k, ended in enumerate(snapshot.outputs_by_prompt)
    )
    if len(known) >= OUTPUTS_KEPT:
        return replace(snapshot, outputs_by_prompt=by_prompt)
    every = sorted(tokens for some in alike.values() for tokens in some)
    # If outputs end at random times, this is their likeliest mean. That one more has ended is
    # assumed so that there is a mean at all.
    mean = (sum(known) + sum(every)) / (len(known) + 1)
    return replace(
        snapshot,
        output_tokens=max(snapshot.output_tokens, mean),
        outputs=_with_running(known, every),
        outputs_by_prompt=by_prompt,
    )


def _with_running(ended: tuple[int, ...], running: Sequence[int]) -> tuple[int, ...]:
    """Estimate how long all outputs are, and return as many lengths as have ended.

    Ended and running outputs are ascending. The estimate is that of Kaplan and Meier
    ("Nonparametric estimation from incomplete observations", 1958). It says nothing beyond the
    longest output that has ended; there, outputs are taken to end at random times.
    """
    if not running or len(ended) < LEAST_OUTPUTS:
        return ended
    left, longer = 1.0, list[float]()  # the share of outputs that are longer than each of ``ended``
    for k, tokens in enumerate(ended):
        as_long = len(ended) - k + len(running) - bisect_left(running, tokens)
        left *= 1 - 1 / as_long
        longer.append(left)
    found, last, at = list[int](), max(ended[-1], running[-1]), 0
    for nth in range(len(ended)):
        share = 1 - (nth + 0.5) / len(ended)
        while at < len(ended) and longer[at] > share:
            at += 1
        if at < len(ended):
            found.append(ended[at])
        else:
            found.append(round(last * (1 + log(left / share))))
    return tuple(found)


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
