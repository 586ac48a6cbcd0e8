"""A run is kept in a file whole, under vLLM's keys too, and shown as a page and as a line."""

import asyncio
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.loadgen.client import Client, Settings
from shoal.loadgen.exchange import Exchange, Outcome
from shoal.loadgen.layout_timeline import LayoutLog
from shoal.loadgen.open_loop import Replay, Run
from shoal.loadgen.page import page
from shoal.loadgen.progress import StatusLine
from shoal.loadgen.prompts import Prompts
from shoal.loadgen.replay_results import Result, ResultError, encode, read
from shoal.loadgen.summary import Objective
from shoal.loadgen.validity import judge
from shoal.loadgen.workload import Arrival, Block, Phase, Workload
from tests.loadgen.stand_in import Clock


def result(name: str = "a <run>") -> Result:
    first = Arrival(0.0, 10, 3, priority=-1, phase=Phase.BURST, prefix=(Block("x", 4),))
    run = Run(
        exchanges=[
            Exchange(
                0,
                first,
                sent=0.001,
                chunk_times=[0.101, 0.151, 1.201],
                ended=1.21,
                outcome=Outcome.OK,
                status=200,
                finish_reason="length",
                prompt_tokens=11,
                output_tokens=3,
            ),
            Exchange(
                1,
                Arrival(0.5, 20, 5, phase=Phase.QUIET),
                sent=0.5,
                ended=0.6,
                outcome=Outcome.REFUSED_503,
                status=503,
                error="full",
            ),
        ],
        planned=3,
        duration=2.0,
        loop_lags=[0.001, 0.002],
        log=LayoutLog(layouts=[(0.0, [[0], [1]]), (1.0, [[0, 1]])], since=0),
    )
    return Result(name, "w", "/v1/completions", "m", judge(run), run)


def test_a_file_keeps_all_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(encode(result(), [], seed=3))
    again = read(path)
    assert again == result()
    assert again.report([Objective(0, 1.0, 1.0)]) == result().report([Objective(0, 1.0, 1.0)])
    assert json.loads(path.read_text())["seed"] == 3


def test_vllms_keys() -> None:
    content = json.loads(encode(result(), []))
    assert (content["completed"], content["failed"], content["num_prompts"]) == (1, 1, 3)
    assert (content["total_input_tokens"], content["total_output_tokens"]) == (11, 3)
    assert content["output_throughput"] == 1.5
    assert content["mean_ttft_ms"] == pytest.approx(100.0)
    assert content["median_tpot_ms"] == pytest.approx(550.0)
    assert content["p99_e2el_ms"] == pytest.approx(1200.0)
    assert content["std_itl_ms"] == pytest.approx(500.0)
    assert content["ttfts"] == pytest.approx([0.1, 0.0])
    assert content["itls"][0] == pytest.approx([0.05, 1.05])
    assert content["itls"][1] == []
    assert content["latencies"] == pytest.approx([1.2, 0.0])
    assert (content["input_lens"], content["output_lens"]) == ([11, 20], [3, 0])
    assert content["start_times"] == [0.001, 0.5]
    assert content["errors"] == ["", "full"]
    # Two chunks came in the first second after the first request, which ran into the next.
    assert (content["max_output_tokens_per_s"], content["max_concurrent_requests"]) == (2.0, 1)


@pytest.mark.parametrize(("content", "message"), [("{}", "is not a file of"), ("", "not a file")])
def test_another_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ResultError, match=message):
        read(path)
    with pytest.raises(ResultError, match="cannot read"):
        read(tmp_path / "none.json")


def test_notes_say_what_is_wrong_with_tokens() -> None:
    one = result()
    assert one.notes() == [
        "1 requests had another prompt length than asked for",
        "1 turns of chats were not sent, as one before failed",
    ]
    one.run.planned = len(one.run.exchanges)
    assert len(one.notes()) == 1


class Page(HTMLParser):
    """Collects the text of a page and notes what it would fetch or run."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.text = ""
        self.foreign: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img") or any(name in ("src", "href") for name, _ in attrs):
            self.foreign.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_runs_side_by_side() -> None:
    content = page([result(), result("other")], [Objective(0, 1.0, 1.0)])
    shown = Page(content)
    assert shown.foreign == []
    for text in ("a <run>", "other", "Successful requests:", "refused_503", "50.0%", "Invalid"):
        assert (text in shown.text) is (text != "Invalid")
    picture = content[content.index("<svg") : content.index("</svg>") + len("</svg>")]
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_a_page_says_that_a_run_is_invalid() -> None:
    one = result()
    one.run.interrupted = True
    shown = Page(page([Result(one.name, "w", "/", "m", judge(one.run), one.run)]))
    assert "Invalid: it was stopped, with 1 requests not sent" in shown.text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status_line(stream: io.StringIO) -> StatusLine:
    client, clock = Client(Settings("http://x"), Clock().now), Clock()
    replay = Replay(client, Prompts(range(9), 0), Workload("w", ()), clock)
    replay.run_so_far = result().run
    return StatusLine(stream, replay)


def test_the_status_line_tells_what_happens() -> None:
    text = status_line(Terminal()).text()
    for part in ("sent 2/3", "running 0", "done 1", "failed 1", "sent up to 1.0 ms late"):
        assert part in text


def test_before_the_start_no_time_has_passed() -> None:
    """The clock's zero is the machine's start, which is no part of a run."""
    line = status_line(Terminal())
    assert line.text().startswith("0 s ")
    assert "  0 chunks/s" in line.text(), "those of the first call are not told again"


async def test_the_status_line_is_removed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    shown = asyncio.create_task(status_line(terminal).show())
    await asyncio.sleep(0)
    shown.cancel()
    await asyncio.wait({shown})
    *_, written = terminal.getvalue().partition("sent 2/3")
    assert written.count("\n") == 1, "rich ends the line, and goes back to remove it"
    assert "\x1b[1A\x1b[2K" in written


async def test_without_a_terminal_there_is_no_status_line() -> None:
    stream = io.StringIO()
    await status_line(stream).show()
    assert stream.getvalue() == ""
