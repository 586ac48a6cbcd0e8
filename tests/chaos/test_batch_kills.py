"""A node that is killed during a batch answers each line once; and the check notices if not."""

from pathlib import Path
from typing import Any

from tests.chaos.batch_kills import POISON, differences, kill_nodes


def result(name: str, text: str | None, status: int = 200) -> dict[str, Any]:
    body: dict[str, Any] = {"choices": [{"text": text}]} if status == 200 else {"error": {}}
    return {"custom_id": name, "response": {"status_code": status, "body": body}}


RESULTS = [result("a", "once"), result("b", "upon"), result("c", None, 400)]


def test_every_line_is_answered_once_whatever_is_killed(tmp_path: Path) -> None:
    report = kill_nodes(tmp_path, "fake", seed=1, kills=2)
    assert report.problems == [], report.table()
    assert report.kills.total() == 2
    assert report.batches >= 4, "of each node an undisturbed one, too"


def test_the_order_of_results_does_not_matter() -> None:
    assert differences(RESULTS, RESULTS[::-1]) == []


def test_a_lost_a_repeated_and_a_changed_answer_are_noticed() -> None:
    lost, changed = RESULTS[1:], [*RESULTS[:1], result("b", "in"), *RESULTS[2:]]
    assert differences(RESULTS, lost) == ["a was answered [] instead of [(200, 'once')]"]
    assert len(differences(RESULTS, [*RESULTS, RESULTS[2]])) == 1
    assert len(differences(RESULTS, changed)) == 1
    assert len(differences(RESULTS, [*RESULTS[:2], result("c", "now")])) == 1


def test_a_line_that_two_deaths_were_blamed_on_is_not_lost_but_may_come_once_only() -> None:
    def failed(message: str) -> dict[str, Any]:
        body = {"error": {"message": message}}
        return {"custom_id": "a", "response": {"status_code": 500, "body": body}}

    blamed = failed(f"2 {POISON}")
    assert differences(RESULTS, [blamed, *RESULTS[1:]]) == []
    assert len(differences(RESULTS, [blamed, *RESULTS])) == 1
    assert len(differences(RESULTS, [failed("it is broken"), *RESULTS[1:]])) == 1
