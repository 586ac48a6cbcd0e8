"""The policy of the examples, installed as its users install it, decides in simulator and node."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.node import served_node, shoal

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pairs-policy"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "package")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    options = ["--no-build-isolation", "--target", str(folder), str(source)]
    subprocess.run([*pip, *options], check=True)
    return folder


def simulate(policies: str, path: Path) -> str:
    workload = ("--trace", "poisson", "--rate", "4", "--requests", "40", "--engines", "4")
    command = ["-m", "shoal.server.commands.cli", "simulate", "--policy", policies, *workload]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(path), str(ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "could not be done" not in done.stderr
    return done.stdout


def test_the_simulator_takes_it_by_name_and_by_reference(site: Path) -> None:
    by_name = simulate("pairs,static-dp", site)
    assert {line.split()[0] for line in by_name.splitlines() if line} >= {"pairs", "static-dp"}
    assert "tp2" in by_name, "it formed pairs"
    assert simulate("pairs_policy:PAIRS,static-dp", EXAMPLE) == by_name


def shoal_beside(arguments: list[str]) -> int:
    """Be the ``shoal`` command where the package is installed."""
    sys.path.insert(0, os.environ["EXAMPLE_SITE"])
    return shoal(arguments)


def test_a_node_serves_under_it(site: Path, tmp_path: Path) -> None:
    with (
        served_node(
            *(tmp_path, "--policy", "pairs", "--engines", "2"),
            main=shoal_beside,
            EXAMPLE_SITE=str(site),
        ) as node,
        node.client() as http,
    ):
        shown = http.get("/admin/policy").json()
        assert shown["policy"] == "pairs"
        assert "pairs" in shown["policies"]
        body = {"model": "shoal-demo", "prompt": "Leaves", "max_tokens": 4}
        http.post("/v1/completions", json=body).raise_for_status()
        for name in ("flying", "pairs"):
            http.post("/admin/policy", json={"policy": name}).raise_for_status()
        assert http.get("/admin/policy").json()["errors"] == 0
