"""The import rules hold in the repository, and the check sees every way to break them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.import_rules import MAX_LINES, MAY_IMPORT, problems, read_modules

ROOT = Path(__file__).parents[1]


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def test_repository_keeps_the_rules() -> None:
    assert problems(ROOT) == []


def test_repository_is_what_was_read() -> None:
    modules = read_modules(ROOT)
    assert {name.partition(".")[0] for name in modules} == set(MAY_IMPORT)
    targets = {found.target for found in modules["runtime.messages.engine"].imports}
    assert "policies.partition" in targets


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        pytest.param(
            {"policies/a.py": "import runtime.b", "runtime/b.py": ""},
            "policies.a:1: policies may not import runtime",
            id="policies-import-runtime",
        ),
        pytest.param(
            {"runtime/a.py": "from server import b", "server/b.py": ""},
            "runtime.a:1: runtime may not import server",
            id="runtime-imports-server",
        ),
        pytest.param(
            {"loadgen/a.py": "import os\nfrom runtime.b import c", "runtime/b.py": "c = 1"},
            "loadgen.a:2: loadgen may not import runtime",
            id="loadgen-imports-runtime",
        ),
        pytest.param(
            {"grafana/a.py": "import runtime.b", "runtime/b.py": ""},
            "grafana.a:1: grafana may not import runtime",
            id="grafana-imports-runtime",
        ),
        pytest.param(
            {"server/a.py": "from runtime.engine.b import c", "runtime/engine/b.py": "c = 1"},
            "server.a:1: server may not import runtime.engine.b",
            id="server-imports-engine",
        ),
        pytest.param(
            {"server/a.py": "from runtime.controller import b", "runtime/controller/b.py": ""},
            "server.a:1: server may not import runtime.controller.b",
            id="server-imports-controller",
        ),
        pytest.param(
            {"runtime/a.py": "from tests.server import b"},
            "runtime.a:1: runtime may not import tests",
            id="product-imports-tests",
        ),
        pytest.param(
            {"policies/a.py": "import vllm"}, "policies.a:1: may not import vllm", id="vllm"
        ),
        pytest.param(
            {"runtime/engine/agent.py": "def f():\n    import torch.nn"},
            "runtime.engine.agent:2: may not import torch",
            id="torch-in-a-function",
        ),
        pytest.param(
            {"server/a.py": "import importlib\nimportlib.import_module('vllm.config')"},
            "server.a:2: may not import vllm",
            id="vllm-by-name",
        ),
        pytest.param(
            {
                "runtime/controller/a.py": "import runtime.b",
                "runtime/b.py": "from runtime.engine import weights",
                "runtime/engine/weights.py": "import torch",
            },
            "runtime.controller.a: imports a model library by way of "
            "runtime.b -> runtime.engine.weights -> torch",
            id="vllm-in-the-controller-by-way-of-others",
        ),
        pytest.param(
            {"runtime/a.py": "import runtime.b", "runtime/b.py": "from runtime import a"},
            "import cycle of modules: ",
            id="cycle",
        ),
        pytest.param(
            {
                "runtime/a.py": "def f():\n    from . import b",
                "runtime/b.py": "from .a import f",
            },
            "import cycle of modules: ",
            id="cycle-through-a-function-and-relative-imports",
        ),
        pytest.param(
            {
                "runtime/x/a.py": "import runtime.y.a",
                "runtime/x/b.py": "",
                "runtime/y/a.py": "",
                "runtime/y/b.py": "import runtime.x.b",
            },
            "import cycle of packages: ",
            id="package-cycle",
        ),
        pytest.param(
            {"policies/a.py": "x = 1\n" * (MAX_LINES + 1)},
            f"policies.a: {MAX_LINES + 1} lines, more than {MAX_LINES}",
            id="length",
        ),
    ],
)
def test_broken_rule_is_reported(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    found = problems(write_tree(tmp_path, files))
    assert len(found) == 1
    assert found[0].startswith(problem)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(
            {
                "server/a.py": "import runtime.b, policies.c",
                "runtime/b.py": "",
                "policies/c.py": "",
            },
            id="downwards",
        ),
        pytest.param({"runtime/engine/weights.py": "import torch, vllm"}, id="named-module"),
        pytest.param({"server/frontend.py": "from vllm.config import x"}, id="named-front-end"),
        pytest.param(
            {
                "runtime/controller/a.py": "def f():\n    import runtime.engine.weights",
                "runtime/engine/weights.py": "import torch",
            },
            id="lazily",
        ),
        pytest.param(
            {"runtime/a.py": "import runtime.engine.b", "runtime/engine/b.py": "import runtime.c"}
            | {"runtime/c.py": "x = 1\n" * MAX_LINES},
            id="package-and-its-subpackage",
        ),
    ],
)
def test_allowed_tree_is_not_reported(tmp_path: Path, files: dict[str, str]) -> None:
    assert problems(write_tree(tmp_path, files)) == []
