"""Datasets are read in both formats, and are sent at the times of a workload."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.loadgen.datasets import DatasetError, Turn, read_dataset, with_contents
from shoal.loadgen.workload import Arrival, Message, Workload

SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello there"},
            {"from": "human", "value": "Bye"},
            {"from": "gpt", "value": "So soon"},
        ],
    },
    {"id": "nobody asks", "conversations": [{"from": "gpt", "value": "Hm"}]},
    {
        "id": "b",
        "conversations": [{"from": "system", "value": "S"}, {"from": "user", "value": "Q"}],
    },
]
HI, BYE = Message("user", "Hi"), Message("user", "Bye")
A = [Turn((HI,), "Hello there"), Turn((HI, Message("assistant", "Hello there"), BYE), "So soon")]
B = [Turn((Message("system", "S"), Message("user", "Q")))]


def sharegpt(folder: Path) -> Path:
    path = folder / "chats.json"
    path.write_text(json.dumps(SHAREGPT))
    return path


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_a_chat_of_sharegpt_has_a_turn_for_each_question(tmp_path: Path) -> None:
    assert read_dataset(sharegpt(tmp_path)) == [A, B]


def test_a_line_is_one_request(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    path = lines(
        *(tmp_path, {"prompt": "Once", "output_tokens": 9}),
        {"messages": [*messages, {"role": "user", "content": "Bye"}]},
    )
    assert read_dataset(path) == [
        [Turn("Once", output_tokens=9)],
        [Turn((HI, Message("assistant", "Yes"), BYE))],
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 3}, "line 1: Expected"),
        ({"text": "a"}, "line 1: Object contains unknown field `text`"),
        ({}, "line 1: it has neither or both"),
        ({"prompt": "a", "messages": []}, "line 1: it has neither or both"),
        ({"prompt": "a", "output_tokens": 0}, "line 1: output_tokens"),
        ({"messages": []}, "nothing to send"),
    ],
)
def test_what_is_no_dataset_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = lines(tmp_path, row)
    with pytest.raises(DatasetError, match=message) as refused:
        read_dataset(path)
    assert str(path) in str(refused.value)


def test_other_json_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    with pytest.raises(DatasetError, match="cannot read"):
        read_dataset(path)
    path.write_text('[{"chat": []}]')
    with pytest.raises(DatasetError, match="not in ShareGPT"):
        read_dataset(path)


def test_it_is_sent_at_the_times_of_the_workload() -> None:
    workload = Workload("w", tuple(Arrival(float(k), 5, 7) for k in range(3)))
    filled = with_contents(workload, [A, B], seed=1, think_seconds=2.0)
    assert [arrival.at for arrival in filled.arrivals] == [0.0, 1.0, 2.0]
    sent = [[turn.content for turn in arrival.turns()] for arrival in filled.arrivals]
    known = [[turn.content for turn in talk] for talk in (A, B)]
    assert sent[0] == sent[2], "it begins again"
    assert sorted(sent[:2], key=len) == sorted(known, key=len)
    assert filled.requests == sum(map(len, sent))
    assert {turn.output_tokens for a in filled.arrivals for turn in a.turns()} == {7}
    again = with_contents(workload, [A, B], seed=1, think_seconds=2.0)
    assert again == filled
    (one, *_) = with_contents(workload, [A], max_turns=1).arrivals
    assert one.next is None


def test_the_length_of_an_answer_is_the_rows_or_that_of_its_answer() -> None:
    workload = Workload("w", (Arrival(0.0, 5, 7),))

    def lengths(*talk: Turn) -> list[int]:
        count = len
        filled = with_contents(workload, [talk], count=count)
        return [turn.output_tokens for turn in filled.arrivals[0].turns()]

    assert lengths(*A) == [len("Hello there"), len("So soon")]
    assert lengths(Turn("p", output_tokens=3), Turn("p", "four", 2), Turn("p")) == [3, 2, 7]
