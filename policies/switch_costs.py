"""What a switch costs: for how long it stops requests, and what caches lose."""

import math
from collections.abc import Sequence

from shoal.policies.foresight import EmptyCaches
from shoal.policies.unit_costs import prices_of
from shoal.policies.values.batch import Batch
from shoal.policies.values.kv_need import blocks_for
from shoal.policies.values.partition import Partition
from shoal.policies.values.snapshot import Snapshot, StepPredictor, UnitState

USUAL_REQUESTS = 16
"""Requests of the usual length that are added to the present ones, because a few requests say
little about the next ones."""
LEAST_ROOM = 0.15
"""Share of a unit's KV blocks that, if free, suffices for any requests to be carried away."""
TIGHT_ROOM = 0.02
"""Share that suffices if it also holds the longest request ``AT_ONCE`` times."""
AT_ONCE = 2
"""Requests take turns where KV is nearly full: one is read while another one's blocks come free."""
SWITCH_SECONDS = 0.004
"""Seconds of a switch beyond the step that is computed and the copies: messages and launches."""
CACHE_SECONDS = 60.0
"""For how long the loss of caches counts at most. In Mooncake's conversation trace half of what is
found was last used more than 105 s before, and a third within a minute."""


class SwitchCosts:
    """Judges switches of the node of one snapshot.

    Args:
        snapshot: the node.
        model: predicts the times of steps and copies.
    """

    def __init__(self, snapshot: Snapshot, model: StepPredictor) -> None:
        self.snapshot = snapshot
        self._model = model

    def stop_seconds(self, candidate: Partition) -> float:
        """Return the seconds for which a switch stops the requests that it moves.

        Of the longest of n units' steps n / (n + 1) is left in the mean. A step that was scheduled
        ahead follows (``Snapshot.schedules_ahead``). Then the new units read from the old ones what
        was not copied ahead (``Snapshot.copies_ahead``).
        """
        moved = [unit for unit in self.snapshot.units if unit.unit not in candidate]
        busy = [unit for unit in moved if unit.requests]
        if not busy:
            return SWITCH_SECONDS
        steps = len(busy) / (len(busy) + 1) + self.snapshot.schedules_ahead
        longest = max(map(self._step_seconds, busy))
        return SWITCH_SECONDS + steps * longest + self._copy_seconds(candidate, moved, longest)

    def loss(self, candidate: Partition, lately: float) -> float:
        """Return what a switch costs, in seconds of requests.

        The switch stops the requests. Those that are there then wait until the caches that it has
        lost are filled.

        Args:
            candidate: to which the node changes.
            lately: as many requests as were there lately.
        """
        stop = self.stop_seconds(candidate) * self.snapshot.requests
        return stop + self.refill_seconds() * (1 + lately)

    def refill_seconds(self) -> float:
        """Return the seconds in which the node computes again what the caches lose in a switch.

        It is the least of three numbers of tokens: what requests find within ``CACHE_SECONDS``,
        what the switch leaves behind, and what was used too long ago to be taken along. What is
        used again soon, such as a beginning that all prompts share, is lost only once. How much is
        used again only after longer than the node was watched is a guess: as much between a time
        and its double as between a quarter and half of the time until now. Mooncake's chats go on
        like that.
        """
        snapshot, latest = self.snapshot, self._tokens_taken_along
        rate = self._whole_prompt * snapshot.usual_rate
        found = CACHE_SECONDS * snapshot.hit_share * rate
        unseen = max(0.0, CACHE_SECONDS * rate - max(latest, snapshot.watched_tokens / 2))
        unknown = snapshot.late_share / math.log(2) * unseen
        lost = snapshot.lost_tokens
        if lost:
            lost *= math.exp(-latest * snapshot.hit_share / lost)
        # All units compute at once.
        token = prices_of(snapshot, snapshot.units[0].unit.layout).prompt / len(snapshot.units)
        return min(found, self._tokens_left_behind, lost + unknown) * token

    @property
    def _output_tokens(self) -> float:
        """Tokens of the mean output."""
        return max(1.0, self.snapshot.output_tokens)

    @property
    def _tokens_left_behind(self) -> int:
        """The cached tokens that a switch does not take along."""
        units = self.snapshot.units
        return sum(max(0, of_ended(unit) - unit.portable_tokens) for unit in units)

    @property
    def _whole_prompt(self) -> float:
        """Tokens of the mean prompt, those that it finds in a cache included."""
        return self.snapshot.prompt_tokens / max(0.1, 1 - self.snapshot.hit_share)

    @property
    def _tokens_taken_along(self) -> float:
        """The latest tokens of prompts of which a switch takes along all that is cached."""
        snapshot = self.snapshot
        tokens = sum(map(of_ended, snapshot.units)) - self._tokens_left_behind
        return (
            tokens * self._whole_prompt / max(1.0, snapshot.prompt_tokens + snapshot.output_tokens)
        )

    def empty_caches(self) -> EmptyCaches:
        """Return what requests find after a switch, in which caches are left behind.

        How long ago it was last used is taken to be distributed exponentially.
        """
        share, lost = self.snapshot.hit_share, self.snapshot.lost_tokens
        if not (share and self._tokens_left_behind):
            return EmptyCaches(0.0)
        return EmptyCaches(lost / share, round(self._tokens_taken_along))

    def has_room(self, candidate: Partition) -> bool:
        """Return whether the requests that a switch moves can take their KV along.

        While it is copied it lies in two places. Without room for that it would be computed again.
        """
        moved = [unit for unit in self.snapshot.units if unit.unit not in candidate]
        return all(_has_room(unit) for unit in moved if unit.running)

    def _step_seconds(self, unit: UnitState) -> float:
        """Return the seconds of a unit's next step, with requests of the usual length."""
        context = round(usual_prompt(self.snapshot) + self._output_tokens / 2)
        layout, running = unit.unit.layout, max(1, unit.running)
        prompts = min(self.snapshot.chunk(layout), unit.prefill_tokens + unit.begun.tokens)
        before = round(usual_prompt(self.snapshot) / 2) if prompts else 0
        batch = Batch(running, running * context, prompts, before)
        return self._model.step_seconds(layout, batch, self.snapshot.mode(layout, batch))

    def _copy_seconds(self, candidate: Partition, moved: Sequence[UnitState], step: float) -> float:
        """Return the seconds of the copies: units read at once, each from one other at a time.

        Args:
            candidate: to which the node changes.
            moved: the units that it lacks.
            step: seconds of the longest step of one of them.
        """
        engines = {engine for unit in moved for engine in unit.unit.engines}
        readers = [unit for unit in candidate if engines.intersection(unit.engines)]
        widest = max(unit.unit.size for unit in moved)
        links = max(1, sum(min(unit.size, widest) for unit in readers))
        computed = sum(unit.context_tokens - unit.prefill_tokens for unit in moved)
        tokens = computed + sum(unit.running for unit in moved) * self._output_tokens / 2
        seconds = self._model.carry_seconds(tokens, links)
        if not self.snapshot.copies_ahead:
            return seconds
        steps = 1 + seconds / step
        last = sum(self._last_tokens(unit, steps) for unit in moved)
        return min(seconds, self._model.carry_seconds(last, links))

    def _last_tokens(self, unit: UnitState, steps: float) -> float:
        """Return the tokens of a unit's requests that are not copied while the unit computes.

        They are those of the last steps and of blocks that are not full, and those for which there
        is no room in two places.

        Args:
            unit: the unit.
            steps: of the unit while most is copied, and until it stops.
        """
        prompts = min(
            unit.prefill_tokens + unit.begun.tokens, steps * self.snapshot.chunk(unit.unit.layout)
        )
        free = free_of_kv(unit)
        without_room = max(0, unit.total_blocks - 2 * free) * unit.block_tokens
        return prompts + unit.running * (unit.block_tokens / 2 + steps) + without_room


def of_ended(unit: UnitState) -> int:
    """Return the tokens that a unit has cached of requests which have ended."""
    return max(0, unit.cached_tokens - unit.context_tokens)


def _has_room(unit: UnitState) -> bool:
    """Return whether enough of a unit's blocks are free for its requests to be carried away."""
    longest = blocks_for(unit.longest_tokens, unit.block_tokens, unit.group_limits)
    tight = max(TIGHT_ROOM * unit.total_blocks, AT_ONCE * longest)
    return free_of_kv(unit) >= min(LEAST_ROOM * unit.total_blocks, tight)


def free_of_kv(unit: UnitState) -> int:
    """Return the blocks of a unit in which no running request has KV.

    Those of prompts that wait are not free for others, but have no KV that a switch would copy.
    """
    waiting = (blocks_for(n + 1, unit.block_tokens, unit.group_limits) for n in unit.prompts)
    return unit.free_blocks + sum(waiting)


def usual_prompt(snapshot: Snapshot) -> float:
    """Return the prompt tokens of the mean request, from the present and the latest requests."""
    here = snapshot.waiting_tokens + sum(unit.context_tokens for unit in snapshot.units)
    return (here + USUAL_REQUESTS * snapshot.prompt_tokens) / (snapshot.requests + USUAL_REQUESTS)
