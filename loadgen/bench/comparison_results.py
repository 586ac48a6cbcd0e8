"""The results file of a comparison, written after every measure and continued by the next run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.systems import Settings
from shoal.server.errors import UserError


class SystemResults(msgspec.Struct):
    """The results of one system."""

    command: list[str]
    """The command of its last start."""
    starts: list[dict[str, Any]] = []
    """For every start: ``seconds`` until it took requests, and ``system_info.read_log``."""
    memory: dict[str, Any] = {}
    """GiB in use per GPU: before the start, when ready, and at the end."""
    measures: dict[str, Any] = {}
    """The figures of each measure; by layout, unless it measures switches."""
    failures: dict[str, str] = {}
    """Measures that failed in the last run, and why."""


class Results(msgspec.Struct):
    """One comparison."""

    settings: Settings
    sizes: Sizes
    config: dict[str, Any]
    """The model's ``config.json``."""
    environment: dict[str, Any]
    workloads: dict[str, dict[str, Any]] = {}
    """The parameters of each open-loop workload."""
    systems: dict[str, SystemResults] = {}

    def add_workload(self, name: str, about: dict[str, Any]) -> None:
        """Note the parameters of a workload.

        Raises:
            UserError: a system was measured under a workload of this name with other parameters.
        """
        measured = any(
            measure == name or measure.startswith(f"{name} ")  # a cell of a rate
            for system in self.systems.values()
            for measure in system.measures
        )
        if measured and self.workloads.get(name) != about:
            raise UserError(f"there are results of another workload {name}: choose another --out")
        self.workloads[name] = about

    def found(self, system: str, measure: str) -> dict[str, Any]:
        """Return the figures of a system's measure; empty if it was not taken."""
        kept = self.systems.get(system)
        figures: dict[str, Any] = kept.measures.get(measure, {}) if kept is not None else {}
        return figures

    def missing(self, system: str, measures: Mapping[str, object]) -> list[str]:
        """Return which of the measures a system lacks."""
        done = self.systems[system].measures if system in self.systems else {}
        return [name for name in measures if name not in done]


class ResultsFile:
    """Results on disk.

    Args:
        path: the JSON file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def take_up(self, fresh: Results) -> Results:
        """Return the results in the file, or ``fresh`` if there is no file.

        Raises:
            UserError: the file has results of other settings, or cannot be read.
        """
        if not self._path.exists():
            return fresh
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=Results)
        except msgspec.DecodeError as error:
            raise UserError(f"{self._path}: {error}") from error
        for name in ("settings", "sizes", "config"):
            if msgspec.to_builtins(getattr(found, name)) != msgspec.to_builtins(
                getattr(fresh, name)
            ):
                raise UserError(f"{self._path} has results of other {name}: choose another --out")
        return found

    def write(self, results: Results) -> None:
        """Write the results; a reader never sees half of them."""
        content = msgspec.json.format(msgspec.json.encode(results))
        beside = self._path.with_suffix(".new")
        beside.write_bytes(content + b"\n")
        beside.replace(self._path)
