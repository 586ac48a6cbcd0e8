"""A chaos run: a served node, clients that never stop asking, and somebody who breaks it.

What happens is drawn from the seed, each actor with a generator of its own; when it happens, and so
what it meets, is up to the machine.
"""

import asyncio
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from shoal.loadgen.bench.process_memory import MemoryLog, name_and_mib, tree
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
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
from tests.chaos.processes import await_ends, is_tracker, life_of, lineage, send
from tests.runtime.random_run import random_partition
from tests.server.node import ServedNode
from tests.units import tp_units

ENGINES = {"fake": 4, "real": 2}
PATIENCE_SECONDS = {"fake": 90.0, "real": 300.0}
"""A client that has waited so long for a byte has been forgotten; and a node that is left alone
must be whole again within this time. Two real engines that die together take minutes to come back
where four processes import vLLM on two cores."""
OPTIONS = (
    *("--max-num-seqs", "8", "--max-waiting-requests", "32"),
    *("--restart-limit", "1000", "--restart-backoff", "1e-9"),
)
CLIENTS = 10
BURST = 80
"""Requests of a burst: more than the batches and the task pool of the node hold."""
EVENT_SECONDS = 1.0
"""Between two events, on average."""
STALL_SECONDS = 0.3
SETTLE_SECONDS = 30.0
"""An idle node must hold no more than before within this time."""
ORPHAN_SECONDS = 30.0
"""A process that has outlived the node must have ended."""
END_SECONDS = 120.0
"""A node that is asked to end must have done so."""
SWITCH_ANSWERS = {200, 409, 503, 504}
DRAIN_ANSWERS = {200, 409, 504}
POLICY_ANSWERS = {200, 400, 504}
"""A process that the machine gives no time answers late, so the caller may see a 504."""
TREATMENTS = ("sequential", "carry", "soft", "hard")
_ENGINE = re.compile(r"(?:engine|runner|scheduler) (\d+).*")


class Report(msgspec.Struct):
    """What a run has seen."""

    events: Counter[Event] = msgspec.field(default_factory=Counter)
    records: list[Record] = []
    switches: Counter[int] = msgspec.field(default_factory=Counter)
    """Answers to switches, by status."""
    carries: dict[str, float] = {}
    """Requests that were to go to other units with their KV, by what became of that."""
    late: int = 0
    """Questions for the layout that the controller did not answer in time."""
    recoveries: list[float] = []
    """Seconds from the end of an engine until it served again."""
    orphans: set[str] = set()
    """Processes that had not ended when the node had."""
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
            ("carries", self.carries),
            ("layouts", {"late": self.late}),
            ("seconds to recover", times),
        ]
        lines = [
            f"{title:20} " + "  ".join(f"{k} {v:g}" for k, v in sorted(row.items()))
            for title, row in rows
        ]
        lines += [f"ended after the node: {name}" for name in sorted(self.orphans)]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])


class Chaos:
    """One run.

    Args:
        directory: for the node's temporary files; a short name, for sockets are in it.
        engine: ``fake`` or ``real``.
        seed: what everything is drawn from.
        seconds: how long the node is tormented.
        least: events that there are at least, however long they take.
    """

    def __init__(
        self, directory: Path, engine: str, seed: int, seconds: float, least: int = 0
    ) -> None:
        self.report = Report()
        self._seed = seed
        self._seconds = seconds
        self._left = least
        """Events that are still to come."""
        self._ends_at = 0.0
        self._engines = ENGINES[engine]
        self._patience = PATIENCE_SECONDS[engine]
        self._real = engine == "real"
        # Every switch copies ahead.
        options = ["--engines", str(self._engines), *OPTIONS, "--precopy-tokens", "1"]
        if self._real:
            # KV that goes through the host needs more of both engines.
            options += ["--carry-path", "auto" if seed % 2 else "host"]
        else:
            # There is so little room that a burst fills the pool also where it comes slowly.
            options += ["--fake-step-ms", "10"]
            options += ["--max-num-seqs", "4", "--max-waiting-requests", "8"]
        self._node = ServedNode(directory, *options, real=self._real, VLLM_LOGGING_LEVEL="CRITICAL")
        assert self._node.url, "\n".join(self._node.lines)
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._root = self._node.process.pid
        self._memory = MemoryLog(self._root)
        self._recovering: set[asyncio.Task[None]] = set()
        self._stopped: set[int] = set()
        """Processes that were stopped for good: the end of a stall must not let them go on."""

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
            # What it takes to form a group for the first time is no leak.
            assert await self._visit_layouts(http)
        before = await self._resources()
        counted = await self._counted()
        async with self._client() as http:
            await self._torment(http)
            await self._audit(http)
            await self._serve_again(http)
        counted = {key: value - counted[key] for key, value in (await self._counted()).items()}
        self.report.carries = await self._counted("carried_requests")
        after = await self._resources(like=before)
        lived = before.descriptors.keys() & after.descriptors.keys()
        growth = [found for found in self._memory.growth() if found.pid in lived]
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
        if self._real:  # one by one: nobody else in the batch
            return {plan.prompt: (await ask(http, plan)).tokens for plan in plans}
        records = await asyncio.gather(*(ask(http, plan) for plan in plans))
        found = {k: record.tokens for k, record in enumerate(records)}
        wanted = {k: expected_tokens(prompt, MOST_TOKENS) for k, prompt in enumerate(PROMPTS)}
        assert found == wanted
        return found

    # --- meanwhile ----------------------------------------------------------------------------

    async def _torment(self, http: httpx.AsyncClient) -> None:
        self._ends_at = time.monotonic() + self._seconds
        async with asyncio.TaskGroup() as actors:
            for number in range(CLIENTS):
                actors.create_task(self._ask_on(http, number))
            actors.create_task(self._break_on(http))
            actors.create_task(self._watch_memory())

    @property
    def _goes_on(self) -> bool:
        return self._left > 0 or time.monotonic() < self._ends_at

    async def _ask_on(self, http: httpx.AsyncClient, number: int) -> None:
        rng = self._rng(f"client {number}")
        while self._goes_on:
            self.report.records.append(await ask(http, draw_plan(rng)))
            await asyncio.sleep(rng.expovariate(5))

    async def _watch_memory(self) -> None:
        while self._goes_on:
            self._memory.sample(time.monotonic())
            await asyncio.sleep(1)

    async def _break_on(self, http: httpx.AsyncClient) -> None:
        rng = self._rng("events")
        async with asyncio.TaskGroup() as acts:
            while self._goes_on:
                event = draw_event(rng)
                self._left -= 1
                # Its draws must not depend on how long others take.
                acts.create_task(self._act(http, event, random.Random(rng.random())))
                await asyncio.sleep(rng.expovariate(1 / EVENT_SECONDS))
        await self._recover(http)

    async def _act(self, http: httpx.AsyncClient, event: Event, rng: random.Random) -> None:
        match event:
            case Event.SWITCH:
                await self._switch(http, rng)
            case Event.DRAIN:
                await self._drain(http, rng)
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
        units = random_partition(rng, self._engines, self._engines)
        body = {
            "units": [unit.engines for unit in units],
            "preempt": rng.choice(TREATMENTS),
            "timeout": rng.uniform(0.5, 5),
        }
        answer = await http.post("/admin/layout", json=body)
        self.report.events[Event.SWITCH] += 1
        self.report.switches[answer.status_code] += 1
        if answer.status_code not in SWITCH_ANSWERS:
            self.report.problems.append(f"{body} was answered {answer.status_code}: {answer.text}")

    async def _drain(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        body = {"engines": [rng.randrange(self._engines)]}
        answer = await http.post("/admin/drain", json=body)
        self.report.events[Event.DRAIN] += 1
        if answer.status_code not in DRAIN_ANSWERS:
            self.report.problems.append(f"a drain was answered {answer.status_code}")
        await asyncio.sleep(rng.uniform(0, 3))
        await http.post("/admin/resume", json=body)

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
        if not send(pid, number):
            return
        if number == signal.SIGSTOP:
            self._stopped.add(pid)
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
        if picked is not None and send(picked[0], signal.SIGSTOP):
            self.report.events[Event.STALL] += 1
            await asyncio.sleep(rng.uniform(0, STALL_SECONDS))
            if picked[0] not in self._stopped:
                send(picked[0], signal.SIGCONT)

    # --- afterwards ---------------------------------------------------------------------------

    async def _recover(self, http: httpx.AsyncClient) -> None:
        """Bring every unit back, until the node is whole and at rest.

        What a hard switch has paused goes on then. Groups are formed again when their members are
        single.
        """
        await http.post("/admin/policy", json={"policy": "manual"})
        try:
            async with asyncio.timeout(self._patience):
                await asyncio.gather(*self._recovering)
                while not await self._visit_layouts(http) or not _is_at_rest(
                    await self._layout(http)
                ):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            view = await self._layout(http)
            self.report.problems.append(f"not whole after {self._patience:g} s: {view}")

    async def _visit_layouts(self, http: httpx.AsyncClient) -> bool:
        """Have every group formed once, and return whether all could be."""
        done = True
        for size in (self._engines, 2, 1):
            units = [unit.engines for unit in tp_units(self._engines, size)]
            answer = await http.post("/admin/layout", json={"units": units})
            done &= answer.status_code == 200
        return done

    async def _audit(self, http: httpx.AsyncClient) -> None:
        """Have the node check its books."""
        audit = (await http.post("/admin/audit")).json()
        self.report.problems += [f"audit: {problem}" for problem in audit["problems"]]

    async def _serve_again(self, http: httpx.AsyncClient) -> None:
        """Have the node serve, with answers that are checked as all others."""
        assert await self._visit_layouts(http)
        plans = [Plan(prompt=k, max_tokens=8) for k in range(len(PROMPTS))]
        records = await asyncio.gather(*(ask(http, plan) for plan in plans))
        self.report.records += records
        if any(record.ending is not Ending.FINISHED for record in records):
            self.report.problems.append("the node does not serve any more")

    def _end(self) -> None:
        """End the node as its user does, and see what is left."""
        lives = [life for pid in tree(self._root) if (life := life_of(pid)) is not None]
        self._node.children = []
        self._node.process.send_signal(signal.SIGTERM)
        code = self._node.process.wait(timeout=END_SECONDS)
        self.report.orphans, left = await_ends(lives[1:], ORPHAN_SECONDS)
        self.report.problems += [f"left over: process {name}" for name in left]
        self._reader.join()
        assert self._node.process.stdout is not None
        self._node.process.stdout.close()
        if code != 0:
            self.report.problems.append(f"the node ended with {code}")
        self.report.problems += [f"left over: {what}" for what in self._node.leftovers()]
        self.report.problems += [f"printed: {line}" for line in self._said if "Traceback" in line]

    # --- what is there ------------------------------------------------------------------------

    async def _resources(self, like: Resources | None = None) -> Resources:
        """Return what the idle node holds, once that is what it held before, or does not change.

        Args:
            like: what it held before; it has ``SETTLE_SECONDS`` to get there.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        last = None
        while True:
            found = self._resources_now()
            settled = found == last if like is None else not check_resources(like, found)
            if settled or time.monotonic() > deadline:
                return found
            last = found
            await asyncio.sleep(0.1)

    def _resources_now(self) -> Resources:
        pids = [pid for pid in tree(self._root) if not is_tracker(pid)]
        return Resources(
            tuple(sorted(lineage(pid) for pid in pids)),
            {pid: len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids},
            _names(self._node.runtime_dir.rglob("*")),
            _names(Path("/dev/shm").glob(f"*{self._node.runtime_dir.name}*")),
        )

    async def _counted(self, what: str = "requests") -> dict[str, float]:
        """Return the server's counts, by outcome, of requests or of those that were carried."""
        async with self._client() as http:
            await http.post("/admin/audit")  # answered after the reports that were on their way
            text = (await http.get("/metrics")).text
        line = rf'^shoal_{what}_total\{{outcome="(\w+)"\}} (\S+)$'
        series = re.findall(line, text, re.MULTILINE)
        return {outcome: float(value) for outcome, value in series}

    async def _layout(self, http: httpx.AsyncClient) -> dict[str, Any]:
        """Return the node's layout. A controller that the machine gives no time may be late."""
        while (answer := await http.get("/admin/layout")).status_code == 504:
            self.report.late += 1
        assert answer.status_code == 200, answer.text
        view: dict[str, Any] = answer.json()
        return view

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with self._node.async_client(timeout=self._patience, limits=limits) as http:
            yield http

    def _rng(self, actor: str) -> random.Random:
        return random.Random(f"{self._seed} {actor}")

    def _read(self) -> None:
        assert self._node.process.stdout is not None
        self._said += [line.rstrip("\n") for line in self._node.process.stdout]


def _names(paths: Iterable[Path]) -> frozenset[str]:
    return frozenset(path.name for path in paths)


def _is_at_rest(view: dict[str, Any]) -> bool:
    """Return whether a node is whole, and has nothing to do."""
    counts = ("running", "waiting", "paused")
    busy = view["waiting"] or any(unit[key] for unit in view["units"] for key in counts)
    whole = not view["unavailable"] and all(e["state"] == "serving" for e in view["engines"])
    return whole and not busy
