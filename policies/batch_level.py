"""At which level of memory the requests that wait are served soonest, for the policy ``batch``.

Where engines share weights, narrow layouts read weights from others in every step. If each engine
has the layers of its stage of a pipeline whole, this pipeline reads nothing. That takes less memory
than whole weights, so it leaves more room for KV. Each level is judged by the partition, or the
cycle, that serves most requests per second at it, and by what the change to it takes.
"""

import math

from shoal.policies.cycle import best_cycle
from shoal.policies.share_level import STOP_SECONDS, at_level
from shoal.policies.throughput import SWITCH_SECONDS, Work, holds, partitions, prompts_left
from shoal.policies.unit_costs import prices_of
from shoal.policies.values.batch import StepKind
from shoal.policies.values.layouts import DP
from shoal.policies.values.snapshot import ShareLevel, Snapshot, StepPredictor

LEAST_GAIN = 1.1
"""How many times as long the requests must take at the present level as at another one, the change
to it included."""


def best_level(
    snapshot: Snapshot, model: StepPredictor, work: Work, gain: float
) -> ShareLevel | None:
    """Return the level to change to; None: the present one is about the best.

    Args:
        snapshot: the node.
        model: its steps at the present level.
        work: the mean request.
        gain: the same as ``LEAST_GAIN``, if it is larger.
    """
    if not snapshot.share_levels:
        return None
    seconds = {
        level: _seconds(at_level(snapshot, level), level.cost_model, work)
        + _price(snapshot, model, level)
        for level in snapshot.share_levels
    }
    best = min(seconds, key=seconds.__getitem__)
    here = _seconds(snapshot, model, work)
    return best if max(gain, LEAST_GAIN) * seconds[best] < here else None


def _seconds(snapshot: Snapshot, model: StepPredictor, work: Work) -> float:
    """Return how long the requests that wait take; infinity: one of them finds no room."""
    rates = [rate for units, rate in partitions(snapshot, model, work) if holds(snapshot, units)]
    most = max([*rates, best_cycle(snapshot, model, work)[0]])
    return prompts_left(snapshot) / most if most else math.inf


def _price(snapshot: Snapshot, model: StepPredictor, level: ShareLevel) -> float:
    """Return the seconds that a change takes, with the switch that follows it.

    What engines get whole is read over the links, as by a step of DP that has to read it. Of the
    KV, what finds no room at the new level is computed again.
    """
    here, there = (each.pace(DP, StepKind.DECODE).fetch for each in (model, level.cost_model))
    blocks = {state.layout: state.total_blocks for state in level.layouts}
    again = 0.0
    for unit in snapshot.units:
        layout, used = unit.unit.layout, unit.total_blocks - unit.free_blocks
        lost = max(0, used - blocks.get(layout, used)) * unit.block_tokens
        again = max(again, lost * prices_of(snapshot, layout).prompt if lost else 0.0)
    return max(0.0, here - there) + again + STOP_SECONDS + SWITCH_SECONDS
