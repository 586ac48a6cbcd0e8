"""The number of tokens above which a group's step runs in SP, and the policy that only shifts.

Shift Parallelism (3.3) uses one fixed number of tokens. If the node knows its hardware, the cost
model can give the number: the size from which SP is faster. This uses the roofline without its
corrections. Each mode is measured only on its own side of the threshold, so corrections would
confirm the current threshold.

The time of the host does not count either, because the model knows it only for steps in SP. These
replay CUDA graphs between the attention of two layers, while steps in TP with as many tokens have
no graphs and wait longer for the host. If graphs are turned off, SP may need more tokens to be
faster, so set a number in that case.

Where engines share weights, a member reads more of them from others in SP than in TP. Until a step
hides this, SP is slower, so the cost model then also bounds a fixed number from below.
"""

import enum
from collections.abc import Iterable

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.static import STATIC_TP
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout
from shoal.policies.values.plan import Policy

DEFAULT_THRESHOLD = 256
"""Shoal's own choice, because the paper does not state its number."""
MOST_TOKENS = 1 << 20
"""Highest threshold; no step batches more tokens."""
_SHOWN = 40
"""Characters of a wrong value that its error message repeats."""


class ShiftRule(enum.StrEnum):
    """What a threshold may be instead of a number of tokens."""

    AUTO = "auto"
    """The number comes from the cost model's times of devices and links."""
    OFF = "off"
    """Every step runs in TP."""


ShiftThreshold = int | ShiftRule
"""The number of tokens above which a step runs in SP, or a rule for it."""


class ShiftThresholdError(ValueError):
    """A threshold that is not possible; the message is one line."""


def parse_threshold(value: int | str) -> ShiftThreshold:
    """Return the threshold that a user means.

    Raises:
        ShiftThresholdError: the value is neither a number of tokens nor ``auto`` nor ``off``.
    """
    if value in tuple(ShiftRule):
        return ShiftRule(value)
    text = str(value)
    # For thousands of digits ``int`` raises an error, so the length is checked first.
    if not text.isdecimal() or len(text) > _SHOWN or int(text) > MOST_TOKENS:
        raise ShiftThresholdError(
            f"{text[:_SHOWN]!r} is no threshold: give 0 to {MOST_TOKENS} tokens, auto or off"
        )
    return int(text)


def tokens_for(
    threshold: ShiftThreshold, model: CostModel | None, layouts: Iterable[Layout]
) -> dict[Layout, int]:
    """Return the tokens above which steps run in SP, by layout. Layouts without SP are left out.

    Args:
        threshold: the node's setting.
        model: the cost model that ``AUTO`` needs, and that knows what steps read from others.
        layouts: the layouts that can run SP.

    Raises:
        ShiftThresholdError: the threshold is ``AUTO`` and there is no model.
    """
    if threshold is ShiftRule.OFF:
        return {}
    if isinstance(threshold, ShiftRule):
        if model is None:
            raise ShiftThresholdError("auto needs a cost model, and this node has none")
        found = {layout: _crossover(model, layout) for layout in layouts}
        return {layout: tokens for layout, tokens in found.items() if tokens is not None}
    least = {
        layout: _crossover(model, layout) if model and model.streams(layout, Mode.SP) else 0
        for layout in layouts
    }
    return {layout: max(threshold, above) for layout, above in least.items() if above is not None}


def _crossover(model: CostModel, layout: Layout) -> int | None:
    """Return the most tokens of a step that TP computes at least as fast as SP; None: any number.

    Only the times of devices and links count (see the module). Apart from the padding of a member,
    the time that SP saves never shrinks as a step gets longer.
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
"""Shift Parallelism's system: fixed groups of the largest size, with each step in TP or SP."""
