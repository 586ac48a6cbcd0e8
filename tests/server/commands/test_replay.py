"""``shoal replay`` and ``shoal report`` from their arguments to their exit codes and files."""

import asyncio
import itertools
import json
import signal
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from shoal.server.commands import cli
from tests.loadgen.stand_in import StandIn, complete, events, stand_in, stream, token
from tests.server.node import ServedNode, served_node

SHORT = ("--trace", "poisson", "--rate", "50", "--requests", "8")
SMALL = ("--prompt-tokens", "5:40", "--output-tokens", "2:9")


COUNTERS = """\
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0"}} {tokens}.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} {tokens}.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="length"}} {requests}.0
"""


async def start(server: StandIn, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shoal.server.commands.cli", "replay", "--base-url", server.url),
        *(*SMALL, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_run_that_nobody_serves_is_not_valid() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=429)

    async with stand_in() as server:
        server.answer = refuse
        process = await start(server, *SHORT)
        out, err = await process.communicate()
    assert process.returncode == 1
    assert b"INVALID RUN: no request succeeded" in out
    assert b"refused_429:                           8" in out
    assert err == b""


async def test_users_of_a_closed_loop_send_the_turns_of_a_dataset(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps([{"conversations": said * 2}]))

    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, *events(4, (await request.json())["max_completion_tokens"]))

    async with stand_in() as server:
        server.answer = answer
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shoal.server.commands.cli", "replay"),
            *("--base-url", server.url, "--trace", "poisson", "--requests", "4"),
            *("--concurrency", "2", "--endpoint", "chat", "--dataset", str(chats)),
            *("--think-seconds", "0.001", "--output-tokens", "2", "--max-lag-ms", "60000"),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert b"Successful requests:                     8" in out
        lengths = [len(body["messages"]) for body, _ in server.requests]
    assert sorted(lengths) == [1] * 4 + [3] * 4


async def test_the_largest_rate_is_searched_for(tmp_path: Path) -> None:
    words = (
        "--trace",
        "poisson",
        "--find-max-rate",
        "20:40",
        "--duration",
        "0.5",
        "--windows",
        "1",
    )
    file = tmp_path / "found.json"
    async with stand_in() as server:
        process = await start(
            *(server, *words, "--target", "0:600000:600000", "--max-lag-ms", "60000"),
            *("--json", str(file)),
        )
        out, err = await process.communicate()
    said, found = out.decode(), json.loads(file.read_text())["find_max_rate"]
    assert found["trials"][0]["rate"] == 20.0
    # On a slow machine the client's lag may end the search: that is said, too.
    assert process.returncode == (1 if found["problem"] else 0), err
    assert "The search ended early" in said or "Even 40 requests per second" in said


async def test_a_run_that_lags_is_not_valid() -> None:
    async with stand_in() as server:
        process = await start(server, *SHORT, "--max-lag-ms", "0.000001")
        out, _ = await process.communicate()
    assert process.returncode == 1
    assert b"INVALID RUN: sending lagged" in out


async def test_counts_that_differ_from_the_servers_fail() -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="# TYPE x counter\n")

    async with stand_in() as server:
        server.routes["/metrics"] = metrics
        process = await start(server, *SHORT, "--check-metrics", "--max-lag-ms", "60000")
        out, _ = await process.communicate()
    assert process.returncode == 1
    assert out.count(b"DIFFERS") == 3


async def test_a_server_that_is_gone_at_the_end_is_reported() -> None:
    asked = 0

    async def metrics(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text="# TYPE x counter\n", status=200 if asked == 1 else 500)

    async with stand_in() as server:
        server.routes["/metrics"] = metrics
        process = await start(server, *SHORT, "--check-metrics", "--max-lag-ms", "60000")
        out, _ = await process.communicate()
    assert process.returncode == 1
    assert b"Successful requests:                     8" in out
    assert b"the server's counters are not known: " in out


async def test_ctrl_c_still_reports(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    connections: set[Any] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.transport not in connections:
            connections.add(request.transport)
            return await complete(request)
        # Its client has the whole answer of the request before it on this connection.
        response = await stream(request, token())
        process.send_signal(signal.SIGINT)
        await asyncio.Event().wait()
        return response

    async with stand_in() as server:
        server.answer = answer
        # Far more than the test's time limit would allow.
        forever = ("--trace", "poisson", "--rate", "5", "--requests", "100000", "--grace", "0")
        process = await start(server, *forever, "--json", str(figures))
        out, err = await process.communicate()
    assert process.returncode == 130
    assert err == b""
    assert b"INVALID RUN: it was stopped" in out
    outcomes = json.loads(figures.read_text())["outcomes"]
    # Other answers may have been on their way.
    assert 1 <= outcomes["ok"] < len(server.requests)
    assert outcomes["cancelled"] >= 1


async def test_a_request_of_before_the_run_is_not_counted_as_one_of_it() -> None:
    """That which texts are made by; the server counts it when it has been asked once more."""
    counted = 0

    async def metrics(_: web.Request) -> web.Response:
        nonlocal counted
        text = COUNTERS.format(requests=counted, tokens=2 * counted)
        counted = len(server.requests)
        return web.Response(text=text)

    async def tokenize(request: web.Request) -> web.Response:
        words = (await request.json())["prompt"].split()
        return web.json_response({"tokens": list(range(len(words)))})

    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, *events(2, 2))

    async with stand_in() as server:
        server.routes |= {"/metrics": metrics, "/tokenize": tokenize}
        server.answer = answer
        process = await start(server, *SHORT, "--text-prompts", "--check-metrics")
        out, _ = await process.communicate()
    assert len(server.requests) == 9
    assert out.count(b"  agrees") == 3, out.decode()
    assert b"DIFFERS" not in out


async def test_an_api_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    async with stand_in() as server:
        server.answer = lambda request: stream(request, *events(1, 1))
        process = await start(server, *SHORT)
        await process.communicate()
    assert {headers["Authorization"] for _, headers in server.requests} == {"Bearer k3y"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--base-url", "http://127.0.0.1:1", *SHORT), "cannot reach http://127.0.0.1:1"),
        (("--base-url", "localhost:8000", *SHORT), "--base-url localhost:8000"),
        (("--trace", "none.csv"), "cannot read none.csv"),
        ((*SHORT, "--timeout", "0"), "--timeout 0: it must be more than 0"),
        ((*SHORT, "--deadline-ms", "-3"), "--deadline-ms -3"),
        ((*SHORT, "--grace", "-1"), "--grace -1"),
        ((*SHORT, "--json", "/none/x.json"), "cannot write /none/x.json"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_report_of_no_replay_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert cli.main(["report", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- against a server with fake engines -----------------------------------------------------------


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    cache = tmp_path_factory.mktemp("cache")
    with served_node(cache, "--engines", "2", "--fake-step-ms", "2") as served:
        yield served


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="token-ids"),
        pytest.param(("--text-prompts",), id="text"),
        pytest.param(("--endpoint", "chat"), id="chat"),
        pytest.param(("--priorities=-10:1,5:2",), id="priorities"),
        pytest.param(("--deadline-ms", "60000"), id="deadline"),
    ],
)
def test_totals_are_exactly_the_servers(
    node: ServedNode, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    # Prompts of a chat cannot be shorter than its template.
    lengths = ("--prompt-tokens", "30:90", "--output-tokens", "2:9")
    lag = ("--max-lag-ms", "60000")
    cli.main(
        ["replay", "--base-url", node.url, *SHORT, *lengths, *lag, "--check-metrics", *arguments]
    )
    out = capsys.readouterr().out
    assert "Successful requests:                     8" in out
    assert out.count("  agrees") == 7
    assert "DIFFERS" not in out
    assert "another prompt length" not in out


@pytest.mark.parametrize(
    ("preempt", "treated"), [("hard", "paused"), ("soft", "moved"), ("carry", "carried")]
)
def test_totals_are_exact_across_switches(
    node: ServedNode, preempt: str, treated: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    over = threading.Event()

    def keep_switching() -> None:
        for units in itertools.cycle(([[0, 1]], [[0], [1]])):
            body = {"units": units, "preempt": preempt}
            httpx.post(f"{node.admin_url}/admin/layout", json=body, timeout=120)
            if over.is_set() and len(units) == 2:
                return

    thread = threading.Thread(target=keep_switching)
    thread.start()
    try:
        cli.main(
            [
                *("replay", "--base-url", node.url, "--admin-url", node.admin_url),
                *("--trace", "poisson", "--rate", "50", "--requests", "20"),
                # So long that some run whenever the layout is switched, also on a busy machine.
                *("--prompt-tokens", "9:99", "--output-tokens", "200:400"),
                *("--max-lag-ms", "60000", "--check-metrics", "--json", str(figures)),
            ]
        )
    finally:
        over.set()
        thread.join()
    out = capsys.readouterr().out
    assert out.count("  agrees") == 7, out
    switching = json.loads(figures.read_text())["report"]["switching"]
    assert switching["switches"] > 1
    assert switching[treated] > 0


def test_two_runs_side_by_side(
    node: ServedNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in files:
        cli.main(
            [
                *("replay", "--base-url", node.url, *SHORT, *SMALL, "--name", path.stem),
                *("--json", str(path), "--html", str(tmp_path / "own.html")),
                *("--admin-url", node.admin_url),
            ]
        )
    capsys.readouterr()
    both = tmp_path / "both.html"
    written = ("--html", str(both), "--svg", str(tmp_path / "both.svg"), "--title", "Two runs")
    assert cli.main(["report", *map(str, files), *written, "--target=0:1:1"]) == 0
    out = capsys.readouterr().out
    for name in ("one", "two"):
        assert name in out
        # The layout was seen, so there is a panel of it.
        assert f"layout: {name}<" in both.read_text()
        assert f"layout: {name}<" in (tmp_path / "both.svg").read_text()
    assert "Two runs<" in (tmp_path / "both.svg").read_text()
    assert "target: 1 ms<" in both.read_text()
    assert "<svg" in (tmp_path / "own.html").read_text()
