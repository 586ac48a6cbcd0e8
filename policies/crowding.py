"""How much later requests are if fewer units serve them, by the cost model.

A request that finds no idle unit waits for the steps that its unit has scheduled, and for prompts
that came before its own. Its steps then read the context of the unit's other requests, too, and
stand still while prompts are computed for these. All of this becomes more frequent when the same
requests have fewer units.
"""

import math
from dataclasses import dataclass

from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout
from shoal.policies.values.snapshot import StepPredictor

STEPS_AHEAD = 2
"""Steps for which a request waits in a unit that serves others: vLLM schedules one ahead."""
MOST_PROMPTS = 0.95
"""Largest share of the time that prompts are taken to need: more is overload."""
_TRIED = 8
"""Requests by which the time that one adds to a step is estimated."""


@dataclass(frozen=True, slots=True)
class Load:
    """What comes to a node, in the mean."""

    rate: float
    """Requests per second."""
    running: float
    """Requests on the node."""
    prompt_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> int:
        """Tokens that a step reads for a request that has half of its output."""
        return round(self.prompt_tokens + self.output_tokens / 2)


class Crowding:
    """Predicts mean latencies by the number of units that serve a load.

    Args:
        model: predicts steps.
        layout: that of the units.
        load: all requests; each goes to the unit that has least to do.
        mode: how the steps with prompts run.
    """

    def __init__(
        self, model: StepPredictor, layout: Layout, load: Load, mode: Mode = Mode.TP
    ) -> None:
        context, prompt = load.context_tokens, round(load.prompt_tokens)
        few, many = Batch(1, context), Batch(1 + _TRIED, (1 + _TRIED) * context)
        self._load = load
        self._step = model.step_seconds(layout, few)
        self._each_request = max(0.0, model.step_seconds(layout, many) - self._step) / _TRIED
        self._prompt = model.step_seconds(layout, Batch(0, 0, prompt, prompt // 2), mode)

    def ttft(self, units: int) -> float:
        """Return the mean seconds to a request's first token; a prompt is one step."""
        busy = 1 - _poisson_below(units, self._load.running)
        return self._prompt + STEPS_AHEAD * self._step * busy + self._queue(units)

    def _queue(self, units: int) -> float:
        """Return the mean seconds for which a prompt waits for others.

        They are about those of M/D/c: those of M/M/c (Sakasegawa, "An approximation formula",
        1977), halved.
        """
        busy = self._utilisation(units)
        waits = math.pow(busy, math.sqrt(2 * (units + 1)) - 1) / (units * (1 - busy))
        return self._prompt * waits / 2

    def _utilisation(self, units: int) -> float:
        """Return the utilisation of a unit by prompts: the share of its time that they need."""
        return min(MOST_PROMPTS, self._load.rate * self._prompt / units)

    def tpot(self, units: int) -> float:
        """Return the mean seconds between two of a request's tokens."""
        step = self._step + self._each_request * self._load.running / units
        return step / (1 - self._utilisation(units))


def _poisson_below(limit: int, mean: float) -> float:
    """Return the probability that fewer than ``limit`` events happen."""
    return math.fsum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(limit))
