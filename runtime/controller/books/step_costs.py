"""What is known of the times of steps and copies: the cost model, as measured ones correct it."""

from dataclasses import replace

from shoal.policies.cost.correction import Correction
from shoal.policies.cost.cost_model import CostModel
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Unit
from shoal.policies.values.level import Level, slowest
from shoal.runtime.config import NodeConfig
from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.core_book import CoreBook, steps_between
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages.views import CorrectionView

PORTABLE_SHARE = 0.4
"""Share of the room that a unit has that may be filled with what another unit has cached. While it
is copied it lies in two places, beside what running requests take."""
PORTABLE_SECONDS = 0.5
"""For so long a switch may wait for the copy, which goes through the host on some nodes."""


class StepCosts:
    """Keeps the cost model.

    Attributes:
        model: the cost model; None: the node has none.

    Args:
        config: the node.
        books: engines and units.
    """

    def __init__(self, config: NodeConfig, books: Books) -> None:
        self.model: CostModel | None = config.cost_model
        self._layouts = config.layouts
        self._copies_ahead = config.copies_ahead
        self._engines = books.engines
        self._units = books.units
        self._partition = self._units.partition
        self._begun: set[Unit] = set()
        """Units that a switch has made, and that have not reported a step since."""

    def see_graphs(self) -> None:
        """Take note of groups whose hosts launch a step with prompts at once, by a full graph.

        All engines are ready.
        """
        limits = [self._engines.limits_of(layout) for layout in self._layouts[1:]]
        if self.model is not None and limits and all(each.full_graph_tokens for each in limits):
            launched = replace(self.model.hardware, tp_layer_host_seconds=0.0)
            self.model = replace(self.model, hardware=launched)

    def have_level(self, level: Level) -> None:
        """Take note of the node's level of memory, on which step times depend."""
        if self.model is not None:
            self.model = self.model.at(level)

    def portable_tokens(self, unit: Unit, room: int) -> int:
        """Return how many cached tokens of ended requests a switch takes along from a unit.

        Args:
            unit: the unit.
            room: tokens for which it has free blocks, without those that its running requests take
                in their next units.
        """
        if not self._copies_ahead:
            return 0
        tokens = max(0.0, PORTABLE_SHARE * room)
        if self.model is not None:
            tokens = min(tokens, PORTABLE_SECONDS / self.model.carry_seconds(1, unit.size))
        return int(tokens)

    def observe(self, core: CoreBook, load: m.Load) -> m.Work:
        """Learn from the steps between a core's last report and this one; return their work."""
        known = m.Work()
        if core.load is None:
            return known
        learns = self.model is not None and not self._begins(core, load)
        for mode, news in steps_between(core.load, load):
            known += news
            if self.model is not None:
                seen = self.model.speculation.see(news.decodes, news.drafts, news.accepted)
                self.model = replace(self.model, speculation=seen)
            if learns:
                self._learn(core.unit, news.mean, news.seconds / news.steps, mode)
        return known

    def _learn(self, unit: Unit, mean: Batch, seconds: float, mode: Mode) -> None:
        """Correct the model by a step of a unit, whose engines may not have followed yet.

        A step waits for the member that reads most weights from others.
        """
        assert self.model is not None
        level = self.model.level
        there = self.model.at(slowest(self._engines[engine].level for engine in unit.engines))
        self.model = there.observe(unit.layout, mean, seconds, mode).at(level)

    def _begins(self, core: CoreBook, load: m.Load) -> bool:
        """Return whether a report has the first steps of a unit that a switch has made.

        They also waited for what its devices still computed for other units, and say little.
        """
        partition = self._units.partition
        if partition != self._partition:
            self._begun |= set(partition).difference(self._partition)
            self._begun &= set(partition)
            self._partition = partition
        if core.unit not in self._begun or core.load is None or load.steps == core.load.steps:
            return False
        self._begun.discard(core.unit)
        return True

    def observe_copy(self, source: Unit, copied: m.Imported) -> None:
        """Learn how fast KV goes through the host, which nobody knows before.

        How fast GPUs read each other is known, and copies by both ways say little of either.
        """
        if self.model is not None and copied.host_bytes * 2 > copied.bytes:
            links = min(source.size, copied.unit.size)
            self.model = self.model.observe_carry(copied.bytes, copied.seconds, links)

    @property
    def errors(self) -> dict[str, float]:
        """Smoothed relative error of the predictions of steps (``messages.LayoutView``)."""
        return {_name(correction): correction.error for correction in self._present}

    @property
    def corrections(self) -> dict[str, CorrectionView]:
        """What measured steps correct (``messages.LayoutView``)."""
        return {_name(one): CorrectionView(*one.line, one.samples) for one in self._present}

    @property
    def _present(self) -> list[Correction]:
        """The corrections of steps that share weights as they do now."""
        model = self.model
        if model is None:
            return []
        return [c for c in model.corrections if c.streams == model.streams(c.layout, c.mode)]

    @property
    def hidden_above(self) -> dict[str, int]:
        """From how many tokens on steps hide what they read from others (``LayoutView``)."""
        model = self.model
        if model is None:
            return {}
        streaming = filter(model.streams, self._layouts)
        return {layout.name: model.hidden_above(layout) for layout in streaming}


def _name(steps: Correction) -> str:
    name = steps.layout.name
    return f"{name} {steps.kind}" if steps.mode is Mode.TP else f"{name} sp {steps.kind}"
