"""The chart against a running server: its options, its probes, and the metrics that it names."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.helm.generate import ORIGINALS
from tests.deploy.chart import Helm, Objects
from tests.deploy.matrix import KEY, MATRIX
from tests.server.node import ServedNode

KEYS = "/etc/shoal/keys"
AUTHORIZED = {"Authorization": f"Bearer {KEY['key']}"}
VALUES: dict[str, Any] = {
    "demo": True,
    "node": {"args": ["--max-model-len=512"]},
    "auth": {"apiKeys": [KEY], "adminKeys": [{"name": "operator", "key": "0ther"}]},
}
ROUTERS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)
"""What endpoint pickers read: docs/scale-out.md."""
_METRIC = re.compile(r"\b(?:shoal_|vllm:)\w+")


@pytest.fixture(scope="module")
def objects(helm: Helm) -> Objects:
    return helm.render(VALUES)


@pytest.fixture(scope="module")
def node(objects: Objects, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    """A server with the arguments of the chart's container, but for free ports, and its files."""
    keys = tmp_path_factory.mktemp("keys")
    for name, text in objects.one("Secret")["stringData"].items():
        (keys / name).write_text(text)
        (keys / name).chmod(0o440)
    fixed = ("serve", "--host=0.0.0.0", "--port=8000", "--admin-port=8001", "--metrics-port=9090")
    arguments = [arg.replace(KEYS, str(keys)) for arg in objects.args if arg not in fixed]
    assert len(arguments) == len(objects.args) - len(fixed)
    cache = tmp_path_factory.mktemp("cache")
    served = ServedNode(
        cache, *arguments, "--admin-port=0", "--metrics-port=0", last_line="try it:"
    )
    assert served.url, "\n".join(served.lines)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def samples(node: ServedNode) -> set[str]:
    """Names of the samples that Prometheus would see, before the first request."""
    (address,) = re.findall(r"metrics on ([^\s\"]+)", "\n".join(node.lines))
    page = httpx.get(address, timeout=60)
    assert page.status_code == 200, page.text
    lines = [line for line in page.text.splitlines() if not line.startswith("#")]
    return {re.split(r"[ {]", line)[0] for line in lines}


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_need_no_key(node: ServedNode, objects: Objects, probe: str) -> None:
    path = objects.container[probe]["httpGet"]["path"]
    assert httpx.get(node.url + path, timeout=60).status_code == 200


def test_keys_are_those_of_the_secret(node: ServedNode) -> None:
    models = f"{node.url}/v1/models"
    assert httpx.get(models, timeout=60).status_code == 401
    assert httpx.get(models, headers=AUTHORIZED, timeout=60).status_code == 200


def test_the_public_port_has_no_admin_api(node: ServedNode) -> None:
    layout = httpx.get(f"{node.url}/admin/layout", headers=AUTHORIZED, timeout=60)
    assert layout.status_code == 404


def test_autoscalers_go_by_metrics_that_are_there(helm: Helm, samples: set[str]) -> None:
    keda = helm.render(MATRIX["keda"]).one("ScaledObject")["spec"]["triggers"]
    hpa = helm.render(MATRIX["hpa"]).one("HorizontalPodAutoscaler")["spec"]["metrics"]
    queried = {name for t in keda for name in _METRIC.findall(t["metadata"]["query"])}
    named = {metric["pods"]["metric"]["name"] for metric in hpa}
    assert queried == named
    assert queried <= samples


def test_rules_are_about_metrics_that_are_there(samples: set[str]) -> None:
    text = "".join(path.read_text() for path in ORIGINALS["rules"].iterdir())
    used = {name for line in text.splitlines() for name in _METRIC.findall(line.split("#")[0])}
    # Steps are predicted by a cost model alone; what a rule makes is no metric of the server.
    assert used - samples == {"shoal_step_time_relative_error"}


def test_metrics_that_routers_read_are_there(samples: set[str]) -> None:
    assert set(ROUTERS) <= samples


def test_helms_test_asks_the_node(node: ServedNode, objects: Objects, tmp_path: Path) -> None:
    (container,) = objects.one("Pod")["spec"]["containers"]
    _, *command = container["command"]
    keys = tmp_path / "keys.json"

    def run(*entries: dict[str, str]) -> tuple[int, str]:
        keys.write_text(json.dumps(entries))
        asked = [sys.executable, *command, node.url, str(keys)]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stdout + done.stderr

    status, said = run(KEY)
    assert status == 0, said
    assert said.startswith("health: ok\ncompletion of shoal-demo: ")
    assert run({"name": "team", "sha256": "0" * 64})[0] == 0
    status, said = run({"name": "team", "key": "wrong"})
    assert status != 0
    assert "401" in said
