"""What a unit of each layout can do, as far as a shadow needs to know it."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

from shoal.policies.jobs import Job
from shoal.policies.unit_costs import Prices, patience, prices_of
from shoal.policies.values.batch import Mode, PromptWork, StepKind
from shoal.policies.values.layouts import Layout
from shoal.policies.values.pace import Pace
from shoal.policies.values.snapshot import USUAL_STEP_TOKENS, Snapshot, StepPredictor

URGENT_AHEAD = 1e6
"""An urgent request goes before those that came up to so many seconds earlier."""


class Terms(NamedTuple):
    """What a unit of one layout can do."""

    decode: Pace
    tp: Pace
    """Steps in TP with prompts."""
    sp: Pace
    above: float
    """Tokens above which a step with prompts runs in SP; infinite if none does."""
    seats: int
    """Requests that it decodes at once."""
    tokens: float
    """Tokens that its KV cache holds."""
    chunk: int
    """Most tokens of a step."""
    mixed: int
    """Most tokens of prompts, where others decode."""
    prices: Prices
    output: float = 0.0
    """Tokens of the mean output."""
    short_first: bool = True
    """See ``Snapshot``."""
    drafts: float = 0.0
    """See ``Speculation``."""

    def turn(self, job: Job) -> float:
        """Return when it is a prompt's turn (``unit_costs.patience``); urgent ones go first."""
        came = job.since - (URGENT_AHEAD if job.kind.is_urgent else 0.0)
        if not self.short_first:
            return came
        return came + patience(self.prices.seconds(PromptWork.of(job.prompt, job.new)))

    def prompts(self, tokens: int, context: float, pairs: float, decodes: int) -> float:
        """Return the seconds of a step with prompts."""
        pace = self.sp if tokens + self.drafts * decodes > self.above else self.tp
        return pace.step(tokens, context, context + pairs, decodes)


TermsOf = Mapping[Layout, Terms]


def terms_of(snapshot: Snapshot, model: StepPredictor, layouts: Iterable[Layout]) -> TermsOf:
    """Return what a unit of each layout can do."""
    above = dict(snapshot.sp_above)
    terms = {}
    for layout in layouts:
        state = snapshot.layout(layout)
        tp = model.pace(layout, StepKind.PREFILL)
        terms[layout] = Terms(
            decode=model.pace(layout, StepKind.DECODE),
            tp=tp,
            sp=model.pace(layout, StepKind.PREFILL, Mode.SP) if layout in above else tp,
            above=above.get(layout, inf),
            seats=256 if state is None else state.slots,
            tokens=inf if state is None else state.total_blocks * state.block_tokens,
            chunk=snapshot.step_tokens or USUAL_STEP_TOKENS,
            mixed=snapshot.chunk(layout),
            prices=prices_of(snapshot, layout),
            output=snapshot.output_tokens,
            short_first=snapshot.short_first,
            drafts=model.speculation.drafts,
        )
    return terms
