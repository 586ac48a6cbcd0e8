"""Reads from the dashboards' JSON what is asked of Prometheus, and where it is shown."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
"""The folder of the dashboards."""
RATE_SCRAPES = 4
"""The fewest scrapes in Grafana's ``$__rate_interval``."""
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Window:
    """The time shown, and the variables that Grafana puts into queries.

    Attributes:
        start: seconds since 1970.
        end: seconds since 1970.
        step: seconds between two points of a curve.
        scrape: seconds between two scrapes.
        instance: regular expression that selects the nodes.
    """

    start: float
    end: float
    step: float
    scrape: float
    instance: str = ".+"

    def fill(self, query: str) -> str:
        """Return a query with the values of Grafana's and the dashboards' variables."""
        rate = max(self.step + self.scrape, RATE_SCRAPES * self.scrape)
        values = {
            "$__rate_interval": f"{rate:.0f}s",
            "$__range": f"{self.end - self.start:.0f}s",
            "$instance": self.instance,
            "$model": ".+",
        }
        for name, value in values.items():
            query = query.replace(name, value)
        return query


@dataclass(frozen=True)
class Target:
    """One query of a panel; ``instant``: only the value at the end of the time is asked for."""

    expr: str
    legend: str
    instant: bool

    def name(self, labels: Mapping[str, str]) -> str:
        """Return the name of a series."""
        return _PLACEHOLDER.sub(lambda found: labels.get(found[1], ""), self.legend)


@dataclass(frozen=True)
class PanelSpec:
    """One panel: its place and size in cells of Grafana's grid, and what it shows.

    Attributes:
        stacked: whether curves add up.
        style: how curves are drawn, or whether a figure shows its value, its name or both.
        steps: colours, each with the value from which it holds (None: from the lowest).
        states: names and colours of values.
        names: names that replace those of series.
    """

    title: str
    kind: str
    x: int
    y: int
    width: int
    height: int
    unit: str
    stacked: bool
    style: str
    steps: Sequence[tuple[float | None, str]]
    states: Mapping[str, Mapping[str, Any]]
    names: Mapping[str, str]
    targets: Sequence[Target]


@dataclass(frozen=True)
class Choice:
    """A variable whose values are those of a label in a selector's series."""

    name: str
    selector: str
    label: str


@dataclass(frozen=True)
class Board:
    """One dashboard; ``marks`` are the queries of its annotations."""

    title: str
    panels: Sequence[PanelSpec]
    choices: Sequence[Choice]
    marks: Sequence[str]


def read_boards(folder: Path) -> list[Board]:
    """Return the dashboards of a folder."""
    return [_board(json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]


def _board(data: Mapping[str, Any]) -> Board:
    flat = [inner for panel in data["panels"] for inner in (panel, *panel.get("panels", []))]
    variables = [v for v in data["templating"]["list"] if v["type"] == "query"]
    return Board(
        data["title"],
        [_panel(panel) for panel in flat if panel["type"] != "row"],
        [_choice(variable) for variable in variables],
        [mark["expr"] for mark in data["annotations"]["list"]],
    )


def _choice(variable: Mapping[str, Any]) -> Choice:
    found = _LABEL_VALUES.fullmatch(variable["query"])
    if found is None:
        raise ValueError(f"variable {variable['name']}: no label_values: {variable['query']}")
    return Choice(variable["name"], found["selector"], found["label"])


def _panel(data: Mapping[str, Any]) -> PanelSpec:
    place = data["gridPos"]
    defaults = data["fieldConfig"]["defaults"]
    mappings = [mapping["options"] for mapping in defaults.get("mappings") or []]
    custom = defaults.get("custom", {})
    steps = defaults.get("thresholds", {}).get("steps") or []
    return PanelSpec(
        title=data["title"],
        kind=data["type"],
        x=place["x"],
        y=place["y"],
        width=place["w"],
        height=place["h"],
        unit=defaults.get("unit", ""),
        stacked=custom.get("stacking", {}).get("mode", "none") != "none",
        style=custom.get("drawStyle") or data.get("options", {}).get("textMode", ""),
        steps=[(step["value"], step["color"]) for step in steps],
        states={value: shown for options in mappings for value, shown in options.items()},
        names={
            override["matcher"]["options"]: override["properties"][0]["value"]
            for override in data["fieldConfig"]["overrides"]
        },
        targets=[
            Target(target["expr"], target["legendFormat"], target.get("instant", False))
            for target in data["targets"]
        ],
    )
