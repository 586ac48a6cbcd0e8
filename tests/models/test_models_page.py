"""The page on models says what becomes of them, and what is said of a model is what happens."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from shoal.runtime.served_weights import LayerKind
from tests.models.page import PAGE
from tests.preloaded import Process
from tests.random_checkpoint import Architecture, CheckpointSpec, model_config

PATIENCE_SECONDS = 300


def run(function: str, path: Path) -> str:
    """Return what a function writes that makes a process useless for other tests."""
    with Process(function, [str(path)], os.environ) as process:
        output, _ = process.communicate(PATIENCE_SECONDS)
    assert process.returncode == 0, output
    return path.read_text(encoding="utf-8")


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    written = run("tests.models.page:write", tmp_path / "page")
    assert PAGE.read_text(encoding="utf-8") == written, "run python -m tests.models.page"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("scan") / "found"
    answers: dict[str, str] = json.loads(run(f"{__name__}:scan_others", path))
    return answers


def scan_others(path: str) -> int:
    """Write what is said of models that the page does not have, by what is special of each."""
    from tests.models import scan
    from tests.models.scan import prepare, scan_config

    prepare()
    llama = model_config(CheckpointSpec(layers=1))
    mixtral = model_config(CheckpointSpec(Architecture.MIXTRAL, layers=1))
    outcomes = {"llama": scan_config(llama), "mixtral": scan_config(mixtral)}
    with patch(
        "shoal.server.options.unsupported_models.WITHOUT_RULE", frozenset({LayerKind.EXPERTS})
    ):
        outcomes["no rule for experts"] = scan_config(mixtral)
    with patch("shoal.runtime.engine.weights.rules.dense.RowParallelRule.layers", ()):
        outcomes["no rule for o_proj"] = scan_config(llama)
    unknown = {"quant_method": "experts_int8"}
    outcomes["quantised"] = scan_config(
        llama | {"quantization_config": unknown, "dtype": "float16"}
    )
    outcomes["no class"] = scan.scan("PanguUltraMoEForCausalLM")
    words = {
        name: "served" if outcome.served else f"{outcome.served}: {outcome.reason}"
        for name, outcome in outcomes.items()
    }
    Path(path).write_text(json.dumps(words), encoding="utf-8")
    return 0


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("llama", "served"),
        ("mixtral", "served"),
        ("no rule for experts", "False: a mixture-of-experts model"),
        ("quantised", "False: quantised (experts_int8)"),
        ("no class", "None: neither vLLM nor Transformers has its configuration's class"),
    ],
)
def test_a_model_is_said_to_be_what_a_node_takes_it_for(
    found: dict[str, str], model: str, said: str
) -> None:
    assert found[model] == said


def test_layers_that_cannot_be_viewed_show(found: dict[str, str]) -> None:
    assert found["no rule for o_proj"] == (
        "False: model.layers.0.self_attn.o_proj (RowParallelLinear) cannot be viewed"
    )
