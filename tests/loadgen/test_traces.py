"""Traces are read as they are published, and what cannot be read is named."""

from pathlib import Path

import pytest

from loadgen.traces import TraceError, read_azure

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
    workload = read_azure(write(tmp_path, HEAD + rows))
    assert workload.name == "trace"
    first, second = workload.arrivals
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at == pytest.approx(0.552)
    assert second.prompt_tokens == 3180


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "its columns are not TIMESTAMP"),
        (HEAD, "no request in it"),
        (HEAD + "2023-11-16 18:17:03,12,x\n", "line 2: invalid literal"),
        (HEAD + "2023-11-16 18:17:03,12,1\nyesterday,1,1\n", "line 3: Invalid isoformat"),
        (HEAD + "2023-11-16 18:17:03,12\n", "line 2: "),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_azure(write(tmp_path, text))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read .*none\.csv"):
        read_azure(tmp_path / "none.csv")
