"""A front end's word on requests whose engines died, and what it lets through from then on."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.policies.values.layouts import alone
from shoal.runtime.clock import ManualClock
from shoal.runtime.protocol.messages import GoesOn, Interrupted, Progress, Received
from shoal.runtime.protocol.wire import decode_request, mark_attempt
from shoal.server.frontend.interruptions import OVERDUE_SECONDS, Interruptions
from shoal.server.frontend.ordering import InOrder
from tests.runtime.loopback_node import request_payload

PROMPT = 10
OLD, NEW = alone(0), alone(1)


class Front:
    """Outputs' way to a processor that takes them in when it is told to."""

    def __init__(self, *requests: str) -> None:
        self.tokens: dict[str, list[int]] = {request: [] for request in requests}
        self.sent: list[Received | GoesOn] = []
        self.expected: list[str] = []
        self.late = 0
        self.clock = ManualClock(100.0)
        self.order = InOrder(self._standing, self.clock)
        self.interruptions = Interruptions(
            3,
            self.order,
            self.tokens.get,
            send=self.sent.append,
            expect=self.expected.append,
            count_late=self._count,
        )

    def _standing(self, request: str) -> tuple[int, int] | None:
        return (PROMPT, len(self.tokens[request])) if request in self.tokens else None

    def _count(self, late: int) -> None:
        self.late += late

    def pass_on(self, unit: tuple[int, ...], *outputs: Any) -> list[Any]:
        return self.order.take(unit, self.interruptions.admit(unit, outputs))

    def take_in(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.tokens[output.request_id] += output.new_token_ids
        self.interruptions.settle()

    def receive(self, unit: tuple[int, ...], *outputs: Any) -> None:
        self.take_in(self.pass_on(unit, *outputs))

    def interrupt(self, **attempts: int) -> None:
        self.interruptions.interrupted(Interrupted(attempts))


def output(request: str, *tokens: int, attempt: int = 0, prompt: int | None = None) -> Any:
    frames = mark_attempt(request_payload(request, [1], 9), attempt)
    stats = None if prompt is None else SimpleNamespace(num_prompt_tokens=prompt)
    return SimpleNamespace(
        request_id=request,
        new_token_ids=list(tokens),
        prefill_stats=stats,
        trace_headers=decode_request(frames).headers,
    )


def test_it_says_what_the_client_has() -> None:
    front = Front("a", "b")
    front.receive(OLD, output("a", 1), output("b", 5))
    front.receive(OLD, output("a", 2))
    front.interrupt(a=1, b=1, gone=1)
    progress = {"a": Progress(1, [1, 2]), "b": Progress(1, [5])}
    assert front.sent == [Received(3, progress, ["gone"])]
    assert front.expected == ["a", "b"]


def test_it_waits_until_what_it_let_through_is_taken_in() -> None:
    front = Front("a")
    passed = front.pass_on(OLD, output("a", 1, 2))
    front.interrupt(a=1)
    assert front.sent == []
    front.take_in(passed)
    assert front.sent == [Received(3, {"a": Progress(1, [1, 2])})]


def test_late_outputs_are_dropped_and_those_of_the_new_attempt_are_not() -> None:
    front = Front("a", "b")
    front.receive(OLD, output("a", 1), output("b", 1))
    front.interrupt(a=1)
    front.receive(OLD, output("a", 2), output("b", 2))
    front.receive(NEW, output("a", 2, attempt=1, prompt=PROMPT + 1))
    front.receive(OLD, output("a", 3))
    front.receive(NEW, output("a", 3, attempt=1))
    assert front.tokens == {"a": [1, 2, 3], "b": [1, 2]}
    assert front.late == 2


def test_without_the_answer_the_same_outputs_would_repeat_a_token() -> None:
    front = Front("a")
    front.receive(OLD, output("a", 1))
    front.receive(OLD, output("a", 2))
    front.receive(NEW, output("a", 2, attempt=1, prompt=PROMPT + 1))
    assert front.tokens["a"] == [1, 2, 2]


def test_an_engine_may_come_back_and_go_on_with_its_own_request() -> None:
    front = Front("a")
    front.receive(OLD, output("a", 1))
    front.interrupt(a=1)
    front.receive(OLD, output("a", 2, attempt=1, prompt=PROMPT + 1))
    front.receive(OLD, output("a", 2))
    assert front.tokens["a"] == [1, 2]


def test_the_controllers_word_always_holds() -> None:
    front = Front("a")
    front.interrupt(a=1)
    front.receive(None, output("a", 9))
    assert front.tokens["a"] == [9]


def test_it_tells_once_that_a_request_goes_on() -> None:
    front = Front("a", "b")
    front.interrupt(a=1)
    front.sent.clear()
    front.receive(NEW, output("a", 1, attempt=1), output("b", 1))
    front.receive(NEW, output("a", 2, attempt=1))
    assert front.sent == [GoesOn(["a"])]


def test_outputs_that_were_held_back_are_forgotten() -> None:
    front = Front("a")
    front.receive(NEW, output("a", 4, prompt=PROMPT + 3))
    assert len(front.order) == 1
    front.interrupt(a=1)
    assert len(front.order) == 0
    assert front.sent == [Received(3, {"a": Progress(1, [])})]


@pytest.mark.parametrize("known", [0, 2])
def test_what_waits_for_too_long_is_begun_again(known: int) -> None:
    front = Front("a")
    if known:
        front.interrupt(a=known)
        front.sent.clear()
    front.receive(NEW, output("a", 4, attempt=known, prompt=PROMPT + 3))
    front.sent.clear()
    front.clock.advance(OVERDUE_SECONDS - 0.1)
    front.interruptions.begin_overdue_again()
    assert front.sent == []
    front.clock.advance(0.2)
    front.interruptions.begin_overdue_again()
    assert front.sent == [Received(3, {"a": Progress(known + 1, [])})]
    front.interruptions.begin_overdue_again()
    assert len(front.sent) == 1


def test_a_question_that_crosses_with_its_own_keeps_the_later_attempt() -> None:
    front = Front("a")
    front.interrupt(a=3)
    front.interrupt(a=2)
    assert front.sent[-1] == Received(3, {"a": Progress(3, [])})


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    front = Front("a", "b")
    front.interrupt(a=1)
    del front.tokens["a"]
    front.interrupt(b=1)
    assert len(front.interruptions) == 1


def test_what_waits_for_outputs_of_a_request_that_has_ended_is_forgotten() -> None:
    front = Front("a")
    front.receive(NEW, output("a", 4, prompt=PROMPT + 3))
    del front.tokens["a"]
    front.clock.advance(OVERDUE_SECONDS)
    front.interruptions.begin_overdue_again()
    front.interruptions.begin_overdue_again()
    assert front.sent == [Received(3, {}, ["a"])]
    assert len(front.order) == 0
