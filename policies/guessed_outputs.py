"""How long an output is expected to be of which nobody knows it yet.

Lengths are drawn from those of outputs that have ended, evenly spread rather than at random. Who
sends long prompts often wants short answers, or the other way round. So they are drawn from the
outputs of prompts that were about as long, if these differ and as far as enough of them have ended.

Some clients say how long an output may be, and mean it: nearly all of their outputs are so long.
Others leave room that few outputs need. So as large a share of the guesses is the limit as that of
the latest outputs which came to theirs.

While a node fills up, what has ended is mostly short: the long outputs that began as early still
run. So these count, too, as being at least as long as they are now (``Outputs.with_running``).
"""

import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import log, log1p, sqrt
from typing import NamedTuple

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
PLASTIC = 0.7548776662466927
"""1 over the plastic ratio. Its multiples are spread evenly beside those of ``GOLDEN``, too."""
UNLIMITED = sys.maxsize
"""The limit of an output of which the client has not said how long it may be."""


class Outputs(NamedTuple):
    """What is known of the lengths of outputs, in tokens."""

    mean: float
    """The mean length."""
    latest: tuple[int, ...]
    """Lengths of the latest outputs, ascending; at most ``OUTPUTS_KEPT``."""
    by_prompt: tuple[tuple[int, ...], ...]
    """The same by the lengths of prompts (``Snapshot.outputs_by_prompt``)."""
    limit_share: float = 0.0
    """See ``Snapshot``."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> "Outputs":
        """Return what is known from the outputs that have ended."""
        by_prompt = snapshot.outputs_by_prompt
        return cls(snapshot.output_tokens, snapshot.outputs, by_prompt, snapshot.limit_share)

    def with_running(self, running: Iterable[tuple[int, int]]) -> "Outputs":
        """Return the lengths when those outputs count, too, that still run.

        This needs all outputs since some moment, ended ones and running ones. So where earlier
        outputs have been forgotten, lengths stay as they are: the others are then taken to be the
        usual ones.

        Args:
            running: for each request that runs the tokens of its prompt and of its output so far.
        """
        alike = defaultdict[int, list[int]](list)
        for prompt, tokens in running:
            alike[prompt.bit_length()].append(tokens)
        by_prompt = tuple(
            _with_running(ended, sorted(alike[k])) if len(ended) < ALIKE_KEPT else ended
            for k, ended in enumerate(self.by_prompt)
        )
        if len(self.latest) >= OUTPUTS_KEPT:
            return self._replace(by_prompt=by_prompt)
        every = sorted(tokens for some in alike.values() for tokens in some)
        # If outputs end at random times, this is their likeliest mean. That one more has ended is
        # assumed so that there is a mean at all.
        mean = (sum(self.latest) + sum(every)) / (len(self.latest) + 1)
        latest = _with_running(self.latest, every)
        return self._replace(mean=max(self.mean, mean), latest=latest, by_prompt=by_prompt)

    def drawn(self, serial: int, prompt: int, limit: int = UNLIMITED) -> int:
        """Return the tokens that the next request is expected to generate.

        Args:
            serial: numbers the draws.
            prompt: tokens of its prompt.
            limit: most tokens that it may generate.
        """
        if self._comes_to(limit, serial):
            return limit
        return min(limit, self._drawn(serial, prompt))

    def _comes_to(self, limit: int, serial: int) -> bool:
        return limit < UNLIMITED and serial * PLASTIC % 1 < self.limit_share

    def _drawn(self, serial: int, prompt: int) -> int:
        share, alike = serial * GOLDEN % 1, self._alike(prompt)
        trust = min(1.0, len(alike) / LEAST_OUTPUTS)
        if share < trust:
            return max(1, alike[int(share / trust * len(alike))])
        share = (share - trust) / (1 - trust)
        if len(self.latest) < LEAST_OUTPUTS:
            return max(1, self._at_random(share))
        return max(1, self.latest[int(share * len(self.latest))])

    def longer(self, serial: int, prompt: int, tokens: int, limit: int = UNLIMITED) -> int:
        """Return the tokens that a request is expected to generate which has generated so many.

        Args:
            serial: numbers the draws.
            prompt: tokens of its prompt.
            tokens: what it has generated.
            limit: most tokens that it may generate.
        """
        if self._comes_to(limit, serial):
            return limit
        return min(limit, self._longer(serial, prompt, tokens))

    def _longer(self, serial: int, prompt: int, tokens: int) -> int:
        share, alike = serial * GOLDEN % 1, self._alike(prompt)
        if len(self.latest) < LEAST_OUTPUTS:
            return tokens + max(1, self._at_random(share))
        among = alike if len(alike) >= LEAST_OUTPUTS else self.latest
        longer = among[bisect_right(among, tokens) :]
        return longer[int(share * len(longer))] if longer else 2 * tokens

    def rest(self, share: float) -> int:
        """Return the tokens that are left of the output of a running request.

        A running request is more likely a long one, and is seen anywhere in its course.

        Args:
            share: numbers the running requests, from 0 to 1.
        """
        if len(self.latest) < LEAST_OUTPUTS:
            return max(1, round(share * self.mean))
        place = share * sum(self.latest)
        for tokens in self.latest:
            if place < tokens:
                return max(1, round(place))
            place -= tokens
        return self.latest[-1]

    def _at_random(self, share: float) -> int:
        """Return the length below which this share of outputs is, if they end at random times."""
        return round(-self.mean * log1p(-share))

    def _alike(self, prompt: int) -> Sequence[int]:
        """Return the latest outputs of prompts that were about as long, ascending.

        If their mean is that of all, as far as one sees, the latter say more, because they are
        more.
        """
        k = prompt.bit_length()
        alike = self.by_prompt[k] if k < len(self.by_prompt) else ()
        if not alike or not self.latest:
            return ()
        mean, variance = _mean_and_variance(self.latest)
        differs = abs(sum(alike) / len(alike) - mean) > DEVIATIONS * sqrt(variance / len(alike))
        return alike if differs else ()


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


@lru_cache(maxsize=4)
def _mean_and_variance(outputs: tuple[int, ...]) -> tuple[float, float]:
    """Return both of the latest outputs. Many draws ask for them before the next output ends."""
    mean = sum(outputs) / len(outputs)
    return mean, sum((tokens - mean) ** 2 for tokens in outputs) / len(outputs)
