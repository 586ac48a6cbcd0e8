"""Traces are read as they are published, and what cannot be read is named."""

from pathlib import Path

import pytest

from shoal.loadgen.traces import TraceError, read_trace
from shoal.loadgen.workload import Block

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_rows_become_arrivals(tmp_path: Path) -> None:
    rows = (
        "2023-11-16 18:17:04.5319600,3180,8\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n"
        "2023-11-16 23:59:59,7,0\n"
    )
    workload = read_trace(write(tmp_path, HEAD + rows))
    assert workload.name == "trace"
    first, second = workload.arrivals
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at == pytest.approx(0.552)
    assert second.prompt_tokens == 3180


def test_a_time_zone_is_read_over(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,10,1\n2024-05-10 00:00:01.009930+00:00,10,1\n"
    assert [a.at for a in read_trace(write(tmp_path, HEAD + rows)).arrivals] == [0.0, 1.0]


def test_burstgpt(tmp_path: Path) -> None:
    text = (
        "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,s,ChatGPT,472,18,490,Conversation log\n"
        "45,s,ChatGPT,1087,0,1087,Conversation log\n"
        "118,s,GPT-4,417,276,693,API log\n"
    )
    arrivals = read_trace(write(tmp_path, text)).arrivals
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in arrivals] == [
        (0.0, 472, 18),
        (113.0, 417, 276),
    ]


def test_mooncake(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 30535, "input_length": 500, "output_length": 26, "hash_ids": [46]}\n'
    )
    first, second = read_trace(write(tmp_path, text)).arrivals
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 600, 52)
    assert first.prefix == (Block("46", 512), Block("47", 512))
    assert second.at == pytest.approx(3.053)
    assert second.prefix == first.prefix[:1]


def test_qwen_on_bailian(tmp_path: Path) -> None:
    """It has Mooncake's fields, but seconds and smaller blocks, and says of which chat each is."""
    text = (
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40,'
        ' "output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090, 7]}\n'
        '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 20,'
        ' "output_length": 9, "type": "search", "turn": 2, "hash_ids": [1089, 8]}\n'
    )
    first, second = read_trace(write(tmp_path, text)).arrivals
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 40, 132)
    assert first.prefix == (Block("1089", 16), Block("1090", 16), Block("7", 16))
    assert second.at == pytest.approx(1.386)
    assert second.prefix[0] == first.prefix[0]


def test_the_projects_own_format(tmp_path: Path) -> None:
    text = (
        '{"at": 1.5, "prompt_tokens": 90, "output_tokens": 5, "priority": -3,'
        ' "prefix": "system", "prefix_tokens": 40}\n\n'
        '{"at": 1, "prompt_tokens": 9, "output_tokens": 1}\n'
    )
    first, second = read_trace(write(tmp_path, text)).arrivals
    assert (first.at, first.priority, first.prefix) == (0.0, 0, ())
    assert (second.at, second.priority) == (0.5, -3)
    assert second.prefix == (Block("system", 40),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "its columns are neither TIMESTAMP"),
        ("[" + 200_000 * "x", "field larger than field limit"),
        (HEAD + 200_000 * "x", "field larger than field limit"),
        (HEAD, "no request in it"),
        (HEAD + "2023-11-16 18:17:03,12,x\n", "line 2: invalid literal"),
        (HEAD + "2023-11-16 18:17:03,12,1\nyesterday,1,1\n", "line 3: Invalid isoformat"),
        (HEAD + "2023-11-16 18:17:03,12\n", "line 2: "),
        ("{", "line 1: "),
        ('{"at": 0, "prompt_tokens": 1, "output_tokens": 1}\n[1]\n', "line 2: Expected `object`"),
        ('{"at": 0, "prompt_tokens": 1}\n', "line 1: .*output_tokens"),
        ('{"at": 0, "prompt_tokens": 1, "output_tokens": 1, "prioritty": 1}', "prioritty"),
        ('{"at": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_tokens": -1}', ">= 0"),
        ('{"timestamp": 0, "input_length": "x"}', r"line 1: .*input_length"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, text))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read .*none\.csv"):
        read_trace(tmp_path / "none.csv")
