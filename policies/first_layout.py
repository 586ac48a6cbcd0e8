"""The layout with which an idle node begins, of which nothing is known but its cost model.

Nobody knows what will come. So shadows of every layout (``shadow.py``) get the same made-up
requests, as chats have them and as assistants for code do, from one at a time to many at once. For
each traffic, the time of the mean request in a layout is compared with that in the best layout. The
node begins in the layout whose largest ratio is smallest.
"""

from collections.abc import Iterator
from itertools import product
from math import log1p

from shoal.policies.jobs import Job
from shoal.policies.shadow import Queue, Shadow
from shoal.policies.terms import TermsOf, terms_of
from shoal.policies.values.layouts import Layout, layouts_up_to
from shoal.policies.values.snapshot import OUTPUT_TOKENS, PROMPT_TOKENS, Snapshot, StepPredictor

LENGTHS = ((PROMPT_TOKENS, OUTPUT_TOKENS), (2 * PROMPT_TOKENS, 30.0))
"""Mean tokens of prompts and outputs: those of chats, and those of assistants for code."""
RATES = (1.0, 4.0, 16.0, 64.0)
"""Requests per second."""
REQUESTS = 32
"""So many of each traffic."""
SPREADS = (0.6180339887498949, 0.7548776662466927, 0.5698402909980532)
"""Multiples of them, modulo 1, are spread evenly: for times, prompts and outputs. They are 1 over
the golden ratio, and 1 over the plastic ratio and over its square (the R2 sequence)."""


def first_layout(snapshot: Snapshot, model: StepPredictor) -> Layout:
    """Return the layout of all units with which the node should begin."""
    engines = snapshot.engines
    layouts = [one for one in layouts_up_to(snapshot.max_group) if one.world_size <= engines]
    terms, worst = terms_of(snapshot, model, layouts), dict.fromkeys(layouts, 0.0)
    for (prompt, output), rate in product(LENGTHS, RATES):
        costs = {one: _cost(one, engines, prompt, output, rate, terms) for one in layouts}
        least = min(costs.values())
        worst = {one: max(worst[one], costs[one] / least) for one in layouts}
    return min(layouts, key=worst.__getitem__)


def _cost(
    layout: Layout, engines: int, prompt: float, output: float, rate: float, terms: TermsOf
) -> float:
    """Return the seconds that the requests of one traffic take together in a layout.

    Args:
        layout: the layout of all units.
        engines: engines of the node.
        prompt: tokens of the mean prompt.
        output: tokens of the mean output.
        rate: requests per second.
        terms: what units can do.
    """
    shadow = Shadow([Queue(layout, 0.0) for _ in range(engines // layout.world_size)])
    for job in _made_up(prompt, output, rate):
        shadow.advance(job.start, terms)
        shadow.put(job, terms)
    return shadow.final_cost(terms)


def _made_up(prompt: float, output: float, rate: float) -> Iterator[Job]:
    """Yield requests: pauses and lengths are exponential, and the same ones every time."""
    at = 0.0
    for serial in range(1, REQUESTS + 1):
        pause, new, tokens = (-log1p(-(serial * spread % 1)) for spread in SPREADS)
        at += pause / rate
        asked = max(1, round(prompt * new))
        yield Job(at, asked, asked, max(1, round(output * tokens)))
