"""Writes the dashboards for Grafana: ``python -m shoal.grafana.generate_dashboards``."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    Panel,
    RowPanel,
    VariableModel,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from shoal.grafana import engines, serving, switching
from shoal.grafana.boards import FOLDER
from shoal.grafana.glance import glance
from shoal.grafana.panels import DATASOURCE, PanelBuilder
from shoal.grafana.promql import WINDOW, events

TAG = "shoal"
ALL = VariableOption(text="All", value="$__all")

Rows = Mapping[str, Sequence[PanelBuilder]]


@dataclass(frozen=True)
class Page:
    """The parts of one dashboard below its first row."""

    title: str
    description: str
    rows: Rows
    folded: Rows = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its file, and its identifier for Grafana."""
        return f"shoal-{self.title.lower()}"


def pages() -> list[Page]:
    """Return all dashboards."""
    return [
        Page("Serving", "What clients see: traffic, latencies, errors.", serving.rows()),
        Page(
            "Switching",
            "How often and why the layout changes, what it costs, what it gives.",
            switching.rows(),
        ),
        Page(
            "Engines",
            "What each engine holds and does, and whether it is well.",
            engines.rows(),
            engines.folded_rows(),
        ),
    ]


def build(page: Page) -> Dashboard:
    """Return a dashboard: the variables, the first row of all dashboards, and its own rows."""
    board = (
        dashboard.Dashboard(f"Shoal: {page.title}")
        .uid(page.name)
        .description(page.description)
        .tags([TAG])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(_others())
        .variables(_variables())
        .annotation(_SwitchMarks())
    )
    first = {"Are users suffering, which layout is it in, why did it switch?": glance()}
    for title, panels in {**first, **page.rows}.items():
        board.with_row(dashboard.Row(title))
        for panel in panels:
            board.with_panel(panel)
    for title, panels in page.folded.items():
        row = dashboard.Row(title)
        for panel in panels:
            row.with_panel(panel)
        board.with_row(row)
    built = board.build()
    _number(built)
    return built


def render(page: Page) -> str:
    """Return the JSON of a dashboard."""
    return json.dumps(build(page), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> int:
    """Write all dashboards into their folder."""
    for page in pages():
        path = FOLDER / f"{page.name}.json"
        path.write_text(render(page), encoding="utf-8")
        print(path)
    return 0


class _SwitchMarks(Builder[AnnotationQuery]):
    """Marks every switch in all curves, and says why it was made."""

    def build(self) -> AnnotationQuery:
        """Return the query, whose series' labels fill in the title."""
        switches = events("shoal_switches_total", by="instance, reason", window=WINDOW)
        return _TitledAnnotations(
            name="Switches",
            datasource=DATASOURCE,
            icon_color="purple",
            expr=f"{switches} > 0",
        )


class _TitledAnnotations(AnnotationQuery):
    """Annotations with the fields of Prometheus' data source, which the SDK does not know."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON's content."""
        titles = {"titleFormat": "Switch: {{reason}}", "textFormat": "{{instance}}"}
        return {**super().to_json(), **titles, "step": "15s"}


def _others() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("Shoal")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
    )


def _variables() -> list[Builder[VariableModel]]:
    """Return the variables at the top of the page: the data source, the model, and its nodes."""
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    model = _query_variable("model", "Model", "label_values(vllm:num_requests_running, model_name)")
    nodes = 'label_values(vllm:num_requests_running{model_name=~"$model"}, instance)'
    return [source, model, _query_variable("instance", "Node", nodes)]


def _query_variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(ALL)
    )


def _number(board: Dashboard) -> None:
    """Number every panel, for links to it."""
    number = 0
    for panel in board.panels or []:
        inner: Sequence[Panel] = panel.panels if isinstance(panel, RowPanel) else ()
        for one in (panel, *inner):
            number += 1
            one.id_val = number


if __name__ == "__main__":
    sys.exit(main())
