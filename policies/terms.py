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
USUAL_SEATS = 256
"""Requests that a unit decodes at once if nobody says how many: vLLM's usual bound."""


class Terms(NamedTuple):
    """What a unit of one layout can do."""

    decode: Pace
    """Steps that only decode."""
    tp: Pace
    """Steps in TP with prompts."""
    sp: Pace
    """Steps in SP with prompts."""
    sp_above: float
    """Tokens above which a step with prompts runs in SP; infinite if none does."""
    seats: int
    """Requests that it decodes at once."""
    kv_tokens: float
    """Tokens that its KV cache holds."""
    chunk: int
    """Most tokens of a step."""
    mixed_chunk: int
    """Most tokens of prompts in a step in which requests decode."""
    prices: Prices
    """What tokens cost it, in seconds."""
    output_tokens: float = 0.0
    """Tokens of the mean output."""
    short_first: bool = True
    """See ``Snapshot``."""
    drafts: float = 0.0
    """See ``Speculation``."""

    def turn(self, job: Job) -> float:
        """Return by what prompts are ordered, in seconds: arrival plus ``unit_costs.patience``.

        Urgent ones go first.
        """
        came = job.since - (URGENT_AHEAD if job.kind.is_urgent else 0.0)
        if not self.short_first:
            return came
        return came + patience(self.prices.seconds(PromptWork.of(job.prompt, job.new)))

    def prompt_step(self, tokens: int, context: float, pairs: float, decodes: int) -> float:
        """Return the seconds of a step with prompts.

        Args:
            tokens: all its tokens: those of prompts, and one of each decode.
            context: tokens whose KV the decodes read.
            pairs: pairs of a token of a prompt and one that it attends to.
            decodes: requests that decode.
        """
        pace = self.sp if tokens + self.drafts * decodes > self.sp_above else self.tp
        return pace.step(tokens, context, context + pairs, decodes)


TermsOf = Mapping[Layout, Terms]
"""What a unit of each layout can do."""


def terms_of(snapshot: Snapshot, model: StepPredictor, layouts: Iterable[Layout]) -> TermsOf:
    """Return what a unit of each layout can do."""
    sp_above = dict(snapshot.sp_above)
    terms = {}
    for layout in layouts:
        state = snapshot.layout(layout)
        tp = model.pace(layout, StepKind.PREFILL)
        terms[layout] = Terms(
            decode=model.pace(layout, StepKind.DECODE),
            tp=tp,
            sp=model.pace(layout, StepKind.PREFILL, Mode.SP) if layout in sp_above else tp,
            sp_above=sp_above.get(layout, inf),
            seats=USUAL_SEATS if state is None else state.slots,
            kv_tokens=inf if state is None else state.total_blocks * state.block_tokens,
            chunk=snapshot.step_tokens or USUAL_STEP_TOKENS,
            mixed_chunk=snapshot.chunk(layout),
            prices=prices_of(snapshot, layout),
            output_tokens=snapshot.output_tokens,
            short_first=snapshot.short_first,
            drafts=model.speculation.drafts,
        )
    return terms
