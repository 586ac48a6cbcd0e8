"""Kills parts of a node, or all of it, while it works a batch off, and starts it again.

Every line of every batch must have exactly one result in the end, the one that an undisturbed node
gives. If two engines are killed one soon after the other while they compute the same line, the node
takes it for poison and refuses it (docs/api.md, "When an engine dies"). Such lines are counted.
What is killed and after how many results is drawn from the seed; a result, unlike a second,
is the same on every machine. A node that starts or ends mostly waits, so several nodes of fake
engines are worked at once, each with a store of its own.
"""

import json
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen.bench.process_memory import tree
from shoal.server.batch.batch_objects import Batch
from shoal.server.batch.batch_store import BatchStore
from tests.chaos.hasty_node import hasty_shoal
from tests.chaos.processes import Life, await_ends, life_of, send
from tests.server.batch.batches import jsonl, line
from tests.server.node import ServedNode, children_of

PARTS = {
    "node": ("",),
    "controller": ("controller",),
    "front end": ("front end",),
    "batch worker": ("batch worker",),
    "engine": ("engine", "scheduler", "runner"),
}
"""What is killed, with the beginnings of its processes' names. The node's is the supervisor."""
NODES = {"fake": 4, "real": 1}
"""That are worked at once, by their engines."""
ENDS_THE_NODE = frozenset({"node", "controller", "front end"})
LINES = 60
"""Of a batch."""
MOST_RESULTS = 25
"""A part is killed after at most so many results."""
OPTIONS = (
    *("--engines", "2", "--max-num-seqs", "4"),
    *("--restart-limit", "1000", "--restart-backoff", "1e-9"),
)
URL = "/v1/completions"
POISON = "engines died of this request: it is not tried again"
PATIENCE_SECONDS = 300.0
"""How long a node may take from one result to the next; two engines that die take minutes to load
on two cores."""


class KillsReport(msgspec.Struct):
    """What a run has seen."""

    kills: Counter[str] = msgspec.field(default_factory=Counter)
    batches: int = 0
    poison: int = 0
    """Lines that were taken for poison."""
    problems: list[str] = []

    def table(self) -> str:
        """Return the run in a few lines."""
        killed = "  ".join(f"{part} {count}" for part, count in sorted(self.kills.items()))
        lines = [
            f"killed               {killed}",
            f"batches              {self.batches}",
            f"taken for poison     {self.poison}",
        ]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])


def kill_nodes(directory: Path, engine: str, seed: int, kills: int) -> KillsReport:
    """Kill as many nodes at once as ``NODES`` says, so often together.

    Args:
        directory: for all that they write; a short name.
        engine: ``fake`` or ``real``.
        seed: of what is killed, and after which result.
        kills: how often.
    """
    at_once = min(NODES[engine], kills)

    def run(number: int) -> KillsReport:
        (own := directory / str(number)).mkdir()
        share = kills // at_once + (number < kills % at_once)
        return BatchKills(own, engine, f"{seed} {number}", share).run()

    whole = KillsReport()
    with ThreadPoolExecutor(at_once) as threads:
        for one in threads.map(run, range(at_once)):
            whole.kills += one.kills
            whole.batches += one.batches
            whole.poison += one.poison
            whole.problems += one.problems
    return whole


class BatchKills:
    """One node that is killed.

    Args:
        directory: for the batches' store and the node's temporary files; a short name.
        engine: ``fake`` or ``real``.
        seed: of what is killed, and after which result.
        kills: how often.
    """

    def __init__(self, directory: Path, engine: str, seed: str, kills: int) -> None:
        self.report = KillsReport()
        self._directory = directory
        self._real = engine == "real"
        self._rng = random.Random(f"batch kills {seed}")
        self._kills = kills
        self._node: ServedNode
        (directory / "store").mkdir()
        self._store = BatchStore(directory / "store")

    def run(self) -> KillsReport:
        """Work batches off until there were enough kills, and then to their end."""
        self._start()
        try:
            self._work_off()
        except AssertionError as error:  # what was seen before counts all the same
            self.report.problems.append(f"the run ended early: {error}")
        finally:
            with self._node.process:
                self._node.process.kill()
            self._store.close()
        return self.report

    def _work_off(self) -> None:
        wanted = self._ended(self._submit())
        while self.report.kills.total() < self._kills:
            batch = self._submit()
            while self._kill_after(batch, self._rng.randint(0, MOST_RESULTS)):
                if self.report.kills.total() == self._kills:
                    break
            results = self._ended(batch)
            self.report.poison += sum(map(is_poison, results))
            found = differences(wanted, results)
            self.report.problems += [f"{batch.id}: {problem}" for problem in found]

    # --- the node -----------------------------------------------------------------------------

    def _start(self) -> None:
        options = [*OPTIONS, "--batch-dir", str(self._directory / "store")]
        if not self._real:
            options += ["--fake-step-ms", "5"]
        environment = {"VLLM_LOGGING_LEVEL": "CRITICAL"}
        self._node = ServedNode(
            self._directory, *options, real=self._real, main=hasty_shoal, **environment
        )
        assert self._node.url, "\n".join(self._node.lines)

    def _kill_after(self, batch: Batch, results: int) -> bool:
        """Kill something after so many more results; return False if the batch ended before."""
        if not self._await_results(batch, self._results(batch) + results):
            return False
        lives = [life for pid in tree(self._node.process.pid) if (life := life_of(pid))]
        part = self._rng.choice(sorted(PARTS))
        root = self._node.process.pid
        parts = {root} if part == "node" else set(children_of(root))
        victims = [
            life.pid for life in lives if life.pid in parts and life.name.startswith(PARTS[part])
        ]
        # A part that has just died may not be back.
        if victims and send(self._rng.choice(victims), signal.SIGKILL):
            self.report.kills[part] += 1
            if part in ENDS_THE_NODE:
                self._replace(lives, part)
        return True

    def _replace(self, lives: Collection[Life], part: str) -> None:
        """Wait for the end of a node, and start it again."""
        self._node.wait()
        _, left = await_ends(lives, PATIENCE_SECONDS)
        if left:
            self.report.problems.append(f"the death of the {part} left {sorted(left)}")
        self._start()

    # --- batches ------------------------------------------------------------------------------

    def _submit(self) -> Batch:
        lines = [line(f"line {number}", URL, **_body(number)) for number in range(LINES)]
        with self._node.client() as http:
            file = http.post(
                "/v1/files",
                files={"file": ("in.jsonl", jsonl(lines))},
                data={"purpose": "batch"},
            ).json()
            body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
            found = http.post("/v1/batches", json=body).json()
        self.report.batches += 1
        batch = self._store.batch("", found["id"])
        assert batch is not None, found
        return batch

    def _results(self, batch: Batch) -> int:
        """Return how many lines have a result, which may be half written."""
        batch = self._now(batch)
        paths = [self._store.path(name) for name in (batch.answers_id, batch.failures_id) if name]
        return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())

    def _now(self, batch: Batch) -> Batch:
        found = self._store.batch(batch.owner, batch.id)
        assert found is not None
        return found

    def _await_results(self, batch: Batch, results: int) -> bool:
        """Wait until a batch has so many results; return False if it has ended before."""
        deadline, last = time.monotonic() + PATIENCE_SECONDS, -1
        while (found := self._results(batch)) < results:
            if self._now(batch).status.is_final:
                return False
            if found > last:
                deadline, last = time.monotonic() + PATIENCE_SECONDS, found
            assert time.monotonic() < deadline, f"{found} of {results} results: {self._now(batch)}"
            time.sleep(0.01)
        return not self._now(batch).status.is_final

    def _ended(self, batch: Batch) -> list[Any]:
        """Return the results of a batch once it has ended."""
        self._await_results(batch, LINES + 1)
        batch = self._now(batch)
        names = filter(None, (batch.output_file_id, batch.error_file_id))
        texts = (self._store.path(name).read_text() for name in names)
        return [json.loads(text) for lines in texts for text in lines.splitlines()]


def differences(wanted: Sequence[Any], found: Sequence[Any]) -> list[str]:
    """Compare the results of two batches of the same lines, in any order.

    Returns:
        One sentence for each line that has another answer, or not exactly one. A line that was
        taken for poison has none.
    """
    right, said = dict(_answers(wanted)), dict(_answers(found))
    poison = {result["custom_id"] for result in found if is_poison(result)}
    return [
        f"{name} was answered {said.get(name, [])} instead of {right.get(name, [])}"
        for name in sorted(right.keys() | said.keys())
        if said.get(name) != right.get(name) and not (name in poison and len(said[name]) == 1)
    ]


def is_poison(result: Any) -> bool:
    """Return whether a line was refused because engines died while they computed it."""
    message = result["response"]["body"].get("error", {}).get("message", "")
    return (
        result["response"]["status_code"] == HTTPStatus.INTERNAL_SERVER_ERROR and POISON in message
    )


def _answers(results: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each line's name with the statuses and texts of all of its answers."""
    by_name = defaultdict(list)
    for result in results:
        status, body = result["response"]["status_code"], result["response"]["body"]
        text = body["choices"][0]["text"] if "choices" in body else None
        by_name[result["custom_id"]].append((status, text))
    yield from by_name.items()


def _body(number: int) -> dict[str, Any]:
    """Return the body of a line; each tenth is wrong."""
    tokens = -1 if number % 10 == 7 else 4 + number % 5 * 8
    prompt = f"Story number {number} begins"
    return {"model": "shoal-demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
