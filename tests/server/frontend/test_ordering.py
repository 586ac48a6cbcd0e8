"""Outputs of moved requests reach the front end's processor in order, whatever overtakes what."""

from types import SimpleNamespace

from shoal.policies.values.layouts import alone
from shoal.server.frontend.ordering import InOrder

PROMPT = 10


class Front:
    """Takes outputs in as vLLM's processor does: every message before the next is looked at."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.gone = False
        self.order = InOrder(self._standing)

    def _standing(self, _: str) -> tuple[int, int] | None:
        return None if self.gone else (PROMPT, len(self.tokens))

    def receive(self, engine: int, *tokens: int, prompt: int | None = None) -> None:
        stats = None if prompt is None else SimpleNamespace(num_prompt_tokens=prompt)
        output = SimpleNamespace(request_id="r", new_token_ids=list(tokens), prefill_stats=stats)
        for due in self.order.take(alone(engine), [output]):
            self.tokens += due.new_token_ids


def test_outputs_in_order_pass() -> None:
    front = Front()
    front.receive(0, 1, prompt=PROMPT)
    front.receive(0, 2)
    front.receive(1, 3, prompt=PROMPT + 2)
    front.receive(1, 4)
    assert front.tokens == [1, 2, 3, 4]


def test_the_new_units_outputs_wait_for_the_old_ones() -> None:
    front = Front()
    front.receive(0, 1, prompt=PROMPT)
    front.receive(1, 4, prompt=PROMPT + 3)
    front.receive(1, 5)
    assert front.tokens == [1]
    front.receive(0, 2)
    assert front.tokens == [1, 2]
    front.receive(0, 3)
    assert front.tokens == [1, 2, 3, 4, 5]
    front.receive(1, 6)
    assert front.tokens == [1, 2, 3, 4, 5, 6]
    assert len(front.order) == 0


def test_outputs_of_a_request_that_moved_twice_wait_for_each_other() -> None:
    front = Front()
    front.receive(0, 1, prompt=PROMPT)
    front.receive(2, 6, prompt=PROMPT + 5)
    front.receive(1, 4, prompt=PROMPT + 3)
    front.receive(2, 7)
    front.receive(0, 2)
    assert front.tokens == [1, 2]
    front.receive(0, 3)
    assert front.tokens == [1, 2, 3, 4]
    front.receive(1, 5)
    assert front.tokens == [1, 2, 3, 4, 5, 6, 7]
    front.receive(2, 8)
    assert front.tokens[-1] == 8
    assert len(front.order) == 0


def test_outputs_of_a_request_that_came_back_to_a_unit_wait_for_those_in_between() -> None:
    front = Front()
    front.receive(0, 1, 2, prompt=PROMPT)
    front.receive(0, 5, prompt=PROMPT + 4)
    front.receive(0, 6)
    front.receive(1, 3, prompt=PROMPT + 2)
    assert front.tokens == [1, 2, 3]
    front.receive(1, 4)
    assert front.tokens == [1, 2, 3, 4, 5, 6]
    assert len(front.order) == 0


def test_all_that_waits_may_be_due_at_once() -> None:
    front = Front()
    front.receive(1, 2, prompt=PROMPT + 1)
    front.receive(2, 3, prompt=PROMPT + 2)
    assert front.tokens == []
    front.receive(0, 1, prompt=PROMPT)
    assert front.tokens == [1, 2, 3]


def test_a_request_that_moves_before_its_first_token_waits_for_nothing() -> None:
    front = Front()
    front.receive(1, 1, prompt=PROMPT)
    assert front.tokens == [1]


def test_nothing_is_kept_for_requests_that_are_gone() -> None:
    front = Front()
    front.receive(1, 4, prompt=PROMPT + 3)
    assert len(front.order) == 1
    front.gone = True
    front.receive(1, 5)
    assert len(front.order) == 0


def test_of_outputs_that_go_on_nobody_asks_how_far_they_are() -> None:
    asked: list[str] = []

    def standing(request_id: str) -> tuple[int, int]:
        asked.append(request_id)
        return PROMPT, 1

    def outputs(prefill: object = None) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(request_id=f"r{k}", new_token_ids=[7], prefill_stats=prefill)
            for k in range(64)
        ]

    order = InOrder(standing)
    going_on = outputs()
    assert order.take(alone(0), going_on) == going_on
    assert asked == []

    order.take(alone(0), outputs(SimpleNamespace(num_prompt_tokens=PROMPT)))
    assert len(asked) == 64
