"""The README has what convinces, in its order, and its figures are those of the run."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/internals/*.md", "deploy/**/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
)

ORDER = (
    *("# Shoal", "![Layouts, requests and throughput over time"),
    *("    make serve", "pip install '.[cuda]'", "    docker run --gpus all"),
    *("| download |", "![The live page", "## Beside stock vLLM"),
    *("## When not to use it", "## Others", "make chaos"),
)
"""What comes after what: the name, the picture, three commands, what they cost, the rest."""
COMPARED = ("vLLM", "ArcticInference", "Dynamo", "llm-d", "Flying Serving's code")
_RATIO = re.compile(r"\b\d+\.\d+ times as (?:long|late|slow|fast|much|many)\b")


def out_of_order(text: str) -> list[str]:
    """Return what the text lacks, or has before what it should come after."""
    wrong, place = [], 0
    for part in ORDER:
        found = text.find(part, place)
        if found < 0:
            wrong.append(part)
        place = max(place, found)
    return wrong


def table(text: str) -> list[list[str]]:
    """Return the rows of the table below "Beside stock vLLM" without its head."""
    section = text.partition("## Beside stock vLLM")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines[2:]]


def figures(results: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's figures: means of first token and request for each load, in ms."""
    systems = [results["systems"][name]["ways"] for name in ("stock-dp", "stock-tp", "shoal")]
    ways = [next(iter(way.values())) for way in systems]
    return [
        [f"{way[load][key]:,.0f} ms" for key in ("mean_ttft_ms", "mean_e2el_ms") for way in ways]
        for load in ways[0]
    ]


def test_it_has_all_parts_in_their_order() -> None:
    assert out_of_order(README) == []
    first = README.partition("\n\n")[2].partition("\n\n")[0]
    assert first.count(".") == 1, "it begins with one sentence"
    assert all(name in README.partition("## Others")[2] for name in COMPARED)


@pytest.mark.parametrize("part", ORDER)
def test_a_missing_part_is_seen(part: str) -> None:
    assert part in out_of_order(README.replace(part, ""))


def test_its_figures_are_those_of_the_run() -> None:
    section = README.partition("## Beside stock vLLM")[2]
    (page,) = re.findall(r"\[all figures\]\((docs/benchmarks/\S+)\.md\)", section)
    results = json.loads((ROOT / f"{page}.json").read_text("utf-8"))
    assert [row[1:] for row in table(README)] == figures(results)


def test_the_least_time_of_each_kind_is_bold() -> None:
    section = README.partition("## Beside stock vLLM")[2].partition("\n## ")[0]
    for line, row in zip(
        [line for line in section.splitlines() if line.startswith("|")][2:],
        table(README),
        strict=True,
    ):
        times = [float(cell.removesuffix(" ms").replace(",", "")) for cell in row[1:]]
        bold = [cell.strip().startswith("**") for cell in line.strip("|").split("|")[1:]]
        least = [t == min(part) for part in (times[:3], times[3:]) for t in part]
        assert bold == least


def test_pages_give_differences_and_no_ratios() -> None:
    found = [(page.name, hit) for page in PAGES for hit in _RATIO.findall(page.read_text("utf-8"))]
    assert found == []
    assert _RATIO.findall("It came 1.13 times as late.") == ["1.13 times as late"]
