"""Tables of the open-loop workloads: by phase, and beside Flying Serving's Table 1."""

from collections.abc import Iterator
from typing import Any

from shoal.loadgen.bench.comparison_results import Results
from shoal.loadgen.bench.markdown import MISSING, more, ms, number, rows, slower
from shoal.loadgen.bench.open_loop_workloads import WORKLOADS
from shoal.loadgen.bench.systems import COMPARED, SHOAL, STOCK_DP, STOCK_TP
from shoal.loadgen.shapes import URGENT

URGENT_GROUP = f"priority {URGENT}"

PAPER_TABLE_1 = (
    ("TPOT, urgent, ms", URGENT_GROUP, "tpot", (22.0, 32.0, 24.0)),
    ("TPOT, all, ms", "all", "tpot", (22.0, 32.0, 28.0)),
    ("TTFT, urgent, ms", URGENT_GROUP, "ttft", (63.0, 166.0, 74.0)),
    ("TTFT, all, ms", "all", "ttft", (2130.0, 166.0, 142.0)),
)
"""Means in Flying Serving's Table 1 (Llama-3-70B on 8 H200s): static TP, static DP, its own."""
PAPER_PEAK = (2530.0, 3164.0, 3040.0)
"""Peak throughputs in that table, in tokens per second."""
_ORDER = (STOCK_TP, STOCK_DP, SHOAL)


def serving_sections(results: Results) -> Iterator[str]:
    """Yield a section for every workload that a system has served."""
    for name in WORKLOADS:
        served = {
            system: kept.measures[name]
            for system in COMPARED
            if (kept := results.systems.get(system)) is not None and name in kept.measures
        }
        if served:
            about = ", ".join(f"{k} {v}" for k, v in results.workloads.get(name, {}).items())
            lines = [f"## Workload: {name}", "", f"{about}.", "", *_groups(served)]
            if name == "priority":
                lines += ["", *_paper_table(served)]
            yield "\n".join(lines)


def _groups(served: dict[str, Any]) -> list[str]:
    names = dict.fromkeys(group for one in served.values() for group in one["groups"])
    head = ["requests", "system", "TTFT mean ms", "p50", "p90", "p99", "TPOT mean ms", "p50", "p90"]
    body = [
        [f"{group} ({one['groups'][group]['requests']})", system, *_cells(one["groups"][group])]
        for group in names
        for system, one in served.items()
        if group in one["groups"]
    ]
    return [*rows(head, body), "", *rows(_TOTALS_HEAD, [_totals(*item) for item in served.items()])]


def _cells(group: dict[str, Any]) -> list[str]:
    ttft, tpot = group["ttft"] or {}, group["tpot"] or {}
    return [
        *(ms(ttft.get(name)) for name in ("mean", "p50", "p90", "p99")),
        *(ms(tpot.get(name)) for name in ("mean", "p50", "p90")),
    ]


_TOTALS_HEAD = [
    "system",
    "peak output tokens/s",
    "seconds",
    "switches",
    "ms each",
    "paused",
    "moved",
    "latest request, ms",
    "client's lag p99, ms",
]


def _totals(system: str, one: dict[str, Any]) -> list[str]:
    switching = one["switching"]
    switches = switching["switches"] if switching else 0
    return [
        system,
        number(one["peak_throughput"]),
        number(one["seconds"]),
        number(switches) if switching else MISSING,
        ms(switching["seconds"] / switches) if switches else MISSING,
        number(switching["paused"]) if switching else MISSING,
        number(switching["moved"]) if switching else MISSING,
        ms(one["latest_request"]),
        ms((one["client_lag"] or {}).get("p99")),
    ]


def _paper_table(served: dict[str, Any]) -> list[str]:
    """Return our figures beside the paper's Table 1, each beside static TP."""
    head = ["means", *_ORDER, "beside TP", "paper: TP", "DP", "Flying Serving", "beside TP"]
    body = []
    for name, group, figure, paper in PAPER_TABLE_1:
        means = [_mean(served, system, group, figure) for system in _ORDER]
        theirs = [*(number(value) for value in paper), slower(paper[2], paper[0])]
        body.append([name, *(ms(value) for value in means), slower(means[2], means[0]), *theirs])
    peaks = [served[s]["peak_throughput"] if s in served else None for s in _ORDER]
    theirs = [*(number(value) for value in PAPER_PEAK), more(PAPER_PEAK[2], PAPER_PEAK[0])]
    ours = [*(number(value) for value in peaks), more(peaks[2], peaks[0])]
    return rows(head, [*body, ["peak tokens/s", *ours, *theirs]])


def _mean(served: dict[str, Any], system: str, group: str, figure: str) -> float | None:
    found = served.get(system, {"groups": {}})["groups"].get(group)
    return None if found is None or found[figure] is None else float(found[figure]["mean"])
