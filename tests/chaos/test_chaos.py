"""A short run is clean; and the checks find what was tampered with, lost or left behind."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from shoal.loadgen.bench.process_memory import Growth
from tests.chaos import driver
from tests.chaos.checks import (
    OUTCOMES,
    Ending,
    Record,
    Resources,
    check_counters,
    check_memory,
    check_records,
    check_resources,
)
from tests.chaos.client import ask
from tests.chaos.driver import Chaos
from tests.chaos.events import Event, Plan
from tests.chaos.processes import await_ends, life_of

SEED = 3519
SECONDS = 8.0
EVENTS = 9
"""Of torment, at least; the seed is one that draws every kind of event in it."""

GREEDY = Plan(prompt=0, max_tokens=4)
REFERENCES = {0: [5, 6, 7, 8, 9]}
FILES = frozenset({"lock", "group.0"})
SEGMENTS = frozenset({"kv.0"})
COUNTED = dict.fromkeys(set().union(*OUTCOMES.values()), 0.0)


def finished(*tokens: int) -> Record:
    return Record(GREEDY, Ending.FINISHED, "", list(tokens))


# --- whole runs -----------------------------------------------------------------------------------


def test_a_short_run_is_clean(tmp_path: Path) -> None:
    report = Chaos(tmp_path, "fake", SEED, SECONDS, EVENTS).run()
    assert report.problems == [], report.table()
    assert report.orphans == set()
    assert set(report.events) >= {Event.SWITCH, Event.KILL, Event.BURST, Event.MALFORMED}
    assert len(report.recoveries) >= 1
    endings = {record.ending for record in report.records}
    assert endings >= {Ending.FINISHED, Ending.REFUSED, Ending.POOL_FULL}


class Sabotaged(Chaos):
    """A run whose node leaves a file and a segment behind, and whose clients get wrong answers.

    One answer is changed, one is lost, and one is said to have ended otherwise.
    """

    async def _torment(self, http: httpx.AsyncClient) -> None:
        endings = [Ending.FAILED, Ending.BROKEN, Ending.FINISHED]

        async def tell_wrong(http: httpx.AsyncClient, plan: Plan) -> Record:
            record = await ask(http, plan)
            greedy = plan.temperature == 0 and plan.cancel_after is None
            if not endings or not greedy or record.ending is not Ending.FINISHED:
                return record
            ending, tokens = endings.pop(), record.tokens
            if ending is Ending.FINISHED:
                tokens = [tokens[0] + 1, *tokens[1:]]
            return msgspec.structs.replace(record, ending=ending, tokens=tokens)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "ask", tell_wrong)
            await super()._torment(http)

    async def _recover(self, http: httpx.AsyncClient) -> None:
        name = self._node.runtime_dir.name
        (self._node.runtime_dir / "forgotten").touch()
        Path(f"/dev/shm/{name}-forgotten").touch()
        await super()._recover(http)


def test_a_run_is_not_clean_if_anything_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SETTLE_SECONDS", 0.5)
    chaos = Sabotaged(tmp_path, "fake", SEED, 1.0)
    problems = "\n".join(chaos.run().problems)
    for wanted in (
        "a changed token at 0 of",
        "broken: ",
        "lost+poisoned: the server counts 0, clients 1",
        "files: [] became ['forgotten']",
        "segments: [] became ['shoal-",
    ):
        assert wanted in problems


# --- records --------------------------------------------------------------------------------------


def test_clean_records_have_no_problems() -> None:
    records = [finished(5, 6, 7, 8), Record(GREEDY, Ending.CANCELLED, "", [5, 6])]
    assert check_records(records, REFERENCES) == []
    for cancelled in ("aborted", "finished"):
        counted = COUNTED | {"finished": 1.0}
        counted[cancelled] += 1
        assert check_counters(records, counted) == []
    assert check_counters(records, COUNTED | {"finished": 1.0}) == []


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (finished(5, 6, 0, 8), "a changed token at 2"),
        (finished(5, 7, 8, 9), "a changed token at 1"),
        (finished(5, 6, 6, 7), "a changed token at 2"),
        (finished(5, 6, 7), "3 tokens instead of 4"),
        (Record(GREEDY, Ending.FAILED, "why", [6]), "a changed token at 0"),
        (Record(GREEDY, tokens=[5]), "broken: no end"),
        (Record(GREEDY, Ending.REFUSED, "why"), "a valid request was refused: why"),
        (Record(None, Ending.FINISHED), "a malformed request was served"),
    ],
    ids=["changed", "skipped", "repeated", "short", "failed", "broken", "refused", "served"],
)
def test_a_doctored_record_is_found(record: Record, problem: str) -> None:
    (found,) = check_records([finished(5, 6, 7, 8), record], REFERENCES)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "counted",
    [{"finished": 1.0}, {"finished": 3.0}, {"finished": 2.0, "lost": 1.0}],
    ids=["lost", "twice", "two outcomes"],
)
def test_a_request_that_the_server_counts_otherwise_is_found(counted: dict[str, float]) -> None:
    records = [finished(5, 6, 7, 8), finished(5, 6, 7, 8)]
    assert check_counters(records, COUNTED | {"finished": 2.0}) == []
    assert check_counters(records, COUNTED | counted) != []


@pytest.mark.parametrize(
    "after",
    [
        Resources(("engine 0", "engine 1"), {7: 20}, FILES, SEGMENTS),
        Resources(("engine 0",), {7: 40}, FILES, SEGMENTS),
        Resources(("engine 0",), {7: 20}, FILES | {"group.1"}, SEGMENTS),
        Resources(("engine 0",), {7: 20}, FILES, SEGMENTS | {"kv.1"}),
    ],
    ids=["process", "descriptors", "file", "segment"],
)
def test_a_leak_is_found(after: Resources) -> None:
    before = Resources(("engine 0",), {7: 20}, FILES, SEGMENTS)
    renamed = Resources(("engine 0",), {7: 20}, frozenset({"lock", "group.1"}), SEGMENTS)
    assert check_resources(before, before) == check_resources(before, renamed) == []
    assert len(check_resources(before, after)) == 1


def test_a_process_that_grows_is_found() -> None:
    still = Growth("front end 0", 600.0, 590.0, 600.0, 0.5, 7)
    grown = Growth("engine 1", 300.0, 200.0, 300.0, 60.0, 8)
    assert check_memory([still], 60.0) == []
    (problem,) = check_memory([still, grown], 60.0)
    assert problem.startswith("memory of engine 1: 60.0 MiB/min")
    assert check_memory([grown], 6.0) == [], "so short a time says nothing"


def a_process_that_waits() -> subprocess.Popen[bytes]:
    """Return a process that ends with its next line of input.

    It has said a line itself: until then the system may still call it by its parent's name.
    """
    command = [sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_process_that_outlives_the_node_is_named() -> None:
    with a_process_that_waits() as process:
        life = life_of(process.pid)
        assert life is not None
        late, left = await_ends([life], 0.0)
        assert late == left == {life.name}
        assert "python" in life.name
        process.communicate(b"\n")
        assert await_ends([life], 0.0) == (set(), set())
    assert life_of(process.pid) is None


def test_a_process_is_over_though_its_parent_does_not_know() -> None:
    with a_process_that_waits() as process:
        life = life_of(process.pid)
        assert life is not None
        assert not life.is_over
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert life_of(process.pid) is not None, "it is still there"
        assert life.is_over


OF_TWO_THREADS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.readline).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_is_not_over_whose_first_thread_alone_has_ended() -> None:
    command = [sys.executable, "-c", OF_TWO_THREADS]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        state = Path(f"/proc/{process.pid}/stat")
        while state.read_text().rpartition(") ")[2][0] != "Z":
            os.sched_yield()
        life = life_of(process.pid)
        assert life is not None
        assert not life.is_over
        process.kill()
