"""The kinds of panels in the dashboards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BarGaugeNamePlacement,
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphDrawStyle,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    Panel,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PanelBuilder: TypeAlias = Builder[Panel]
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

GOOD, WARN, BAD = "green", "orange", "red"
NEUTRAL = "blue"
"""The colour of a figure that is neither good nor bad."""
MISSING = "#808080"
"""The colour of a figure without a value, which Grafana takes from the lowest threshold."""
NO_DATA = "no data"
COUNT = "none"
"""The unit of what is counted one by one: whole numbers."""
EMPTY_BUCKET = 1e-9
"""Buckets of a heat map with no more than this are not drawn."""


@dataclass(frozen=True)
class Query:
    """A query in PromQL, and the names of its series: ``{{label}}`` stands for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Limits:
    """The values from which a panel shows a warning or an alarm; from 0 to them it is green."""

    warn: float | None = None
    bad: float | None = None


@dataclass(frozen=True)
class State:
    """A value that has a name and a colour."""

    value: int
    name: str
    colour: str


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    span: int = 8,
    stack: bool = False,
    style: GraphDrawStyle = GraphDrawStyle.LINE,
    limits: Limits | None = None,
    names: Mapping[str, str] | None = None,
) -> PanelBuilder:
    """Return curves over time.

    Args:
        title: of the panel.
        description: what it means, and what to do.
        queries: each gives one curve or several.
        unit: a unit of Grafana's, such as ``s``.
        span: width in 24ths of the screen.
        stack: whether the curves add up.
        style: how curves are drawn; points are for values that exist only now and then.
        limits: drawn as lines.
        names: what curves are called instead.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .min(0)
        .draw_style(style)
        .line_width(1)
        .fill_opacity(40 if stack else 8)
        .show_points(VisibilityMode.AUTO)
        .legend(_legend())
        .tooltip(_tooltip())
    )
    if stack:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if limits is not None:
        panel.thresholds(_thresholds(Threshold(None, GOOD), limits=limits)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        )
    if unit == COUNT:
        panel.decimals(0)
    for name, shown in (names or {}).items():
        panel.override_by_name(name, [DynamicConfigValue("displayName", shown)])
    for number, query in enumerate(queries):
        panel.with_target(_target(query, number).range())
    return panel


def spread(title: str, description: str, query: Query, *, unit: str) -> PanelBuilder:
    """Return a heat map of a histogram over time: the events in each bucket.

    Args:
        title: of the panel.
        description: what it means, and what to do.
        query: the events up to each bound, by the label ``le``.
        unit: of the bounds.
    """
    colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
    colours.exponent(0.5).steps(64)
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(8)
        .height(8)
        .calculate(False)
        .unit(COUNT)
        .decimals(0)
        .no_value(NO_DATA)
        .color(colours)
        .filter_values(heatmap.FilterValueRange().le(EMPTY_BUCKET))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_values(heatmap.CellValues().unit(COUNT).decimals(0))
        .with_target(_target(query).range().format(PromQueryFormat.HEATMAP))
    )


def figure(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    span: int = 3,
    height: int = 4,
    limits: Limits | None = None,
    states: Sequence[State] = (),
    text: BigValueTextMode = BigValueTextMode.AUTO,
) -> PanelBuilder:
    """Return figures in large letters: the values at the end of the time shown.

    Without a value a figure is grey. It is never green without one.

    Args:
        title: of the panel.
        description: what it means, and what to do.
        queries: each gives one figure or several.
        unit: a unit of Grafana's, such as ``s``.
        span: width in 24ths of the screen.
        height: in rows of Grafana's grid.
        limits: the limits that decide the colour; without them it is blue.
        states: values that are shown by name.
        text: whether to write the value, the name or both.
    """
    judged = Threshold(0, NEUTRAL if limits is None else GOOD)
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(height)
        .no_value(NO_DATA)
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.BACKGROUND)
        .text_mode(text)
        .thresholds(_thresholds(Threshold(None, MISSING), judged, limits=limits or Limits()))
    )
    if unit == COUNT:
        panel.decimals(0)
    if states:
        panel.mappings([_mapping(states)])
    for number, query in enumerate(queries):
        panel.with_target(_target(query, number).instant())
    return panel


def timeline(
    title: str,
    description: str,
    query: Query,
    states: Sequence[State],
    *,
    span: int = 16,
) -> PanelBuilder:
    """Return a bar over time per series, coloured by its state; ``graph`` has the arguments."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(7)
        .show_value(VisibilityMode.AUTO)
        .merge_values(True)
        .row_height(0.8)
        .fill_opacity(80)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .mappings([_mapping(states)])
        .legend(_legend())
        .tooltip(_tooltip())
        .with_target(_target(query).range())
    )


def bars(
    title: str,
    description: str,
    query: Query,
    *,
    names: Mapping[str, str] | None = None,
) -> PanelBuilder:
    """Return one bar per series, as long as its total; ``graph`` describes the arguments."""
    panel = (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(COUNT)
        .decimals(0)
        .no_value(NO_DATA)
        .min(0)
        .span(8)
        .height(7)
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .name_placement(BarGaugeNamePlacement.LEFT)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color("blue"))
        .with_target(_target(query).instant())
    )
    for name, shown in (names or {}).items():
        panel.override_by_name(name, [DynamicConfigValue("displayName", shown)])
    return panel


def _target(query: Query, number: int = 0) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(DATASOURCE).ref_id(chr(ord("A") + number))
    return target.expr(query.expr).legend_format(query.legend or "__auto")


def _thresholds(*lowest: Threshold, limits: Limits) -> dashboard.ThresholdsConfig:
    steps = [*lowest]
    if limits.warn is not None:
        steps.append(Threshold(limits.warn, WARN))
    if limits.bad is not None:
        steps.append(Threshold(limits.bad, BAD))
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _mapping(states: Sequence[State]) -> ValueMap:
    return ValueMap(
        {
            str(state.value): ValueMappingResult(text=state.name, color=state.colour, index=index)
            for index, state in enumerate(states)
        }
    )


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
