"""Every panel and every rule has data in a real Prometheus that scrapes a server under load."""

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle

import httpx
import pytest

from shoal.grafana.api import Prometheus, PrometheusError
from shoal.grafana.boards import FOLDER, Board, Choice, Target, Window, read_boards
from shoal.grafana.verify import ask, problems
from tests.grafana.scraper import SCRAPE_SECONDS, need, scraper
from tests.server.node import ServedNode

WITHOUT = ("model",)
"""What fake engines have not got."""
GPUS = 2
DCGM = {
    "DCGM_FI_DEV_GPU_UTIL": 63,
    "DCGM_FI_DEV_POWER_USAGE": 412.5,
    "DCGM_FI_DEV_XID_ERRORS": 0,
    "DCGM_FI_DEV_FB_USED": 70_000,
    "DCGM_FI_DEV_SM_CLOCK": 1980,
}
"""What NVIDIA's dcgm-exporter says of each GPU, by its metrics' names."""
LOAD = (
    *("--trace", "poisson", "--rate", "10", "--duration", "15", "--priorities=-10:1,0:3,10:1"),
    *("--prompt-tokens", "8:60", "--output-tokens", "10:60", "--max-lag-ms", "60000"),
)
ALONE, PAIR = [[0], [1]], [[0, 1]]
SWITCHES = (
    *((PAIR, "soft"), (ALONE, "soft"), (PAIR, "hard"), (ALONE, "hard")),
    *((PAIR, "carry"), (ALONE, "carry"), (PAIR, "sequential"), (ALONE, "sequential")),
)


@contextmanager
def dcgm_exporter() -> Iterator[str]:
    """Answer as dcgm-exporter does beside a node of two GPUs; give the address."""
    lines = [
        f'{name}{{gpu="{gpu}",UUID="GPU-{gpu}",device="nvidia{gpu}",Hostname="node"}} {value}\n'
        for name, value in DCGM.items()
        for gpu in range(GPUS)
    ]

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write("".join(lines).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has watched some seconds of requests of all classes, and switches."""
    need("prometheus")
    node = ServedNode(
        tmp_path_factory.mktemp("cache"),
        *("--fake-step-ms", "10", "--max-model-len", "512"),
        *("--cost-model-shape", "llama-3-8b-bf16", "--cost-model-hardware", "h200"),
    )
    try:
        assert node.url, "\n".join(node.lines)
        folder = tmp_path_factory.mktemp("prometheus")
        address = node.url.removeprefix("http://")
        with dcgm_exporter() as dcgm, scraper(folder, address, dcgm=dcgm) as url:
            load(node)
            with httpx.Client(base_url=url, timeout=120) as http:
                yield Prometheus(http)
    finally:
        node.stop()


def load(node: ServedNode) -> None:
    """Replay load and switch meanwhile, with a request between two switches."""
    command = [
        sys.executable,
        "-m",
        "shoal.server.commands.cli",
        "replay",
        "--base-url",
        node.url,
        *LOAD,
    ]
    short = {"model": "shoal-demo", "prompt": "x", "max_tokens": 20, "ignore_eos": True}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as replay,
        node.client() as http,
    ):
        for units, preempt in cycle(SWITCHES):
            switch = http.post("/admin/layout", json={"units": units, "preempt": preempt})
            assert switch.status_code == 200, switch.text
            assert http.post("/v1/completions", json=short).status_code == 200
            if units == ALONE and replay.poll() is not None:
                break
        assert replay.stdout is not None
        assert replay.returncode == 0, replay.stdout.read()


def last_seconds(seconds: float) -> Window:
    now = time.time()
    return Window(now - seconds, now, SCRAPE_SECONDS, SCRAPE_SECONDS)


def test_every_panel_and_rule_has_data(prometheus: Prometheus) -> None:
    boards = read_boards(FOLDER)
    assert [board.title for board in boards] == [
        "Shoal: Engines",
        "Shoal: Serving",
        "Shoal: Switching",
    ]
    assert problems(prometheus, boards, last_seconds(120), WITHOUT) == []


def test_panels_of_gpus_show_what_dcgm_exporter_says_in_base_units(prometheus: Prometheus) -> None:
    (board,) = (board for board in read_boards(FOLDER) if board.title == "Shoal: Engines")
    window = last_seconds(5)
    panels = [panel for panel in board.panels if "DCGM_" in panel.targets[0].expr]
    shown = {
        panel.title: {
            (series.labels["Hostname"], series.labels["gpu"]): series.points[-1][1]
            for series in ask(prometheus, panel.targets[0], window)
        }
        for panel in panels
    }
    expected = {
        "GPU utilisation": 0.63,
        "GPU power": 412.5,
        "Last Xid error": 0.0,
        "GPU memory in use": 70_000 * 2.0**20,
        "GPU clock": 1.98e9,
    }
    names = [("node", str(gpu)) for gpu in range(GPUS)]
    assert shown == {title: dict.fromkeys(names, value) for title, value in expected.items()}


def test_what_has_no_data_is_reported(prometheus: Prometheus) -> None:
    board = next(board for board in read_boards(FOLDER) if board.title == "Shoal: Serving")
    panel = board.panels[0]
    misspelt = [Target("sum(shoal_redy)", "", instant=True), Target("0 / 0", "", instant=True)]
    broken = Board(
        "Broken",
        [dataclasses.replace(panel, title="Node", targets=misspelt)],
        [Choice("model", "shoal_redy", "instance")],
        ["shoal_ready == 7"],
    )
    assert problems(prometheus, [broken], last_seconds(60)) == [
        "Broken: variable model has no values",
        "Broken: no annotations: shoal_ready == 7",
        "Broken: Node: no data: sum(shoal_redy)",
        "Broken: Node: no data: 0 / 0",
    ]


def test_a_time_without_load_is_reported(prometheus: Prometheus) -> None:
    long_ago = dataclasses.replace(last_seconds(60), start=0.0, end=60.0)
    found = problems(prometheus, read_boards(FOLDER), long_ago, WITHOUT)
    assert 'rule ShoalDown: no data: up{job="shoal"}' in found


def test_a_wrong_query_says_what_is_wrong(prometheus: Prometheus) -> None:
    with pytest.raises(PrometheusError, match="parse error"):
        prometheus.at("sum(", time.time())
