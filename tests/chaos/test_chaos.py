"""What the checks of a chaos run must find in records that were tampered with."""

import pytest

from tests.chaos.checks import (
    OUTCOMES,
    Ending,
    Record,
    Resources,
    check_counters,
    check_records,
    check_resources,
)
from tests.chaos.events import Plan

GREEDY = Plan(prompt=0, max_tokens=4)
REFERENCES = {0: [5, 6, 7, 8, 9]}
COUNTED = dict.fromkeys(set().union(*OUTCOMES.values()), 0.0)


def finished(*tokens: int) -> Record:
    return Record(GREEDY, Ending.FINISHED, "", list(tokens))


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
        Resources(("engine 0", "engine 1"), {7: 20}, 3, 1),
        Resources(("engine 0",), {7: 40}, 3, 1),
        Resources(("engine 0",), {7: 20}, 4, 1),
        Resources(("engine 0",), {7: 20}, 3, 2),
    ],
    ids=["process", "descriptors", "file", "segment"],
)
def test_a_leak_is_found(after: Resources) -> None:
    before = Resources(("engine 0",), {7: 20}, 3, 1)
    assert check_resources(before, before) == []
    assert len(check_resources(before, after)) == 1
