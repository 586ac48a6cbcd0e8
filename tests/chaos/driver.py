"""A chaos run: a served node, clients that never stop asking, and somebody who breaks it.

What happens is drawn from the seed, each actor with a generator of its own; when it happens, and so
what it meets, is up to the machine.
"""

import asyncio
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from policies.partition import groups_of
from runtime.engine.fake_core import expected_tokens
from server.bench.processes import MemoryLog, name_and_mib, tree
from tests.chaos.checks import (
    Ending,
    Record,
    Resources,
    check_counters,
    check_memory,
    check_records,
    check_resources,
)
from tests.chaos.client import ask, ask_malformed
from tests.chaos.events import (
    MOST_TOKENS,
    PROMPTS,
    Event,
    Plan,
    draw_event,
    draw_malformed,
    draw_plan,
)
from tests.runtime.random_run import random_partition
from tests.server.node import ServedNode

ENGINES = {"fake": 4, "real": 2}
OPTIONS = (
    *("--max-num-seqs", "8", "--max-waiting-requests", "32"),
    *("--restart-limit", "1000", "--restart-backoff", "0.001"),
)
CLIENTS = 10
BURST = 80
"""Requests of a burst: more than the batches and the task pool of the node hold."""
EVENT_SECONDS = 1.0
"""Between two events, on average."""
STALL_SECONDS = 0.3
SETTLE_SECONDS = 120.0
"""A node that is left alone must be whole again within this time."""
PATIENCE_SECONDS = 90.0
"""A client that has waited so long for a byte has been forgotten."""
SWITCH_ANSWERS = {200, 409, 503, 504}
POLICY_ANSWERS = {200, 400}
TREATMENTS = ("sequential", "soft", "hard", "interleave")
_ENGINE = re.compile(r"(?:engine|runner|scheduler) (\d+).*")


class Report(msgspec.Struct):
    """What a run has seen."""

    events: Counter[Event] = msgspec.field(default_factory=Counter)
    records: list[Record] = []
    switches: Counter[int] = msgspec.field(default_factory=Counter)
    """Answers to switches, by status."""
    recoveries: list[float] = []
    """Seconds from the end of an engine until it served again."""
    problems: list[str] = []

    def table(self) -> str:
        """Return the run in a few lines."""
        endings = Counter(str(record.ending) for record in self.records)
        statuses = {str(status): count for status, count in self.switches.items()}
        found = sorted(self.recoveries)
        times = (
            {"median": found[len(found) // 2], "longest": found[-1], "engines": len(found)}
            if found
            else {}
        )
        rows: list[tuple[str, Mapping[str, float]]] = [
            ("events", {str(event): count for event, count in self.events.items()}),
            ("requests", endings),
            ("answers to switches", statuses),
            ("seconds to recover", times),
        ]
        lines = [
            f"{title:20} " + "  ".join(f"{k} {v:g}" for k, v in sorted(row.items()))
            for title, row in rows
        ]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])


class Chaos:
    """One run.

    Args:
        directory: for the node's temporary files; a short name, for sockets are in it.
        engine: ``fake`` or ``real``.
        seed: what everything is drawn from.
        seconds: how long the node is tormented.
    """

    def __init__(self, directory: Path, engine: str, seed: int, seconds: float) -> None:
        self.report = Report()
        self._seed = seed
        self._seconds = seconds
        self._engines = ENGINES[engine]
        self._real = engine == "real"
        options = ["--engines", str(self._engines), *OPTIONS]
        if not self._real:
            options += ["--fake-step-ms", "10"]
        self._node = ServedNode(directory, *options, real=self._real, VLLM_LOGGING_LEVEL="CRITICAL")
        assert self._node.url, "\n".join(self._node.lines)
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._root = self._node.process.pid
        self._memory = MemoryLog(self._root)
        self._recovering: set[asyncio.Task[None]] = set()

    def run(self) -> Report:
        """Torment the node, leave it alone, check it, and end it."""
        try:
            asyncio.run(self._run())
            self._end()
        finally:
            self._node.process.kill()
        return self.report

    async def _run(self) -> None:
        async with self._client() as http:
            references = await self._references(http)
            await self._visit_layouts(http)
        before = await self._resources()
        counted = await self._counted()
        async with self._client() as http:
            await self._torment(http)
            await self._recover(http)
            await self._serve_again(http)
        counted = {key: value - counted[key] for key, value in (await self._counted()).items()}
        after = await self._resources(like=before)
        lived = before.descriptors.keys() & after.descriptors.keys()
        names = {known[0] for pid in lived if (known := name_and_mib(pid))}
        growth = [found for found in self._memory.growth() if found.process in names]
        self.report.problems += [
            *check_records(self.report.records, references),
            *check_counters(self.report.records, counted),
            *check_resources(before, after),
            *check_memory(growth, self._seconds),
        ]

    # --- before -------------------------------------------------------------------------------

    async def _references(self, http: httpx.AsyncClient) -> dict[int, list[int]]:
        """Return the greedy tokens of every prompt, undisturbed."""
        plans = [Plan(prompt=k, max_tokens=MOST_TOKENS) for k in range(len(PROMPTS))]
        found = {plan.prompt: (await ask(http, plan)).tokens for plan in plans}
        if not self._real:
            wanted = {k: expected_tokens(prompt, MOST_TOKENS) for k, prompt in enumerate(PROMPTS)}
            assert found == wanted
        return found

    async def _visit_layouts(self, http: httpx.AsyncClient) -> None:
        """Have every group formed once: what that takes is no leak."""
        for size in (2, self._engines, 1):
            units = groups_of(self._engines, size)
            answer = await http.post("/admin/layout", json={"units": units})
            assert answer.status_code == 200, answer.text

    # --- meanwhile ----------------------------------------------------------------------------

    async def _torment(self, http: httpx.AsyncClient) -> None:
        end = time.monotonic() + self._seconds
        async with asyncio.TaskGroup() as actors:
            for number in range(CLIENTS):
                actors.create_task(self._ask_on(http, number, end))
            actors.create_task(self._break_on(http, end))
            actors.create_task(self._watch_memory(end))

    async def _ask_on(self, http: httpx.AsyncClient, number: int, end: float) -> None:
        rng = self._rng(f"client {number}")
        while time.monotonic() < end:
            self.report.records.append(await ask(http, draw_plan(rng)))
            await asyncio.sleep(rng.expovariate(5))

    async def _watch_memory(self, end: float) -> None:
        while (now := time.monotonic()) < end:
            self._memory.sample(now)
            await asyncio.sleep(1)

    async def _break_on(self, http: httpx.AsyncClient, end: float) -> None:
        rng = self._rng("events")
        async with asyncio.TaskGroup() as acts:
            while time.monotonic() < end:
                event = draw_event(rng)
                # Its draws must not depend on how long others take.
                acts.create_task(self._act(http, event, random.Random(rng.random())))
                await asyncio.sleep(rng.expovariate(1 / EVENT_SECONDS))

    async def _act(self, http: httpx.AsyncClient, event: Event, rng: random.Random) -> None:
        match event:
            case Event.SWITCH:
                await self._switch(http, rng)
            case Event.POLICY:
                await self._change_policy(http, rng)
            case Event.KILL:
                await self._end_engine(http, rng, event, signal.SIGKILL)
            case Event.STOP:
                await self._end_engine(http, rng, event, signal.SIGSTOP)
            case Event.STALL:
                await self._stall(rng)
            case Event.BURST:
                plans = [draw_plan(rng) for _ in range(BURST)]
                self.report.events[event] += 1
                self.report.records += await asyncio.gather(*(ask(http, plan) for plan in plans))
            case Event.MALFORMED:
                self.report.events[event] += 1
                self.report.records.append(await ask_malformed(http, *draw_malformed(rng)))

    async def _switch(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        body = {
            "units": random_partition(rng, self._engines, self._engines),
            "preempt": rng.choice(TREATMENTS),
            "timeout": rng.uniform(0.5, 5),
        }
        answer = await http.post("/admin/layout", json=body)
        self.report.events[Event.SWITCH] += 1
        self.report.switches[answer.status_code] += 1
        if answer.status_code not in SWITCH_ANSWERS:
            self.report.problems.append(f"{body} was answered {answer.status_code}: {answer.text}")

    async def _change_policy(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        policies = (await http.get("/admin/policy")).json()["policies"]
        policy = rng.choice([*policies, "manual", "manual"])
        answer = await http.post("/admin/policy", json={"policy": policy})
        self.report.events[Event.POLICY] += 1
        if answer.status_code not in POLICY_ANSWERS:
            self.report.problems.append(f"{policy} was answered {answer.status_code}")
        await asyncio.sleep(rng.uniform(1, 5))
        await http.post("/admin/policy", json={"policy": "manual"})

    def _pick(self, rng: random.Random) -> tuple[int, int] | None:
        """Draw a process of an engine: its id, and the engine's number."""
        found = []
        for pid in tree(self._root):
            known = name_and_mib(pid)
            match = _ENGINE.fullmatch(known[0]) if known else None
            if match:
                found.append((pid, int(match.group(1))))
        return rng.choice(found) if found else None

    async def _end_engine(
        self, http: httpx.AsyncClient, rng: random.Random, event: Event, number: signal.Signals
    ) -> None:
        """End an engine; mostly one at a time."""
        if self._recovering and rng.random() < 0.8:
            return
        picked = self._pick(rng)
        if picked is None:
            return
        pid, engine = picked
        restarts = (await self._layout(http))["engines"][engine]["restarts"]
        if not _send(pid, number):
            return
        self.report.events[event] += 1
        task = asyncio.create_task(self._time_recovery(http, engine, restarts))
        self._recovering.add(task)
        task.add_done_callback(self._recovering.discard)

    async def _time_recovery(self, http: httpx.AsyncClient, engine: int, restarts: int) -> None:
        begun = time.monotonic()
        while True:  # bounded by who waits for it
            view = (await self._layout(http))["engines"][engine]
            if view["restarts"] > restarts and view["state"] == "serving":
                self.report.recoveries.append(time.monotonic() - begun)
                return
            await asyncio.sleep(0.1)

    async def _stall(self, rng: random.Random) -> None:
        picked = self._pick(rng)
        if picked is not None and _send(picked[0], signal.SIGSTOP):
            self.report.events[Event.STALL] += 1
            await asyncio.sleep(rng.uniform(0, STALL_SECONDS))
            _send(picked[0], signal.SIGCONT)

    # --- afterwards ---------------------------------------------------------------------------

    async def _recover(self, http: httpx.AsyncClient) -> None:
        """Wait until the node is whole and at rest, then have it check its books."""
        await http.post("/admin/policy", json={"policy": "manual"})
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await asyncio.gather(*self._recovering)
                while not _is_whole(await self._layout(http)):
                    await asyncio.sleep(0.1)
                while not await self._are_single(http) or not _rests(await self._layout(http)):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            view = await self._layout(http)
            self.report.problems.append(f"not whole after {SETTLE_SECONDS:g} s: {view}")
        audit = (await http.post("/admin/audit")).json()
        self.report.problems += [f"audit: {problem}" for problem in audit["problems"]]

    async def _are_single(self, http: httpx.AsyncClient) -> bool:
        units = groups_of(self._engines, 1)
        answer = await http.post("/admin/layout", json={"units": units})
        return answer.status_code == 200

    async def _serve_again(self, http: httpx.AsyncClient) -> None:
        """Have every layout serve, with answers that are checked as all others."""
        await self._visit_layouts(http)
        plans = [Plan(prompt=k, max_tokens=8) for k in range(len(PROMPTS))]
        records = await asyncio.gather(*(ask(http, plan) for plan in plans))
        self.report.records += records
        if any(record.ending is not Ending.FINISHED for record in records):
            self.report.problems.append("the node does not serve any more")

    def _end(self) -> None:
        """End the node as its user does, and see what is left."""
        self._node.children = list(tree(self._root))[1:]
        self._node.process.send_signal(signal.SIGTERM)
        code = self._node.process.wait(timeout=SETTLE_SECONDS)
        self._reader.join()
        if code != 0:
            self.report.problems.append(f"the node ended with {code}")
        self.report.problems += [f"left over: {what}" for what in self._node.leftovers()]
        self.report.problems += [f"printed: {line}" for line in self._said if "Traceback" in line]

    # --- what is there ------------------------------------------------------------------------

    async def _resources(self, like: Resources | None = None) -> Resources:
        """Return what the idle node holds, at the latest when it should be as ``like``."""
        for _ in range(100):
            pids = [pid for pid in tree(self._root) if not _is_tracker(pid)]
            found = Resources(
                tuple(sorted(_lineage(pid) for pid in pids)),
                {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids},
                len(list(self._node.runtime_dir.rglob("*"))),
                len(list(Path("/dev/shm").glob(f"*{self._node.runtime_dir.name}*"))),
            )
            if like is not None and not check_resources(like, found):
                break
            await asyncio.sleep(0.1)
        return found

    async def _counted(self) -> dict[str, float]:
        """Return the server's counts of requests, by outcome."""
        async with self._client() as http:
            text = (await http.get("/metrics")).text
        series = re.findall(r'^shoal_requests_total\{outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {outcome: float(value) for outcome, value in series}

    async def _layout(self, http: httpx.AsyncClient) -> dict[str, Any]:
        view: dict[str, Any] = (await http.get("/admin/layout")).json()
        return view

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with self._node.async_client(timeout=PATIENCE_SECONDS, limits=limits) as http:
            yield http

    def _rng(self, actor: str) -> random.Random:
        return random.Random(f"{self._seed} {actor}")

    def _read(self) -> None:
        assert self._node.process.stdout is not None
        self._said += [line.rstrip("\n") for line in self._node.process.stdout]


def _send(pid: int, number: signal.Signals) -> bool:
    """Send a signal, and return whether there still was somebody to get it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _lineage(pid: int) -> str:
    """Return the name of a process and that of its parent."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    names = [known[0] for known in map(name_and_mib, (parent, pid)) if known]
    return " > ".join(names)


def _is_tracker(pid: int) -> bool:
    """Return whether ``multiprocessing`` has started a process, with the first restart."""
    return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _is_whole(view: dict[str, Any]) -> bool:
    return not view["unavailable"] and all(e["state"] == "serving" for e in view["engines"])


def _rests(view: dict[str, Any]) -> bool:
    counts = ("running", "waiting", "paused", "interleaved")
    return view["waiting"] == 0 and all(unit[key] == 0 for unit in view["units"] for key in counts)
