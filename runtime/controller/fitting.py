"""The fit at start: steps of every layout but pipelines are timed before the node is ready.

The engines compute made-up requests (``engine.agent.trials``), first alone and then in groups of
each kind, so steps go through the real scheduler, attention and collectives. What they took becomes
the cost model's corrections. Nothing else runs meanwhile; requests that come wait in the pool.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median_low
from typing import NamedTuple

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.values.batch import Batch, Mode, StepKind
from shoal.policies.values.layouts import Layout, Unit, alone
from shoal.policies.values.partition import Partition, singles, units_of
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.core_book import CoreBook, steps_between
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.operations import Operations
from shoal.runtime.fit_file import FitFileError, write_fit
from shoal.runtime.protocol import messages as m

log = logging.getLogger("shoal.controller")

OUTPUT_TOKENS = 8
"""Tokens that each request gets: the steps after the first one decode."""
WARM_UP = (1, 64)
"""What a layout computes first, untimed, because first steps load and compile what they need."""
WAVES = ((1, 128), (8, 256), (1, 2048), (32, 256), (1, 8192), (64, 512), (4, 4096), (1, 1024))
"""Requests that are computed together, and the prompt tokens of each."""
ROUNDS = 2
"""How often a layout computes all waves, if there is time."""
SHARE = 0.8
"""Most of a unit's KV blocks that a wave takes."""
FIRST_SECONDS = 60.0
"""How long a layout's warm-up may take, and its first wave, whatever the time of the whole fit: a
first step may compile, and something is to be known of each layout."""
STOP_SECONDS = 10.0
"""How long engines may take to forget a trial."""


class _Steps(NamedTuple):
    """Which steps count as alike: those of one wave, and of about the same work."""

    layout: Layout
    mode: Mode
    kind: StepKind
    wave: tuple[int, int]
    tokens: int
    context: int


class Fitting:
    """Times the steps of every layout once, when all engines are up.

    Args:
        env: the node, the way to its engines, and the time.
        books: engines and units.
        capacity: has the cost model.
        operations: switches from layout to layout.
    """

    def __init__(
        self, env: Environment, books: Books, capacity: Capacity, operations: Operations
    ) -> None:
        self._env = env
        self._settings = env.config.fit
        self._books = books
        self._capacity = capacity
        self._operations = operations
        self._course: Iterator[None] | None = None
        if self._settings.seconds > 0 and capacity.costs.model is not None:
            self._course = self._run()
        self._measured: dict[_Steps, list[tuple[Batch, float]]] = defaultdict(list)
        self._wave: tuple[int, int] | None = None
        """What is computed and timed now."""
        self._number = 0
        self._awaiting: set[int] = set()
        self.deadline: float | None = None
        """When something is due even if no message comes."""
        self.costs = "cached" if self._settings.cached else "assumed"
        """Where the corrections of the cost model come from at first (``LayoutView``)."""

    @property
    def running(self) -> bool:
        """Whether the node is not ready yet because steps are timed, or will be."""
        return self._course is not None

    def tick(self) -> None:
        """Do what is due; all engines have been ready."""
        if self._course is not None and next(self._course, self) is self:
            self._course = self.deadline = None

    def see(self, core: CoreBook, load: m.Load) -> None:
        """Note the steps between a core's last report and this one."""
        if core.load is None or self._wave is None:
            return
        layout = core.unit.layout
        for mode, news in steps_between(core.load, load):
            mean = news.mean
            sizes = (mean.tokens.bit_length(), mean.prefill_context.bit_length())
            steps = _Steps(layout, mode, mean.kind, self._wave, *sizes)
            self._measured[steps].append((mean, news.seconds / news.steps))

    def tried(self, message: m.Tried) -> bool:
        """Take an engine's answer; return whether it was expected."""
        if message.number != self._number or message.engine not in self._awaiting:
            return False
        self._awaiting.discard(message.engine)
        if message.error:
            log.warning("engine %d could not time steps: %s", message.engine, message.error)
        return True

    # --- the course ---------------------------------------------------------------------------

    @property
    def _broken(self) -> bool:
        """Whether an engine was lost, and may be back already, or an operator took it out."""
        engines = self._books.engines
        restarted = any(engine.incarnation for engine in engines)
        return bool(engines.gone or engines.drained) or restarted

    def _run(self) -> Iterator[None]:
        """Go through the layouts; every turn of the loop goes as far as it can."""
        # Steps of a pipeline overlap: the time from end to end of two is no step's time.
        layouts = [layout for layout in self._env.config.layouts if layout.pp == 1]
        began = self._env.clock()
        for number, layout in enumerate(layouts, 1):
            until = began + self._settings.seconds * number / len(layouts)
            yield from self._switch(self._partition_of(layout))
            units = [unit for unit in self._books.units.partition if unit.layout == layout]
            if units and not self._broken:
                yield from self._time(layout, units, until)
        yield from self._switch(singles(self._env.config.engines))
        if self._broken:
            log.warning("an engine was lost or drained while steps were timed: some are not known")
        self._conclude(self._env.clock() - began)

    def _partition_of(self, layout: Layout) -> Partition:
        units = units_of(self._env.config.engines, layout)
        covered = {engine for unit in units for engine in unit.engines}
        rest = (e for e in range(self._env.config.engines) if e not in covered)
        return tuple(sorted([*units, *map(alone, rest)]))

    def _switch(self, target: Partition) -> Iterator[None]:
        while not self._operations.is_idle:
            yield
        here = self._books.units.partition
        if here == target or (self._broken and any(unit.is_group for unit in target)):
            return
        self._operations.switches.start_for_fit(target)
        while self._operations.switches.running is not None:
            yield

    def _time(self, layout: Layout, units: Sequence[Unit], until: float) -> Iterator[None]:
        limits = self._books.engines.limits_of(layout)
        blocks = min(self._books.engines.num_blocks(e) for unit in units for e in unit.engines)
        room = int(SHARE * limits.tokens(blocks))
        if warm_up := _fitted(WARM_UP, limits, room):
            yield from self._try(units, warm_up, self._env.clock() + FIRST_SECONDS)
        waves = dict.fromkeys(_fitted(wave, limits, room) for wave in WAVES)
        for number, wave in enumerate([*filter(None, waves)] * ROUNDS):
            now = self._env.clock()
            if self._broken or (number and now >= until):
                break
            self._wave = wave
            yield from self._try(units, wave, until if number else now + FIRST_SECONDS)
            self._wave = None

    def _try(self, units: Sequence[Unit], wave: tuple[int, int], until: float) -> Iterator[None]:
        """Compute a wave on each of the units; give it up when the time is over."""
        count, tokens = wave
        self._send(units, [tokens] * count, until)
        while self._awaiting and not self._broken and self._env.clock() < until:
            yield
        if self._awaiting:
            # What is left on engines that live would keep its blocks when its unit is regrouped.
            self._wave, until = None, self._env.clock() + STOP_SECONDS
            self._send(units, [], until)
            while self._awaiting - self._books.engines.gone and self._env.clock() < until:
                yield
            self._awaiting.clear()
        self.deadline = None

    def _send(self, units: Sequence[Unit], prompts: list[int], until: float) -> None:
        self._number += 1
        self._awaiting = {unit.leader for unit in units} - self._books.engines.gone
        self.deadline = until
        for unit in units:
            if unit.leader in self._awaiting:
                trial = m.Try(self._number, unit, prompts, OUTPUT_TOKENS)
                self._env.transport.to_engine(unit.leader, trial)

    # --- the result ---------------------------------------------------------------------------

    def _conclude(self, seconds: float) -> None:
        before = self._capacity.costs.model
        assert before is not None
        points = defaultdict[tuple[Layout, Mode, StepKind], list[tuple[Batch, float]]](list)
        for steps, measured in self._measured.items():
            points[steps.layout, steps.mode, steps.kind].append(_median(measured))
        model = before
        # What steps that read weights from peers add is on top of what others say of computing.
        for layout, mode, kind in sorted(points, key=lambda at: (before.streams(*at[:2]), at)):
            model = model.fit(layout, mode, kind, points[layout, mode, kind])
        self._capacity.costs.model = model
        if not points:
            log.warning("no steps could be timed: their times are assumed")
            return
        self.costs = "fitted"
        log.info("steps timed in %.1f s: %s", seconds, _report(before, model, points))
        self._keep(model)

    def _keep(self, model: CostModel) -> None:
        if self._settings.file is None or self._broken:
            return
        try:
            write_fit(Path(self._settings.file), self._settings.key, model.corrections)
        except FitFileError as error:
            log.warning("the step times are not kept: %s", error)


def _fitted(wave: tuple[int, int], limits: m.LayoutLimits, room: int) -> tuple[int, int] | None:
    """Return a wave that a unit holds: as many of these requests, as long, as it can."""
    count, tokens = wave
    tokens = min(tokens, limits.max_model_len - OUTPUT_TOKENS, room - OUTPUT_TOKENS)
    if tokens < 1:
        return None
    count = min(count, limits.max_num_seqs, room // (tokens + OUTPUT_TOKENS))
    return count, tokens


def _median(measured: Sequence[tuple[Batch, float]]) -> tuple[Batch, float]:
    """Return the step of median time; of two the shorter, as the other may have compiled."""
    middle = median_low(seconds for _, seconds in measured)
    return next(one for one in measured if one[1] == middle)


def _report(
    before: CostModel,
    after: CostModel,
    points: dict[tuple[Layout, Mode, StepKind], list[tuple[Batch, float]]],
) -> str:
    """Return the mean errors of the predictions before and after, for people."""

    def error(model: CostModel, key: tuple[Layout, Mode, StepKind]) -> float:
        layout, mode, _ = key
        pairs = (
            (model.whole_step_seconds(layout, batch, mode), took) for batch, took in points[key]
        )
        return fmean(abs(math.log(predicted / took)) for predicted, took in pairs)

    return ", ".join(
        f"{key[0].name} {'sp ' if key[1] is Mode.SP else ''}{key[2]} off by "
        f"{math.expm1(error(before, key)):.0%} before, {math.expm1(error(after, key)):.0%} now"
        for key in sorted(points)
    )
