"""A real Prometheus with the repository's rules, which scrapes a server every second."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "grafana" / "prometheus" / "rules"
SCRAPE_SECONDS = 1.0
_STARTED = "ready to receive web requests"


def need(program: str) -> str:
    """Return the path of a program of Prometheus'; skip the test if it is not installed."""
    path = shutil.which(program)
    if path is None:
        assert "CI" not in os.environ, f"CI has to install {program}"
        pytest.skip(f"{program} is not on PATH (Debian and Ubuntu: apt-get install prometheus)")
    return path


@contextmanager
def scraper(folder: Path, address: str, **others: str) -> Iterator[str]:
    """Run Prometheus over the server at ``address`` (``host:port``), and give its own URL.

    Args:
        folder: where it keeps what it has.
        address: of the server, which is the job ``shoal``.
        others: addresses of more jobs by their names.
    """
    interval = f"{SCRAPE_SECONDS:g}s"
    settings = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(RULES / "*.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in {"shoal": address, **others}.items()
        ],
    }
    config = folder / "prometheus.yml"
    config.write_text(json.dumps(settings))  # which is YAML, too
    own = f"127.0.0.1:{free_port()}"
    command = [
        *(need("prometheus"), "--config.file", str(config), "--web.listen-address", own),
        *("--storage.tsdb.path", str(folder / "data")),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            log: list[str] = []
            while not log or _STARTED not in log[-1]:
                log.append(process.stderr.readline())
                assert log[-1], "Prometheus did not start:\n" + "".join(log)
            yield f"http://{own}"
        finally:
            process.terminate()


def free_port() -> int:
    """Return a port that nobody has, nor is given who asks for any: those are higher."""
    for number in range(10_000):
        port = 20_000 + (os.getpid() + number) % 10_000
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
