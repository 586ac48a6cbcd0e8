"""The README has what convinces, in its order, and its figures are those of the run."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shoal.loadgen.curves import Timeline
from shoal.loadgen.plot import draw_overview
from shoal.loadgen.summary import Record
from shoal.loadgen.workload import Phase
from shoal.server.options.serve_options import DEFAULT_PORT

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


Results = Mapping[str, Any]


def read(name: str) -> Results:
    """Return the results of a run on Llama-3-8B's shape."""
    path = ROOT / "docs" / "benchmarks" / f"llama-3-8b-{name}.json"
    found: Results = json.loads(path.read_text("utf-8"))
    return found


def flat(text: str) -> str:
    """Return a text on one line, as the sentences of it go on over the ends of lines."""
    return " ".join(text.split())


def commands(text: str) -> list[str]:
    """Return the commands of the first screen, in their order."""
    return [line.strip() for line in text.partition("\n## ")[0].splitlines() if line[:4] == "    "]


def table(text: str) -> list[list[str]]:
    """Return the rows of the table below "Beside stock vLLM" without its head."""
    section = text.partition("## Beside stock vLLM")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines[2:]]


def figures(results: Results) -> list[list[str]]:
    """Return the table's figures: means of first token and request for each load, in ms."""
    ways = [loads_of(results, name) for name in ("stock-dp", "stock-tp", "shoal")]
    return [
        [
            f"{way[load][key]:,.0f} ms" if load in way else "-"
            for key in ("mean_ttft_ms", "mean_e2el_ms")
            for way in ways
        ]
        for load in ways[0]
    ]


def loads_of(results: Results, system: str) -> Results:
    """Return what was measured of a system, by load."""
    (way,) = results["systems"][system]["ways"].values()
    found: Results = way
    return found


def test_it_has_all_parts_in_their_order() -> None:
    assert out_of_order(README) == []
    first = README.partition("\n\n")[2].partition("\n\n")[0]
    assert first.count(".") == 1, "it begins with one sentence"
    assert all(name in README.partition("## Others")[2] for name in COMPARED)


def test_what_the_first_command_costs_stands_there_as_it_is_typed() -> None:
    first, *others = commands(README)
    assert len(others) == 2
    row = rf"^\| `{re.escape(first)}` \| [\d.]+ GB \| [\d.]+ GB \| \d+ s \|$"
    assert re.search(row, README, re.MULTILINE)
    assert f"http://127.0.0.1:{DEFAULT_PORT + 1}/" in README.partition("\n## ")[0]


def words_of(svg: str) -> set[str]:
    """Return what a picture says beside numbers."""
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return {text.text for text in texts if text.text and re.search("[a-z]", text.text)}


def test_its_first_picture_is_one_of_layouts_over_time_as_a_report_draws_them() -> None:
    name = README.partition("![Layouts")[2].partition("(")[2].partition(")")[0]
    record = Record(0.0, 0.1, 1.0, 2.0, 5, finished=True, phase=Phase.BURST)
    run = Timeline("one", [record], {1: 5.0}, [(0.0, [[0], [1]]), (1.0, [[0, 1]])])
    report = words_of(draw_overview("a run", [run])) - {"a run"}
    assert {"layout", "engine 0", "engine 1"} <= report
    assert report <= words_of((ROOT / name).read_text("utf-8"))


@pytest.mark.parametrize("part", ORDER)
def test_a_missing_part_is_seen(part: str) -> None:
    assert part in out_of_order(README.replace(part, ""))


def later(results: Results, system: str, *others: str, part: str = "") -> list[float]:
    """Return by how many per cent a system's mean request ends later than the best other's.

    Args:
        results: of a run.
        system: one of its systems.
        others: those to compare it with.
        part: of the names of the loads that count.
    """
    ways = [loads_of(results, other) for other in others]
    return [
        (mine["mean_e2el_ms"] / min(way[load]["mean_e2el_ms"] for way in ways if load in way) - 1)
        * 100
        for load, mine in loads_of(results, system).items()
        if part in load
    ]


def beyond(results: Results, key: str, part: str, seed: int) -> float:
    """Return by how many per cent a figure of Shoal's is more than stock DP's, under one load."""
    load = next(
        load for load in loads_of(results, "shoal") if part in load and f"seed {seed}" in load
    )
    dp, shoal = (loads_of(results, name)[load] for name in ("stock-dp", "shoal"))
    return float(shoal[key] / dp[key] * 100 - 100)


def said_of_six_loads(results: Results) -> list[str]:
    """Return what the README must say of the run whose table it shows."""
    least, *_, most = sorted(
        -percent for percent in later(results, "shoal", "stock-dp", "stock-tp")
    )
    assert least > 0, "the README says that Shoal is ahead under all loads"
    late = {f"{beyond(results, 'p99_ttft_ms', '--start 680', seed):.0f}" for seed in (4, 5)}
    assert len(late) == 1, "the README gives one figure for both seeds"
    return [
        f"of the stock servers under all six loads, by {least:.0f} to {most:.0f} %",
        f"the slowest hundredth of its first tokens came {late.pop()} % later than stock DP's",
    ]


def said_of_four_gpus(results: Results) -> list[str]:
    """Return the same of the loads of four GPUs."""
    loads = results["four_engines"]["loads"].values()
    ahead = sorted(
        100
        - 100
        * load["shoal"]["mean_e2el_ms"]
        / min(stock["mean_e2el_ms"] for name, stock in load.items() if name != "shoal")
        for load in loads
    )
    return ["Shoal was ahead by {:.0f}, {:.0f} and {:.0f} %".format(*ahead)]


def said_of_an_earlier_run(results: Results) -> list[str]:
    """Return the same of an earlier run on H200s."""
    (behind,) = (one for one in later(results, "shoal", "stock-dp", "stock-tp") if one > 0)
    return [f"was {behind:.0f} % behind under"]


def said_of_real_traces(results: Results) -> list[str]:
    """Return the same of the latest run on H200s."""
    ahead = sorted(-percent for percent in later(results, "shoal", "stock-dp"))
    ours, stock = (list(loads_of(results, system).values()) for system in ("shoal", "stock-dp"))
    latest = max(
        100 * (one["p99_ttft_ms"] / other["p99_ttft_ms"] - 1)
        for one, other in zip(ours, stock, strict=True)
    )
    return [
        "{:.0f}, {:.0f} and {:.0f} % ahead of stock DP".format(*ahead),
        f"slowest hundredth came at most {latest:.0f} % later",
    ]


def said_of_the_other_static_layout(results: Results) -> list[str]:
    """Return the same of those windows beside stock TP2."""
    beside = results["beside stock TP2"]
    ahead = sorted(-percent for percent in later(beside, "shoal", "stock-tp"))
    return ["{:.0f}, {:.0f} and {:.0f} % [ahead of stock TP2]".format(*ahead)]


def said_of_one_gpu(results: Results) -> list[str]:
    """Return what it must say of the run on one GPU."""
    traces = {load.split()[0] for load in loads_of(results, "shoal") if "--start" in load}
    assert len(traces) == 3
    percents = sorted(later(results, "shoal", "stock-dp", part="--start"))
    between = f"between {-percents[0]:.1f} % shorter and {percents[-1]:.1f} % longer"
    return [f"on three traces the mean request was {between} than with stock vLLM"]


def said_of_carries(results: Results) -> list[str]:
    """Return the same of switches that carried running requests, while caches went along."""
    measured = [
        step
        for server in results.values()
        if isinstance(server, dict)
        for step in server.get("steps", ())
        if step["step"].startswith("carry:")
    ]
    added = dict[str, str]()
    for case in ("8x4096", "64x1024"):
        some = [step["value"] for step in measured if case in step["step"]]
        more = [one[way]["beyond_step"]["p50"] * 1e3 for one in some for way in ("bind", "release")]
        added[case] = f"added {min(more):.0f} to {max(more):.0f} ms"
    of_64 = [step["value"] for step in measured if "64x" in step["step"]]
    binds = [one for value in of_64 for one in value["switches"] if one["to"] == "tp2"]
    slowest = max(one["beyond_step"] for one in binds)
    assert not any(value["prefilled_again"] for value in of_64)
    return [
        f"{added['8x4096']} in the median to the time between two tokens",
        f"With 64 requests of 1,024 tokens it {added['64x1024']} there",
        f"Of {len(binds)} binds of 64 requests the slowest added {slowest * 1e3:.0f} ms, and none",
    ]


def said_of_eight_clients(results: Results) -> list[str]:
    """Return the same of the carries that eight clients have seen."""
    found = results["systems"]["shoal"]["measures"]["carry 64x1024"]
    bind, release = (found[way]["beyond_step"]["p50"] * 1e3 for way in ("bind", "release"))
    assert found["prefilled_again"] == 0
    return [f"a bind of 64 requests added {bind:.1f} ms in the median, and a release {release:.1f}"]


def said_of_an_idle_switch(results: Results) -> list[str]:
    """Return the same of switches of an idle node."""
    (found,) = (
        step["value"]
        for server in results.values()
        if isinstance(server, dict)
        for step in server.get("steps", ())
        if step["step"].startswith("switch:")
    )
    return [f"**A switch** of an idle node takes {found['bind']['p50'] * 1e3:.1f} ms"]


DERIVED: tuple[tuple[str, Callable[[Results], list[str]]], ...] = (
    ("4xh100", said_of_six_loads),
    ("4xh100", said_of_four_gpus),
    ("2xh200-m", said_of_an_earlier_run),
    ("2xh200-o", said_of_real_traces),
    ("2xh200-o", said_of_the_other_static_layout),
    ("1xh200", said_of_one_gpu),
    ("2xh200-r", said_of_an_idle_switch),
    ("2xh200-r", said_of_carries),
    ("2xh200-s", said_of_eight_clients),
)
"""The page that the README names as the source of a sentence, and what the sentence must say."""
ONLY_ON_PAGES = {
    "2xh100-traffic": ("150 ms and carried 230", "26 requests"),
}
"""What the README says of runs whose raw results do not have it: the page has to say the same."""


def test_its_figures_are_those_of_the_run() -> None:
    section = README.partition("## Beside stock vLLM")[2]
    (page,) = re.findall(r"\[all figures\]\(docs/benchmarks/llama-3-8b-(\S+)\.md\)", section)
    assert [row[1:] for row in table(README)] == figures(read(page))
    assert page == DERIVED[0][0]


@pytest.mark.parametrize(("page", "said"), DERIVED)
def test_what_it_concludes_is_what_the_results_say(
    page: str, said: Callable[[Results], list[str]]
) -> None:
    assert f"docs/benchmarks/llama-3-8b-{page}.md" in README
    for sentence in said(read(page)):
        assert sentence in flat(README)


@pytest.mark.parametrize(("page", "figures"), ONLY_ON_PAGES.items())
def test_figures_without_raw_results_are_those_of_their_page(
    page: str, figures: Sequence[str]
) -> None:
    text = (ROOT / "docs" / "benchmarks" / f"llama-3-8b-{page}.md").read_text("utf-8")
    for figure in figures:
        assert figure in flat(text)
        assert figure.replace("26 requests", "26 running requests") in flat(README)


def test_another_result_is_seen() -> None:
    results = read("4xh100")
    for load in loads_of(results, "stock-dp").values():
        for key in ("mean_e2el_ms", "p90_e2el_ms", "p99_ttft_ms"):
            load[key] *= 0.97
    assert not [said for said in said_of_six_loads(results) if said in flat(README)]


def test_the_least_time_of_each_kind_is_bold() -> None:
    section = README.partition("## Beside stock vLLM")[2].partition("\n## ")[0]
    for line, row in zip(
        [line for line in section.splitlines() if line.startswith("|")][2:],
        table(README),
        strict=True,
    ):
        times = [
            float(cell.removesuffix(" ms").replace(",", "")) if cell != "-" else math.inf
            for cell in row[1:]
        ]
        bold = [cell.strip().startswith("**") for cell in line.strip("|").split("|")[1:]]
        least = [t == min(part) for part in (times[:3], times[3:]) for t in part]
        assert bold == least


def test_pages_give_differences_and_no_ratios() -> None:
    found = [(page.name, hit) for page in PAGES for hit in _RATIO.findall(page.read_text("utf-8"))]
    assert found == []
    assert _RATIO.findall("It came 1.13 times as late.") == ["1.13 times as late"]
