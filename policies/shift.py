"""From how many tokens on a group runs its steps in SP, and the policy that does nothing else.

Shift Parallelism (3.3) takes one fixed number of tokens. Where the node knows its hardware, that
number can come from the cost model: the step from which on SP is the faster one. It is the roofline
that says so, without its corrections: each mode is measured only on its own side of the threshold,
so a correction would confirm the threshold that there is.

Nor does the host count, which the model knows of steps in SP alone: these replay CUDA graphs
between two layers' attention, while steps in TP of as many tokens have none, and wait longer for
it. Where graphs are turned off, SP may need more tokens to be faster: set a number there.
"""

import enum
from collections.abc import Iterable

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.static import STATIC_TP
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout
from shoal.policies.values.plan import Policy

DEFAULT_THRESHOLD = 256
"""Shoal's own choice: the paper takes a number, and does not say which."""
MOST_TOKENS = 1 << 20
"""No step batches more, so no threshold is higher."""
_SHOWN = 40
"""Characters of a wrong value that its error message repeats."""


class ShiftRule(enum.StrEnum):
    """What a threshold may be instead of a number of tokens."""

    AUTO = "auto"
    """What the cost model says that devices and links take."""
    OFF = "off"
    """Every step is run in TP."""


ShiftThreshold = int | ShiftRule
"""Tokens of a step above which it is run in SP, or where to take them from."""


class ShiftThresholdError(ValueError):
    """A threshold that cannot be; the message is one line."""


def parse_threshold(value: int | str) -> ShiftThreshold:
    """Return the threshold that a user means.

    Raises:
        ShiftThresholdError: it is neither a number of tokens, ``auto`` nor ``off``.
    """
    if value in tuple(ShiftRule):
        return ShiftRule(value)
    text = str(value)
    # Python raises for thousands of digits, before there is a number to compare.
    if not text.isdecimal() or len(text) > _SHOWN or int(text) > MOST_TOKENS:
        raise ShiftThresholdError(
            f"{text[:_SHOWN]!r} is no threshold: give 0 to {MOST_TOKENS} tokens, auto or off"
        )
    return int(text)


def tokens_for(
    threshold: ShiftThreshold, model: CostModel | None, layouts: Iterable[Layout]
) -> dict[Layout, int]:
    """Return the tokens above which steps run in SP, by layout; without those that never do.

    Args:
        threshold: what the node is set to.
        model: tells what ``AUTO`` means.
        layouts: those that can run SP.

    Raises:
        ShiftThresholdError: ``AUTO`` without a model.
    """
    if threshold is ShiftRule.OFF:
        return {}
    if not isinstance(threshold, ShiftRule):
        return dict.fromkeys(layouts, threshold)
    if model is None:
        raise ShiftThresholdError("auto needs a cost model, which this node has none of")
    found = {layout: _crossover(model, layout) for layout in layouts}
    return {layout: tokens for layout, tokens in found.items() if tokens is not None}


def _crossover(model: CostModel, layout: Layout) -> int | None:
    """Return the most tokens of a step that TP computes at least as fast; None: any number.

    By what devices and links take alone (see above). What SP saves never shrinks as a step gets
    longer, but for a member's padding.
    """

    def sp_is_faster(tokens: int) -> bool:
        batch = Batch(prefill_tokens=tokens)
        tp, sp = (model.device_seconds(layout, batch, mode) for mode in Mode)
        return sp < tp

    if not sp_is_faster(MOST_TOKENS):
        return None
    low, high = 0, MOST_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if sp_is_faster(middle) else (middle, high)
    return low


SHIFT = Policy("shift", STATIC_TP.plan, decides_layout=True, shifts=True)
"""The system of Shift Parallelism: fixed groups of the largest size, each step in TP or SP."""
