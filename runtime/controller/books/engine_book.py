"""The book of engines: the state of each engine, and which groups have communicators."""

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from shoal.policies.values.layouts import Layout, Unit
from shoal.policies.values.level import WHOLE, Level
from shoal.runtime.protocol import messages as m


class EngineState(enum.StrEnum):
    """The state of an engine."""

    STARTING = "starting"
    SERVING = "serving"
    SILENT = "silent"
    """It did not answer in time, and gets no work until it answers."""
    DEAD = "dead"


class Engine(msgspec.Struct, frozen=True):
    """One engine, as it is now."""

    number: int
    state: EngineState = EngineState.STARTING
    ready: m.EngineReady | None = None
    reason: str | None = None
    """Why it is silent or dead, or had to be restarted."""
    incarnation: int = 0
    """How often it was restarted."""
    returns: bool = False
    """Whether it is restarted after its death."""
    drained: bool = False
    """Whether an operator has taken it out; its death and return change nothing about that."""
    level: Level = WHOLE
    """Its level of memory."""
    weight_bytes: int = 0
    """Weights in its own memory."""

    @property
    def shares(self) -> m.Shares:
        """The levels that it can have."""
        return m.Shares() if self.ready is None else self.ready.shares

    @property
    def is_gone(self) -> bool:
        """Whether it died and is not back."""
        restarts = self.state is EngineState.STARTING and self.incarnation > 0
        return restarts or self.state is EngineState.DEAD

    @property
    def is_lost(self) -> bool:
        """Whether it died and will not be back."""
        return self.state is EngineState.DEAD and not self.returns


class EngineBook:
    """All engines of one node, by number.

    Args:
        engines: number of engines.
        returns: whether engines are restarted after their death.
        level: their level of memory at their start.
    """

    def __init__(self, engines: int, *, returns: bool = False, level: Level = WHOLE) -> None:
        self._engines = [Engine(n, returns=returns, level=level) for n in range(engines)]
        self._level = level
        self._ready: dict[int, m.EngineReady] = {}
        """What each engine said when it was ready last; ``Engine.ready`` has what is left of it."""
        self._formed_of: dict[Unit, tuple[int, ...]] = {}
        """For each group that was formed again: the incarnations of its engines at that time."""
        self._refused: dict[Unit, str] = {}
        self.refused: Mapping[Unit, str] = self._refused
        """Groups that could not be formed again, and why."""
        self._see()

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __getitem__(self, number: int) -> Engine:
        return self._engines[number]

    def _set(self, number: int, **changes: object) -> None:
        self._engines[number] = msgspec.structs.replace(self._engines[number], **changes)
        self._see()

    def _see(self) -> None:
        """Compute what every turn of the loop needs; it changes only when an engine does."""
        engines = self._engines
        self.started = all(engine.ready is not None for engine in engines)
        """Whether every engine has been ready."""
        self.gone = frozenset(engine.number for engine in engines if engine.is_gone)
        """Engines that died and are not back."""
        self.lost = frozenset(number for number in self.gone if engines[number].is_lost)
        """Engines that died and will not be back."""
        self.drained = frozenset(engine.number for engine in engines if engine.drained)
        """Engines that an operator has taken out."""
        self._have_tiers = all(e.ready.tier_blocks for e in engines if e.ready is not None)
        self._restarted = any(engine.incarnation for engine in engines)
        self._in_state = {
            state: frozenset(engine.number for engine in engines if engine.state is state)
            for state in EngineState
        }
        self.open = self._in_state[EngineState.SERVING] - self.drained
        """Engines on which requests may start."""

    # --- what happens to them -----------------------------------------------------------------

    def serve(self, ready: m.EngineReady) -> None:
        """Note that an engine is up, or up again, with its ready message."""
        self._ready[ready.engine] = ready
        self._set(
            ready.engine,
            ready=ready,
            state=EngineState.SERVING,
            reason=None,
            level=self._level,
            weight_bytes=ready.startup.weight_bytes,
        )

    def at_start(self, engine: int) -> m.EngineReady:
        """Return what an engine said when it was ready last."""
        return self._ready[engine]

    def resize(self, engine: int, blocks: int) -> None:
        """Note how many KV blocks requests of an engine may hold."""
        said = self._ready[engine]
        layouts = [
            msgspec.structs.replace(
                limits, max_model_len=min(limits.max_model_len, limits.tokens(blocks))
            )
            for limits in said.layouts
        ]
        smaller = msgspec.structs.replace(said, num_blocks=blocks, layouts=layouts)
        self._set(engine, ready=said if blocks == said.num_blocks else smaller)

    def have_level(self, engine: int, level: Level, weight_bytes: int) -> None:
        """Note which level of memory an engine has, and what weights take there."""
        self._set(engine, level=level, weight_bytes=weight_bytes)

    def silence(self, engines: Iterable[int], reason: str) -> None:
        """Note that engines do not answer."""
        for engine in engines:
            if self._engines[engine].state is EngineState.SERVING:
                self._set(engine, state=EngineState.SILENT, reason=reason)

    def hear(self, engine: int) -> bool:
        """Note that an engine answers; return whether it was silent before."""
        was_silent = self._engines[engine].state is EngineState.SILENT
        if was_silent:
            self._set(engine, state=EngineState.SERVING, reason=None)
        return was_silent

    def drain(self, engines: Iterable[int], *, drained: bool) -> None:
        """Note that an operator takes engines out, or lets them serve again."""
        for engine in engines:
            self._set(engine, drained=drained)

    def die(self, engines: Collection[int], reason: str) -> None:
        """Note that engines are dead."""
        for engine in engines:
            self._set(engine, state=EngineState.DEAD, reason=reason)

    def expect(self, engine: int, *, returns: bool) -> None:
        """Note whether an engine is restarted after its death."""
        self._set(engine, returns=returns)

    def restart(self, engine: int, incarnation: int) -> None:
        """Note that an engine's processes were restarted."""
        self._set(engine, incarnation=incarnation, state=EngineState.STARTING)

    # --- their state --------------------------------------------------------------------------

    def in_state(self, state: EngineState, *others: EngineState) -> frozenset[int]:
        """Return the engines in one of these states."""
        return self._in_state[state].union(*(self._in_state[other] for other in others))

    def serves(self, unit: Unit) -> bool:
        """Return whether every engine of the unit serves."""
        return all(self._engines[engine].state is EngineState.SERVING for engine in unit.engines)

    def takes(self, unit: Unit) -> bool:
        """Return whether requests may start on the unit: it serves, and no engine is drained."""
        return self.open.issuperset(unit.engines)

    def limits(self, unit: Unit) -> m.LayoutLimits:
        """Return what a unit's layout can hold.

        Raises:
            LookupError: the unit's leader is not ready, or does not know the layout.
        """
        return self._limits(unit.leader, unit.layout)

    def limits_of(self, layout: Layout) -> m.LayoutLimits:
        """Return what a layout can hold, as the first engine says.

        Raises:
            LookupError: the first engine is not ready, or does not know the layout.
        """
        return self._limits(0, layout)

    def _limits(self, engine: int, layout: Layout) -> m.LayoutLimits:
        ready = self._engines[engine].ready
        for limits in ready.layouts if ready is not None else ():
            if limits.layout == layout:
                return limits
        raise LookupError(f"engine {engine} knows no limits of {layout.name}")

    def num_blocks(self, engine: int) -> int:
        """Return the size of an engine's pool; 0 before it is ready."""
        ready = self._engines[engine].ready
        return 0 if ready is None else ready.num_blocks

    def tier_blocks(self, engine: int) -> int:
        """Return the size of an engine's tier; 0 if there is none that all engines can read."""
        ready = self._engines[engine].ready
        return ready.tier_blocks if ready is not None and self._have_tiers else 0

    # --- groups of them -----------------------------------------------------------------------

    def incarnations(self, unit: Unit) -> tuple[int, ...]:
        """Return how often each engine of a group was restarted."""
        return tuple(self._engines[engine].incarnation for engine in unit.engines)

    def is_formed(self, unit: Unit) -> bool:
        """Return whether a group has communicators among its engines as they are now."""
        formed = self._formed_of.get(unit, (0,) * unit.size)
        return not unit.is_group or formed == self.incarnations(unit)

    def unformed(self, units: Iterable[Unit]) -> list[Unit]:
        """Return those of these groups that are not formed; before any death there are none."""
        if not self._restarted:
            return []
        return [unit for unit in units if not self.is_formed(unit)]

    def form(self, unit: Unit, members: tuple[int, ...]) -> None:
        """Note that a group was formed of these incarnations of its engines."""
        self._formed_of[unit] = members

    def refuse(self, unit: Unit, reason: str) -> None:
        """Note that a group's members, as they are now, cannot form it."""
        self._refused[unit] = reason

    def retry(self, unit: Unit) -> None:
        """Note that a group's members may try again, because they are other incarnations now."""
        self._refused.pop(unit, None)
