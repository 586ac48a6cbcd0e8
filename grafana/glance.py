"""The first screen of every dashboard: a node's health, its layout, and why it switched."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.models.common import BigValueTextMode

from shoal.grafana.panels import (
    BAD,
    GOOD,
    WARN,
    Limits,
    PanelBuilder,
    Query,
    State,
    bars,
    figure,
    timeline,
)
from shoal.grafana.promql import NODES, increase, series, total

LAYOUTS = (
    State(0, "does not serve", BAD),
    State(1, "DP", "blue"),
    State(2, "TP2", "orange"),
    State(4, "TP4", "purple"),
    State(8, "TP8", "yellow"),
)
"""Values of ``shoal_engine_layout``."""

REASONS: Mapping[str, str] = {
    "load": "load: much to do",
    "quiet": "quiet: little to do",
    "urgent": "urgent: an urgent request came",
    "long": "long: a request needs several engines",
    "slo": "slo: a target was at risk",
    "start": "start: how the policy begins",
    "manual": "manual: the admin API asked",
    "drain": "drain: an engine was taken out",
    "other": "other: the policy gave no reason",
}
"""Explanations for the values of the label ``reason`` of switches."""

BURN_LIMITS = Limits(warn=1, bad=6)
"""Burn rates: at 1 the budget lasts exactly long enough; above 6 ``ShoalBudgetBurnSlow`` fires."""


def glance() -> Sequence[PanelBuilder]:
    """Return the panels of the first row."""
    return [*_health(), _layout_timeline(), _why()]


def _health() -> list[PanelBuilder]:
    return [
        figure(
            "Node",
            "Whether the node takes requests; with several nodes, whether all of them do. "
            "DOWN: Prometheus cannot scrape it. If it is not READY for long, see "
            "docs/alerts.md, ShoalNotReady.",
            Query(f"min({series('shoal_ready')} or {series('up', IS_SHOAL)} - 1)"),
            states=(
                State(-1, "DOWN", BAD),
                State(0, "NOT READY", WARN),
                State(1, "READY", GOOD),
            ),
        ),
        figure(
            "Alerts",
            "Alerts of Shoal's rules that fire now. docs/alerts.md says for each what it means "
            "and what to do.",
            Query(
                f'sum by (alertname) (ALERTS{{{NODES}, alertname=~"Shoal.+", alertstate="firing"}})'
                ' or on () label_replace(vector(0), "alertname", "none", "", "")',
                "{{alertname}}",
            ),
            limits=Limits(bad=1),
            text=BigValueTextMode.NAME,
        ),
        figure(
            "Engines that do not serve",
            "Engines that are starting, silent or dead. The others go on serving; a dead engine "
            "is started again a few times. The dashboard Engines shows which one it is.",
            Query(total("shoal_engines", 'state!="serving"')),
            limits=Limits(bad=1),
        ),
        figure(
            "Units now",
            "How many units there are of each layout: engines alone (dp), or groups of 2, 4 or 8 "
            "that work as one (tp2, tp4, tp8).",
            Query(f"{total('shoal_units', by='layout')} > 0", "{{layout}}"),
            text=BigValueTextMode.VALUE_AND_NAME,
        ),
        figure(
            "Failed in the last 5 minutes",
            "Share of the requests that ended because the task pool was full, their deadline "
            "passed or their engine died. The row on errors of the dashboard Serving shows which.",
            Query(
                f"{increase('shoal_requests_total', FAILED, window='5m')} / "
                f"({increase('shoal_requests_total', COUNTED, window='5m')} > 0) or vector(0)"
            ),
            unit="percentunit",
            limits=Limits(warn=0.001, bad=0.01),
        ),
        figure(
            "SLO burn, last hour",
            "How many times faster than allowed the error budget is spent, of the objective that "
            "fares worst: 1 spends it exactly, 14.4 spends a thirtieth of a month's in an hour. "
            "The objectives are in prometheus/rules/recording.yml, which must be loaded.",
            Query(f"max({series('shoal:slo_burn:rate1h')} >= 0) or vector(0)"),
            limits=BURN_LIMITS,
        ),
    ]


IS_SHOAL = 'job="shoal"'
"""Label that prometheus.yml gives the nodes."""
FAILED = 'outcome=~"lost|expired|pool_full|unavailable"'
"""Outcomes that count against the node."""
COUNTED = 'outcome=~"finished|lost|expired|pool_full|unavailable"'
"""Outcomes that count at all: requests whose clients left or asked too much do not."""


def _layout_timeline() -> PanelBuilder:
    return timeline(
        "Layout of each engine",
        "Engines of one colour other than DP work in groups of that size, on the same requests; "
        "DP engines work alone. Many changes in a row, with no change of load, mean that the "
        "policy flaps: see docs/alerts.md, ShoalSwitchesTooOften.",
        Query(series("shoal_engine_layout"), "{{instance}} engine {{engine}}"),
        LAYOUTS,
    )


def _why() -> PanelBuilder:
    return bars(
        "Why it switched (number of switches in the time shown)",
        "Switches by the reason that the policy or the admin API gave. The dashboard Switching "
        "shows what switches cost; the log has one line for each of them.",
        Query(increase("shoal_switches_total", by="reason"), "{{reason}}"),
        names=REASONS,
    )
