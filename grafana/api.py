"""A client of Prometheus' HTTP API, with the queries that are needed here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_SECONDS = 30.0


class PrometheusError(Exception):
    """Prometheus does not answer, or refuses a query; the message says which."""


@dataclass(frozen=True)
class Series:
    """The values of one series: times (seconds since 1970), and the value at each time."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]

    @property
    def has_data(self) -> bool:
        """Whether any value is finite: the quantile of an empty histogram is NaN."""
        return any(math.isfinite(value) for _, value in self.points)


@dataclass(frozen=True)
class Rule:
    """A rule that Prometheus has loaded: ``kind`` is ``alerting`` or ``recording``."""

    name: str
    kind: str
    query: str
    health: str
    error: str


class Prometheus:
    """A running Prometheus.

    Args:
        http: a client whose ``base_url`` is Prometheus' address.
    """

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def at(self, query: str, time: float) -> list[Series]:
        """Return the result of a query at a time.

        Raises:
            PrometheusError: see there.
        """
        data = self._get("/api/v1/query", query=query, time=time)
        if data["resultType"] == "scalar":
            return [_series({"value": data["result"]})]
        return [_series(series) for series in data["result"]]

    def over(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """Return the result of a query every ``step`` seconds.

        Raises:
            PrometheusError: see there.
        """
        data = self._get("/api/v1/query_range", query=query, start=start, end=end, step=step)
        return [_series(series) for series in data["result"]]

    def label_values(self, label: str, selector: str) -> list[str]:
        """Return the values that a label has in a selector's series.

        Raises:
            PrometheusError: see there.
        """
        return list(self._get(f"/api/v1/label/{label}/values", **{"match[]": selector}))

    def rules(self) -> list[Rule]:
        """Return all rules.

        Raises:
            PrometheusError: see there.
        """
        groups = self._get("/api/v1/rules")["groups"]
        return [
            Rule(
                rule["name"], rule["type"], rule["query"], rule["health"], rule.get("lastError", "")
            )
            for group in groups
            for rule in group["rules"]
        ]

    def _get(self, path: str, **parameters: str | float) -> Any:
        try:
            answer = self._http.get(path, params=parameters, timeout=TIMEOUT_SECONDS).json()
        except (httpx.HTTPError, ValueError) as error:
            raise PrometheusError(f"{self._http.base_url} does not answer: {error}") from error
        if answer.get("status") != "success":
            raise PrometheusError(answer.get("error", "no reason was given"))
        return answer["data"]


def _series(data: Mapping[str, Any]) -> Series:
    points = data["values"] if "values" in data else [data["value"]]
    return Series(data.get("metric", {}), [(float(at), float(value)) for at, value in points])
