"""The default number of front ends follows the engines and the cores."""

import os
from pathlib import Path

import pytest

from shoal.server.options.front_end_option import front_ends, usable_cores


@pytest.mark.parametrize(
    ("engines", "on_cpu", "cores", "expected"),
    [(4, False, 32, 8), (4, False, 31, 4), (1, False, 8, 2), (4, True, 64, 1)],
)
def test_an_engine_has_two_front_ends_where_there_are_cores_enough(
    engines: int, on_cpu: bool, cores: int, expected: int
) -> None:
    assert front_ends(engines, on_cpu=on_cpu, cores=cores) == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 16), ("650000 100000", 6), ("6400000 100000", 16), ("odd", 16), (None, 16)],
)
def test_a_container_may_use_fewer_cores_than_there_are(
    quota: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(tmp_path / "cpu.max") == expected
