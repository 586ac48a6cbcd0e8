"""The start-up check: the installed vLLM passes it, any other is refused in one line."""

from pathlib import Path

import pytest
import vllm

from shoal.runtime.engine.link import seams
from shoal.runtime.engine.link.seams import SEAMS, VLLM_VERSION, Seam, UnsupportedVllm, check_seams
from tests.sources import sources

ROOT = Path(__file__).parents[4]


def test_the_installed_vllm_has_every_seam() -> None:
    assert seams.missing_seams() == []
    check_seams()


def test_every_seam_is_listed_once() -> None:
    assert len({(seam.module, seam.attribute) for seam in SEAMS}) == len(SEAMS)


def test_every_seam_is_of_a_module_that_is_there() -> None:
    assert {seam.used_by for seam in SEAMS} <= {path.stem for path in sources(ROOT)}


@pytest.mark.parametrize(
    "gone",
    [
        Seam("vllm.v1.engine.core", "EngineCore.no_such_method", "vllm_core"),
        Seam("vllm.v1.no_such_module", "anything", "vllm_core"),
    ],
)
def test_a_missing_seam_is_named_in_one_line(gone: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "SEAMS", (SEAMS[0], gone))
    with pytest.raises(UnsupportedVllm) as error:
        check_seams()
    text = str(error.value)
    assert text == f"vLLM {vllm.__version__} lacks {gone.module}.{gone.attribute}"
    assert "\n" not in text


@pytest.mark.parametrize("found", ["0.31.0", "0.32.1", "0.33.0rc1"])
def test_another_version_is_refused_in_one_line(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", found)
    with pytest.raises(UnsupportedVllm) as error:
        check_seams()
    assert str(error.value) == f"Shoal needs vLLM {VLLM_VERSION}, found {found}"


def test_a_local_build_of_the_version_is_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", f"{VLLM_VERSION}+cpu")
    check_seams()
