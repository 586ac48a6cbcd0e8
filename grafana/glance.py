"""The first screen of every dashboard: do users suffer, which layout is it in, why a switch?"""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.models.common import BigValueTextMode

from shoal.grafana.panels import (
    BAD,
    COUNT,
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
from shoal.grafana.promql import NODES, events, quantile, rate, series, share, total

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
KV_LIMITS = Limits(warn=0.8, bad=0.95)
"""Share of the KV blocks in use; above 0.95 ``ShoalKVCacheFull`` may fire."""

TTFT = "shoal_time_to_first_token_seconds"
TPOT = "shoal_time_per_output_token_seconds"
TTFT_TARGET, TPOT_TARGET = 2.5, 0.1
"""Seconds that the objectives in ``recording.yml`` allow to the first token, and to each other."""
FOREGROUND = 'priority!="background"'
"""The requests that the objectives count."""


def glance() -> Sequence[PanelBuilder]:
    """Return the panels of the first row."""
    return [*_users(), *_health(), _layout_timeline(), _why()]


def _users() -> list[PanelBuilder]:
    """Return what tells whether users suffer."""
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
        _promised("TTFT", TTFT, TTFT_TARGET, "the first token of a request"),
        _promised("TPOT", TPOT, TPOT_TARGET, "a token after the first, in the mean of a request"),
        figure(
            "Requests waiting",
            "Requests that are in no batch: in the task pool, behind a batch, or paused by a "
            "switch. The row on the task pool of the dashboard Switching shows whose they are.",
            Query(total("vllm:num_requests_waiting")),
            unit=COUNT,
        ),
        figure(
            "Oldest wait",
            "How long the request that came first has waited in the task pool; requests in the "
            "background do not count. Above a minute see docs/alerts.md, ShoalRequestsWaitLong.",
            Query(f"max({series('shoal_pool_oldest_seconds', FOREGROUND)})"),
            unit="s",
            limits=Limits(warn=10, bad=60),
        ),
        figure(
            "KV cache in use",
            "Of the engine whose KV cache is fullest. Near 100 % requests wait for blocks or are "
            "preempted: see docs/alerts.md, ShoalKVCacheFull.",
            Query(f"max({series('vllm:kv_cache_usage_perc')})"),
            unit="percentunit",
            limits=KV_LIMITS,
        ),
        figure(
            "Output tokens per second",
            "Tokens that clients got. The dashboard Serving shows the curve, and the prompts'.",
            Query(rate("vllm:generation_tokens_total")),
        ),
        figure(
            "Failed, last 5 minutes",
            "Share of the requests that ended because the task pool was full, their deadline "
            "passed, their engine died, they killed several engines (`poisoned`), or no engine "
            "served. The row on errors of the dashboard Serving shows which.",
            Query(
                share(
                    events("shoal_requests_total", FAILED, window=RECENT),
                    events("shoal_requests_total", COUNTED, window=RECENT),
                )
            ),
            unit="percentunit",
            limits=Limits(warn=0.001, bad=0.01),
        ),
    ]


def _promised(name: str, histogram: str, target: float, what: str) -> PanelBuilder:
    value = quantile(0.99, histogram, FOREGROUND, window=RECENT)
    return figure(
        f"p99 {name} (target {target:g} s)",
        f"The 99th percentile of the time for {what}, in the last 5 minutes, without requests in "
        "the background. Above the target it is red. The target is that of the objective in "
        "prometheus/rules/recording.yml.",
        Query(f"{value} >= 0"),
        unit="s",
        limits=Limits(bad=target),
    )


def _health() -> list[PanelBuilder]:
    return [
        figure(
            "Alerts",
            "Alerts of Shoal's rules that fire now. docs/alerts.md says for each what it means "
            "and what to do. There is no data if Prometheus has not loaded "
            "prometheus/rules/alerts.yml.",
            Query(
                f'sum by (alertname) (ALERTS{{{NODES}, alertname=~"Shoal.+", alertstate="firing"}})'
                f" or on () label_replace(0 * max({series('shoal:alerts_evaluated')}), "
                '"alertname", "none", "", "")',
                "{{alertname}}",
            ),
            span=6,
            height=3,
            limits=Limits(bad=1),
            text=BigValueTextMode.NAME,
        ),
        figure(
            "SLO burn, last hour",
            "How many times faster than allowed the error budget is spent, of the objective that "
            "fares worst: 1 spends it exactly, 14.4 spends a thirtieth of a month's in an hour. "
            "The objectives are in prometheus/rules/recording.yml. There is no data if "
            "Prometheus has not loaded that file, or if no request came.",
            Query(f"max({series('shoal:slo_burn:rate1h')} >= 0)"),
            span=6,
            height=3,
            limits=BURN_LIMITS,
        ),
        figure(
            "Engines that do not serve",
            "Engines that are starting, silent or dead. The others go on serving; a dead engine "
            "is started again a few times. The dashboard Engines shows which one it is.",
            Query(total("shoal_engines", 'state!="serving"')),
            unit=COUNT,
            span=6,
            height=3,
            limits=Limits(bad=1),
        ),
        figure(
            "Units now",
            "How many units there are of each layout: engines alone (dp), or groups of 2, 4 or 8 "
            "that work as one (tp2, tp4, tp8).",
            Query(f"{total('shoal_units', by='layout')} > 0", "{{layout}}"),
            unit=COUNT,
            span=6,
            height=3,
            text=BigValueTextMode.VALUE_AND_NAME,
        ),
    ]


IS_SHOAL = 'job="shoal"'
"""Label that prometheus.yml gives the nodes."""
RECENT = "5m"
"""The window of figures that have to be steady."""
FAILED = 'outcome=~"lost|poisoned|expired|pool_full|unavailable|garbled"'
"""Outcomes that count against the node."""
COUNTED = 'outcome=~"finished|lost|poisoned|expired|pool_full|unavailable|garbled"'
"""Outcomes that count at all: requests whose clients left or asked too much do not."""


def _layout_timeline() -> PanelBuilder:
    return timeline(
        "Layout of each engine",
        "Engines of one colour other than DP work in groups of that size, on the same requests; "
        "DP engines work alone. A pipeline has the colour of the TP group of its size; the figure "
        "Units now tells them apart. Many changes in a row, with no change of load, mean that the "
        "policy flaps: see docs/alerts.md, ShoalSwitchesTooOften.",
        Query(series("shoal_engine_layout"), "{{instance}} engine {{engine}}"),
        LAYOUTS,
    )


def _why() -> PanelBuilder:
    return bars(
        "Why it switched (number of switches in the time shown)",
        "Switches by the reason that the policy or the admin API gave. The dashboard Switching "
        "shows what switches cost; the log has one line for each of them.",
        Query(events("shoal_switches_total", by="reason"), "{{reason}}"),
        names=REASONS,
    )
