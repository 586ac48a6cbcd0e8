"""The time from the decision to bind to the group's first step, with every engine decoding.

Runners note when that step began on their devices (``runtime/protocol/recording.py``), so this
needs a node that records. The rounds are those of ``switch-loaded``, but the group also has a
request of its own, which goes on in each round. So the group has a step to run at once: a request
that a client sends may take longer to arrive than the bind takes.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.loadgen.bench.breakdown import POLL_SECONDS, NotRecordedError
from shoal.loadgen.bench.measures import Bench, Round, Sizes, loaded_rounds, spread, switch
from shoal.loadgen.bench.systems import System
from shoal.loadgen.bench.token_client import Answer, Client
from shoal.runtime.protocol.recording import BoundPhase, read_phases

FIRST_STEP = "first-step"
"""Name of the measure."""
RESIDENT_PROMPT = 16
"""Prompt tokens of the group's own request."""
LEAVING_SECONDS = 60.0
"""How long runners may take to end the group's steps and write after the last release."""


async def first_step(client: Client, system: System, sizes: Sizes) -> dict[str, Any]:
    """Return the times from the decision to the step, for the leader and the slowest member.

    Raises:
        NotRecordedError: engines have not recorded every bind exactly once.
    """
    assert system.recording_dir is not None
    together = system.layouts[-1]
    (group,) = together.units
    bench = Bench(client, system, together, sizes, random.Random(FIRST_STEP))
    resident = _Resident(bench)
    try:
        loaded = await loaded_rounds(bench, before=resident.settle)
    finally:
        await resident.leave()
    rounds = loaded.rounds
    phases = {
        engine: matched(engine, rounds, await _all_written(system.recording_dir, engine, rounds))
        for engine in group
    }
    return {
        "switches": sizes.switches,
        "running": loaded.running,
        "bind": spread([r.bind for r in rounds]),
        "release": spread([r.release for r in rounds]),
        **starts(rounds, phases),
    }


class _Resident:
    """The group's own request, which is paused while the engines are alone.

    Args:
        bench: the bench of the layout in which all engines are one group.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._task: asyncio.Task[Answer] | None = None

    async def settle(self) -> None:
        """Bind the engines and give their group a request, unless it already has one."""
        if self._task is not None:
            if not self._task.done():
                return
            self._task.result()  # it may have all its tokens, but must not have failed
        bench = self._bench
        await switch(bench.client, bench.layout, "hard")
        prompt = bench.prompt(RESIDENT_PROMPT)
        self._task = asyncio.create_task(bench.client.generate(prompt, bench.sizes.load_tokens))
        while not (self._task.done() or await self._runs()):
            await asyncio.sleep(POLL_SECONDS)
        await switch(bench.client, bench.system.layouts[0], "hard")
        await asyncio.sleep(bench.sizes.pause_seconds)

    async def _runs(self) -> bool:
        view = await self._bench.client.call("GET", "/admin/layout")
        # The engines' own requests are paused, so they are not counted as running.
        return any(unit["running"] for unit in view["units"])

    async def leave(self) -> None:
        """Abort the request."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def _all_written(
    directory: Path, engine: int, rounds: Sequence[Round]
) -> Sequence[BoundPhase]:
    """Return an engine's phases, once they include that of the last round.

    A release is answered when it is queued for the runners, so the group's steps may still run.
    """
    last, _ = rounds[-1].epochs
    try:
        async with asyncio.timeout(LEAVING_SECONDS):
            while not any(phase.epoch > last for phase in read_phases(directory, engine)):
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise NotRecordedError(f"engine {engine} has not recorded the last bind") from None
    return read_phases(directory, engine)


def matched(engine: int, rounds: Sequence[Round], phases: Sequence[BoundPhase]) -> list[BoundPhase]:
    """Return the phase of every round, in order.

    Phases are matched by the controller's epochs, so no clocks are compared.

    Args:
        engine: number of the engine, for errors.
        rounds: in order.
        phases: the engine's phases; those of no round are left out.

    Raises:
        NotRecordedError: a round does not have exactly one phase.
    """
    found = []
    for number, one in enumerate(rounds, 1):
        began, ended = one.epochs
        mine = [phase for phase in phases if began < phase.epoch < ended]
        if len(mine) != 1:
            raise NotRecordedError(
                f"engine {engine} recorded {len(mine)} binds in round {number} of {len(rounds)}"
            )
        found += mine
    return found


def starts(rounds: Sequence[Round], phases: Mapping[int, Sequence[BoundPhase]]) -> dict[str, Any]:
    """Return when the groups' first steps began, as spreads of seconds.

    Args:
        rounds: in order.
        phases: the phases of every member, one for each round; the leader's come first.

    Returns:
        ``leader`` and ``slowest``; the latter is of the member that was last in each round, for
        which a step's collectives must wait. Each has four times. ``start`` is from the decision
        until the runner had taken up the step and its device was free for it. ``host`` is from the
        decision until the runner had taken up the step. ``in_flight`` is from the decision until
        the device had done the engine's own steps. ``after`` is from that moment, or from the
        decision if that was later, to the start. ``without_step`` is the number of rounds in which
        the group ran no step; no spread includes them.
    """
    members = zip(*phases.values(), strict=True)
    ran = [
        (one, group)
        for one, group in zip(rounds, members, strict=True)
        if all(phase.began is not None for phase in group)
    ]
    return {
        "without_step": len(rounds) - len(ran),
        "leader": _spreads([(one, group[:1]) for one, group in ran]),
        "slowest": _spreads(ran),
    }


def _spreads(ran: Sequence[tuple[Round, Sequence[BoundPhase]]]) -> dict[str, Any]:
    times = [_times(one, members) for one, members in ran]
    names = ("start", "host", "in_flight", "after")
    return {name: spread([one[name] for one in times]) for name in names}


def _times(one: Round, members: Sequence[BoundPhase]) -> dict[str, float]:
    began = max(member.began or 0.0 for member in members)
    taken = max(member.taken or 0.0 for member in members)
    free = max(one.at, *(member.freed or 0.0 for member in members))
    return {
        "start": began - one.at,
        "host": taken - one.at,
        "in_flight": free - one.at,
        "after": began - free,
    }
