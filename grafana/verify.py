"""Checks that Prometheus has data for every panel, every variable and every rule.

``python -m shoal.grafana.verify --prometheus http://localhost:9090``, while a node has load and
switches.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import httpx

from shoal.grafana.api import Prometheus, PrometheusError, Rule, Series
from shoal.grafana.boards import FOLDER, Board, Target, Window, read_boards

POINTS = 120
"""Points of a curve."""

NEEDS: Mapping[str, str] = {"gpu": "DCGM_", "model": "vllm:prefix_cache_"}
"""What may be missing, and the prefix of the metrics that exist only with it: GPUs watched by
dcgm-exporter, and engines that run a model."""

_SELECTOR = re.compile(r"\b(?:(?:shoal|vllm)[:_][\w:]+|up)\b(?:\{[^}]*\})?")


def problems(
    prometheus: Prometheus, boards: Sequence[Board], window: Window, without: Sequence[str] = ()
) -> list[str]:
    """Return a line for every panel, variable, annotation and rule that has no data.

    Args:
        prometheus: the Prometheus to ask.
        boards: the dashboards.
        window: the time to check.
        without: keys of ``NEEDS`` whose queries are left out.

    Raises:
        PrometheusError: Prometheus does not answer.
    """
    found = [line for board in boards for line in _of_board(prometheus, board, window, without)]
    rules = prometheus.rules()
    if not rules:
        found.append("Prometheus has loaded no rules")
    return found + [line for rule in rules for line in _of_rule(prometheus, rule, window)]


def ask(prometheus: Prometheus, target: Target, window: Window) -> list[Series]:
    """Return a panel's series for one of its queries.

    Raises:
        PrometheusError: Prometheus refuses it.
    """
    query = window.fill(target.expr)
    if target.instant:
        return prometheus.at(query, window.end)
    return prometheus.over(query, window.start, window.end, window.step)


def _of_board(
    prometheus: Prometheus, board: Board, window: Window, without: Sequence[str]
) -> Iterator[str]:
    for choice in board.choices:
        if not prometheus.label_values(choice.label, window.fill(choice.selector)):
            yield f"{board.title}: variable {choice.name} has no values"
    for mark in board.marks:
        if not _has_data(ask(prometheus, Target(mark, "", instant=False), window)):
            yield f"{board.title}: no annotations: {mark}"
    for panel in board.panels:
        for target in panel.targets:
            if any(NEEDS[need] in target.expr for need in without):
                continue
            if not _has_data(ask(prometheus, target, window)):
                yield f"{board.title}: {panel.title}: no data: {target.expr}"


def _of_rule(prometheus: Prometheus, rule: Rule, window: Window) -> Iterator[str]:
    """Yield what is wrong with a rule; even if it does not fire, its metrics must exist."""
    if rule.health != "ok":
        yield f"rule {rule.name}: {rule.health} {rule.error}"
    for selector in _SELECTOR.findall(rule.query):
        if not prometheus.at(selector, window.end):
            yield f"rule {rule.name}: no data: {selector}"
    if rule.kind == "recording" and not prometheus.at(rule.name, window.end):
        yield f"rule {rule.name}: it has recorded nothing"


def _has_data(series: Sequence[Series]) -> bool:
    return any(one.has_data for one in series)


def window_of(args: argparse.Namespace) -> Window:
    """Return a window of the last minutes, as the arguments say."""
    end = time.time()
    seconds = 60 * args.minutes
    step = max(args.scrape_interval, seconds / POINTS)
    return Window(end - seconds, end, step, args.scrape_interval, args.instance)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that name Prometheus and the time to check."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--prometheus", metavar="URL", default="http://localhost:9090")
    made.add_argument("--minutes", type=float, default=5, help="time looked at (default: 5)")
    made.add_argument("--scrape-interval", type=float, default=5, help="seconds (default: 5)")
    made.add_argument("--instance", default=".+", help="regular expression of the nodes")
    return made


def main() -> int:
    """Print everything that has no data; return 1 if there is anything."""
    arguments = parser("Check that Prometheus has data for every panel and rule.")
    arguments.add_argument("--without", choices=sorted(NEEDS), action="append", default=[])
    args = arguments.parse_args()
    boards = read_boards(FOLDER)
    with httpx.Client(base_url=args.prometheus) as http:
        try:
            found = problems(Prometheus(http), boards, window_of(args), args.without)
        except PrometheusError as error:
            print(error, file=sys.stderr)
            return 1
    left_out = f", but for {' and '.join(args.without)}" if args.without else ""
    print("\n".join(found) or f"All panels, variables and rules have data{left_out}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
