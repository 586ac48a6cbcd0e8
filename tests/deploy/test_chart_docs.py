"""What the documentation says of the chart's values is true."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm.generate import CHART, VALUES
from tests.deploy.chart import Helm
from tests.deploy.test_chart_served import ROUTERS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (CHART / "README.md", DOCS / "scale-out.md")
DEFAULTS: dict[str, Any] = yaml.safe_load(VALUES.read_text())
FOREIGN = {"router", "routerSpec", "servingEngineSpec", "rules"}
"""Values of other charts."""


def blocks(page: Path) -> Iterator[dict[str, Any]]:
    for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        yield yaml.safe_load(text)


def is_value(path: str) -> bool:
    at: Any = DEFAULTS
    for key in path.split("."):
        if not isinstance(at, dict) or key not in at:
            return False
        at = at[key]
    return True


def test_the_example_is_values_of_the_chart(helm: Helm) -> None:
    values = yaml.safe_load((DOCS.parent / "examples" / "kubernetes" / "values.yaml").read_text())
    made = helm.render(values, name="shoal")
    assert made.one("StatefulSet")["spec"]["replicas"] == 2
    assert {"--target=-10:300:20", "--target=0:2000:60"} <= set(made.args)
    assert "adaptive" in " ".join(made.args)
    assert list(helm.lint(values)) == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_examples_are_values_of_the_chart(helm: Helm, page: Path) -> None:
    ours = [block for block in blocks(page) if not set(block) & FOREIGN]
    for block in ours:
        helm.render(block, name="shoal")
    assert ours or page.name == "scale-out.md"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_values_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    tops = "|".join(key for key in DEFAULTS if isinstance(DEFAULTS[key], dict) and DEFAULTS[key])
    named = set(re.findall(rf"`((?:{tops})\.\w[\w.]*\w)`", text))
    named |= set(re.findall(r"--set ([\w.]+)=", text))
    assert named
    assert {path for path in named if not is_value(path)} == set()


def test_names_that_are_used_are_those_of_a_release_called_shoal(helm: Helm) -> None:
    objects = helm.render({"replicas": 2}, name="shoal")
    assert {s["metadata"]["name"] for s in objects.of("Service")} == {"shoal", "shoal-nodes"}
    assert objects.one("StatefulSet")["metadata"]["name"] == "shoal"


def test_routers_select_the_pods_of_the_chart(helm: Helm) -> None:
    labels = helm.render(name="shoal").pod["metadata"]["labels"]
    llm_d, stack = blocks(DOCS / "scale-out.md")
    assert llm_d["router"]["modelServers"]["matchLabels"].items() <= labels.items()
    (selector,) = [
        argument.removeprefix("--k8s-label-selector=")
        for argument in stack["routerSpec"]["extraArgs"]
        if "selector" in argument
    ]
    key, value = selector.split("=")
    assert labels[key] == value


def test_metrics_that_routers_read_are_named() -> None:
    text = (DOCS / "scale-out.md").read_text()
    assert set(re.findall(r"vllm:\w+", text)) <= set(ROUTERS)
