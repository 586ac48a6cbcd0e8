"""The file of a fit: what is read again, and what is refused."""

from pathlib import Path

import pytest

from shoal.policies.cost.correction import Correction
from shoal.policies.values.batch import Mode, StepKind
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.fit_file import FitFileError, path_of, read_fit, write_fit

KEY = {"gpu": "one", "engines": "2"}
CORRECTIONS = (
    Correction(DP, StepKind.DECODE).fit([(0.01, 0.012)]),
    Correction(Layout(tp=2), StepKind.PREFILL, Mode.SP).fit([(0.1, 0.3), (0.2, 0.5)]),
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = path_of(tmp_path / "new", KEY)
    assert read_fit(path, KEY) is None
    write_fit(path, KEY, CORRECTIONS)
    assert read_fit(path, KEY) == CORRECTIONS
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_each_key_has_its_file(tmp_path: Path) -> None:
    assert path_of(tmp_path, KEY) != path_of(tmp_path, {**KEY, "gpu": "other"})
    assert path_of(tmp_path, KEY) == path_of(tmp_path, dict(reversed(KEY.items())))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"key": {}}'])
def test_a_damaged_file_is_refused_with_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fit.json"
    path.write_bytes(content)
    with pytest.raises(FitFileError, match=r"^[^\n]*fit\.json: [^\n]+$"):
        read_fit(path, KEY)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    write_fit(path, {**KEY, "gpu": "other"}, CORRECTIONS)
    with pytest.raises(FitFileError, match="made for something else"):
        read_fit(path, KEY)
    assert read_fit(path) == CORRECTIONS


def test_a_file_without_the_lengths_of_steps_is_refused(tmp_path: Path) -> None:
    """An earlier build wrote such files, with other fields instead."""
    path = tmp_path / "fit.json"
    old = b'{"layout": [1, 1, 1], "kind": "decode", "samples": 20, "missed": 0.002, "variance": 0}'
    path.write_bytes(b'{"key": {"gpu": "one", "engines": "2"}, "corrections": [%s]}' % old)
    with pytest.raises(FitFileError, match="an earlier build"):
        read_fit(path, KEY)
