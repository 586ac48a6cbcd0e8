"""The node's threshold for SP, which every engine is told: larger steps run in SP."""

from collections.abc import Mapping
from functools import cached_property

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.shift import ShiftThreshold, ShiftThresholdError, tokens_for
from shoal.policies.values.layouts import Layout
from shoal.policies.values.level import Level
from shoal.policies.values.plan import Policy
from shoal.runtime.controller.books.engine_book import EngineBook, EngineState
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.protocol.messages import SetShift
from shoal.runtime.protocol.messages.views import ShiftView


class Shifting:
    """Keeps the threshold of the shift between TP and SP.

    Args:
        env: the node, and the transport to its engines.
        engines: the engines, and which of their layouts can run SP.

    Raises:
        ShiftThresholdError: the threshold needs a cost model, and the node has none.
    """

    def __init__(self, env: Environment, engines: EngineBook) -> None:
        self._config = env.config
        self._model = env.config.cost_model
        self._transport = env.transport
        self._engines = engines
        self._shifts = True
        self._threshold: ShiftThreshold
        self._tokens: dict[Layout, int]
        self._take(env.config.shift_threshold)

    def set(self, threshold: ShiftThreshold) -> None:
        """Change the threshold for all steps that are scheduled from now on.

        Raises:
            ShiftThresholdError: the node has no SP, or lacks the cost model that it needs.
        """
        if self._config.max_sp == 1:
            raise ShiftThresholdError("this node was started without SP (--max-sp)")
        self._take(threshold)
        self._tell_all()

    def follow(self, policy: Policy) -> None:
        """Obey a policy, which may keep its groups in TP."""
        self._shifts = policy.shifts
        self._tell_all()

    def have_level(self, level: Level) -> None:
        """Take note of the node's level of memory: steps in SP may read weights of others."""
        if self._model is not None:
            self._model = self._model.at(level)
            self._take(self._threshold)
            self._tell_all()

    def greet(self, engine: int) -> None:
        """Send an engine the threshold; before it has one, the engine runs no step in SP."""
        if self._config.max_sp > 1:
            self._transport.to_engine(engine, SetShift(list(self._wanted.items())))

    def _take(self, threshold: ShiftThreshold) -> None:
        self._tokens = self._tokens_for(threshold, self._model)
        self._threshold = threshold

    def _tokens_for(self, threshold: ShiftThreshold, model: CostModel | None) -> dict[Layout, int]:
        layouts = self._config.layouts[1:] if self._config.max_sp > 1 else ()
        return tokens_for(threshold, model, layouts)

    def _tell_all(self) -> None:
        for engine in sorted(self._engines.in_state(EngineState.SERVING, EngineState.SILENT)):
            self.greet(engine)

    @property
    def _wanted(self) -> dict[Layout, int]:
        return self._tokens if self._shifts else {}

    @property
    def sp_above(self) -> tuple[tuple[Layout, int], ...]:
        """See ``Snapshot.sp_above``."""
        return self._above(self._wanted)

    def sp_above_with(self, level: Level) -> tuple[tuple[Layout, int], ...]:
        """Return what it would be at another level of memory."""
        if self._model is None:
            return self.sp_above
        model = self._model.at(level)
        return self._above(self._tokens_for(self._threshold, model) if self._shifts else {})

    def _above(self, wanted: Mapping[Layout, int]) -> tuple[tuple[Layout, int], ...]:
        return tuple(
            (layout, max(floor, wanted[layout]))
            for layout, floor in self._floors.items()
            if floor is not None and layout in wanted
        )

    @cached_property
    def _floors(self) -> dict[Layout, int | None]:
        """The layouts' floors, narrowest first; they never change once all engines are ready."""
        return {each: self._engines.limits_of(each).sp_floor for each in self._config.layouts}

    @property
    def view(self) -> ShiftView:
        """Return the node's setting, and the thresholds that follow from it."""
        above = self.sp_above if self._engines.started else ()
        by_name = {layout.name: tokens for layout, tokens in above}
        return ShiftView(self._threshold, self._config.max_sp, by_name)
