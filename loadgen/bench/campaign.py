"""Measures systems one after the other on the same devices; each is started once."""

import asyncio
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.loadgen.bench import system_info
from shoal.loadgen.bench.breakdown import BREAKDOWN, breakdown
from shoal.loadgen.bench.carry_measure import CARRY, carry_steps
from shoal.loadgen.bench.comparison_results import Results, ResultsFile, SystemResults
from shoal.loadgen.bench.first_step import FIRST_STEP, first_step
from shoal.loadgen.bench.measures import IN_LAYOUTS, OF_SWITCHES, Bench, Sizes, Step
from shoal.loadgen.bench.modes import MODES, OFF, enter, leave, modes, pure_ways
from shoal.loadgen.bench.open_loop_serving import serve_workload
from shoal.loadgen.bench.rates import RATES, Sweep
from shoal.loadgen.bench.server_process import ServerFailedError, ServerProcess, free_port
from shoal.loadgen.bench.systems import CHECK, SERVED_NAME, System
from shoal.loadgen.bench.token_client import Client
from shoal.loadgen.workload import Workload

SETTLE_SECONDS = 20.0
"""How long the driver may take to free a server's memory."""
LEFT_GIB = 1.0
"""Memory that may be in use on a GPU without a server."""

OF_RECORDINGS: Mapping[str, Callable[[Client, System, Sizes], Awaitable[dict[str, Any]]]] = {
    FIRST_STEP: first_step,
    BREAKDOWN: breakdown,
}
"""Measures of a node that records, by name, in the order in which they are taken: a profiler may
leave things behind in a process that make later steps slower."""


def say(line: str) -> None:
    """Tell the user about the progress."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Campaign:
    """A comparison under way.

    Attributes:
        systems: the systems to measure, in this order.
        measures: names of the measures to take; a system takes those that apply to it.
        workloads: open-loop workloads by the name of their measure.
        policy: what decides Shoal's layout under a workload.
        results: the results so far; new ones are added.
        file: the file of the results.
        logs: directory of the servers' logs.
        step_seconds: no system is started with less time left.
        sweep: the arrivals and policies that ``rates`` measures.
    """

    systems: Sequence[System]
    measures: Sequence[str]
    workloads: Mapping[str, Workload]
    policy: str
    results: Results
    file: ResultsFile
    logs: Path
    step_seconds: float = 0.0
    sweep: Sweep = field(default_factory=Sweep)

    async def run(self, budget_seconds: float) -> bool:
        """Measure what is missing; return whether nothing is left.

        The campaign ends when the budget is spent, even during a measure; finished measures are
        kept.
        """
        deadline = time.monotonic() + budget_seconds
        for system in self.systems:
            steps = self._missing(system)
            if not steps:
                continue
            left = deadline - time.monotonic()
            if left < self.step_seconds:
                say(f"{system.name}: {left:.0f} s are left, too few to start it: run again")
                return False
            try:
                async with asyncio.timeout(left):
                    await self._measure(system, steps)
            except TimeoutError:
                say(f"{system.name}: the budget is spent: run again")
                return False
        return not any(self._missing(system) for system in self.systems)

    def _missing(self, system: System) -> dict[str, Step]:
        steps = {n: step for name in self.measures for n, step in self._steps(system, name).items()}
        return {name: steps[name] for name in self.results.missing(system.name, steps)}

    def _steps(self, system: System, name: str) -> Mapping[str, Step]:
        """Return the steps that take this measure of this system, by the name in the results."""
        if name == RATES and system.name != CHECK:
            return self.sweep.steps(system, self.results.sizes)
        if name == CARRY:
            measurable = system.regroups and system.name != CHECK
            return carry_steps(system, self.results.sizes) if measurable else {}
        step = self._step(system, name)
        return {} if step is None else {name: step}

    def _step(self, system: System, name: str) -> Step | None:
        """Return the step that takes this measure of this system; None if it does not apply."""
        if system.name == CHECK and name != "numerics":
            return None
        if name in IN_LAYOUTS:
            return lambda client: self._in_layouts(client, system, name)
        if name == MODES:
            return lambda client: modes(client, system, self.results.sizes)
        if name in {*OF_SWITCHES, FIRST_STEP} and not system.regroups:
            return None
        if name in OF_SWITCHES:
            return lambda client: OF_SWITCHES[name](client, system, self.results.sizes)
        if name in OF_RECORDINGS:
            if system.recording_dir is None:
                return None
            return lambda client: OF_RECORDINGS[name](client, system, self.results.sizes)
        return lambda client: serve_workload(client, system, self.workloads[name], self.policy)

    async def _in_layouts(self, client: Client, system: System, name: str) -> dict[str, Any]:
        found, sizes = {}, self.results.sizes
        for way in pure_ways(system):
            # ``modes`` measures SP beside TP; here only its numerics are checked.
            if way.threshold != OFF and name != "numerics":
                continue
            await enter(client, system, way)
            bench = Bench(client, system, way.layout, sizes, random.Random(way.name))
            found[way.name] = await IN_LAYOUTS[name](bench)
        await leave(client, system)
        return found

    async def _measure(self, system: System, steps: Mapping[str, Step]) -> None:
        """Start the system, take the steps, and end it. A failure is noted; other steps go on."""
        await devices_idle()
        port, admin_port = free_port(), free_port()
        log = self.logs / f"{system.name}.log"
        kept = self.results.systems.setdefault(system.name, SystemResults([]))
        kept.command, kept.failures = system.argv(port, admin_port), {}
        kept.memory["before"] = system_info.gpu_memory()
        say(f"{system.name}: starting, see {log}")
        # By default Shoal limits vLLM's log to errors, but the log has the figures of the start.
        environment = {"VLLM_LOGGING_LEVEL": "INFO", **os.environ}
        server = ServerProcess(kept.command, log, environment)
        try:
            address, admin = (f"http://127.0.0.1:{number}" for number in (port, admin_port))
            async with Client(address, SERVED_NAME, admin) as client:
                seconds = await server.wait_until_ready(client, system.ready_path)
                say(f"{system.name}: ready after {seconds:.1f} s")
                kept.starts.append({"seconds": seconds, **system_info.read_log(server.output)})
                kept.memory["ready"] = system_info.gpu_memory()
                for name, step in steps.items():
                    await self._take(kept, system, server, client, name, step)
                kept.memory["end"] = system_info.gpu_memory()
        except ServerFailedError as error:
            say(f"{system.name}: {error}")
            kept.failures["server"] = str(error)
        finally:
            server.stop()
            self.file.write(self.results)

    async def _take(
        self,
        kept: SystemResults,
        system: System,
        server: ServerProcess,
        client: Client,
        name: str,
        step: Step,
    ) -> None:
        begin = time.monotonic()
        try:
            kept.measures[name] = await step(client)
        except Exception as error:  # noqa: BLE001 - noted, whatever it is: the others go on
            server.check_alive()
            kept.failures[name] = f"{type(error).__name__}: {error}"
            say(f"{system.name}: {name} failed: {kept.failures[name]}")
        else:
            say(f"{system.name}: {name} took {time.monotonic() - begin:.1f} s")
        self.file.write(self.results)


async def devices_idle() -> None:
    """Wait until the GPUs, if there are any, hold no more than a driver's own memory."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while max(system_info.gpu_memory() or [0.0]) > LEFT_GIB:
        if time.monotonic() > deadline:
            say(f"GPU memory is in use before the start: {system_info.gpu_memory()} GiB")
            return
        await asyncio.sleep(1.0)
