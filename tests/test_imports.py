"""The import rules hold in the repository, and the check sees every way to break them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.import_rules import FOLDERS, Module, problems, read_modules

ROOT = Path(__file__).parents[1]


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    """What the repository has."""
    return read_modules(ROOT)


def test_repository_keeps_the_rules(modules: dict[str, Module]) -> None:
    assert problems(modules) == []


def test_repository_is_what_was_read(modules: dict[str, Module]) -> None:
    assert {name.split(".")[1] for name in modules} == FOLDERS
    targets = {found.target for found in modules["shoal.runtime.protocol.messages.engine"].imports}
    assert "shoal.policies.values.layouts" in targets


def test_every_folder_is_there_under_its_name() -> None:
    links = {path.name: path.readlink() for path in (ROOT / "shoal").iterdir() if path.is_symlink()}
    assert links == {folder: Path("..", folder) for folder in FOLDERS}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        pytest.param(
            {"policies/a.py": "import shoal.runtime.b", "runtime/b.py": ""},
            "shoal.policies.a:1: policies may not import runtime",
            id="policies-import-runtime",
        ),
        pytest.param(
            {"runtime/a.py": "from shoal.server import b", "server/b.py": ""},
            "shoal.runtime.a:1: runtime may not import server",
            id="runtime-imports-server",
        ),
        pytest.param(
            {"loadgen/a.py": "import os\nfrom shoal.runtime.b import c", "runtime/b.py": "c = 1"},
            "shoal.loadgen.a:2: loadgen may not import runtime",
            id="loadgen-imports-runtime",
        ),
        pytest.param(
            {"loadgen/a.py": "from shoal.loadgen.bench import b", "loadgen/bench/b.py": ""},
            "shoal.loadgen.a:1: loadgen may not import loadgen.bench",
            id="loadgen-imports-benchmarks",
        ),
        pytest.param(
            {"server/a.py": "from shoal.loadgen.bench.b import c", "loadgen/bench/b.py": "c = 1"},
            "shoal.server.a:1: server may not import loadgen.bench",
            id="server-imports-benchmarks",
        ),
        pytest.param(
            {"grafana/a.py": "import shoal.runtime.b", "runtime/b.py": ""},
            "shoal.grafana.a:1: grafana may not import runtime",
            id="grafana-imports-runtime",
        ),
        pytest.param(
            {"server/a.py": "from shoal.runtime.engine.b import c", "runtime/engine/b.py": "c = 1"},
            "shoal.server.a:1: server may not import shoal.runtime.engine.b",
            id="server-imports-engine",
        ),
        pytest.param(
            {
                "server/a.py": "from shoal.runtime.controller import b",
                "runtime/controller/b.py": "",
            },
            "shoal.server.a:1: server may not import shoal.runtime.controller.b",
            id="server-imports-controller",
        ),
        pytest.param(
            {
                "loadgen/bench/a.py": "from shoal.runtime.controller import b",
                "runtime/controller/b.py": "",
            },
            "shoal.loadgen.bench.a:1: loadgen.bench may not import shoal.runtime.controller.b",
            id="benchmark-of-servers-imports-controller",
        ),
        pytest.param(
            {"runtime/a.py": "from tests.server import b"},
            "shoal.runtime.a:1: runtime may not import tests",
            id="product-imports-tests",
        ),
        pytest.param(
            {"runtime/a.py": "from policies.b import c", "policies/b.py": "c = 1"},
            "shoal.runtime.a:1: policies.b is shoal.policies.b",
            id="name-that-no-wheel-has",
        ),
        pytest.param(
            {"policies/a.py": "import vllm"}, "shoal.policies.a:1: may not import vllm", id="vllm"
        ),
        pytest.param(
            {"runtime/engine/agent/agent.py": "def f():\n    import torch.nn"},
            "shoal.runtime.engine.agent.agent:2: may not import torch",
            id="torch-in-a-function",
        ),
        pytest.param(
            {"runtime/a.py": "try:\n    pass\nexcept OSError:\n    import torch"},
            "shoal.runtime.a:4: may not import torch",
            id="torch-in-a-handler",
        ),
        pytest.param(
            {"runtime/a.py": "match 1:\n    case 1:\n        import torch"},
            "shoal.runtime.a:3: may not import torch",
            id="torch-in-a-case",
        ),
        pytest.param(
            {"server/a.py": "import importlib\nimportlib.import_module('vllm.config')"},
            "shoal.server.a:2: may not import vllm",
            id="vllm-by-name",
        ),
        pytest.param(
            {
                "runtime/engine/a.py": "import shoal.runtime.engine.kernels.kv_copy_kernel",
                "runtime/engine/kernels/kv_copy_kernel.py": "import triton",
            },
            "shoal.runtime.engine.a: imports triton by way of "
            "shoal.runtime.engine.kernels.kv_copy_kernel -> triton",
            id="triton-where-there-may-be-no-gpu",
        ),
        pytest.param(
            {
                "runtime/controller/a.py": "import shoal.runtime.b",
                "runtime/b.py": "from shoal.runtime.engine.weights import shared_weights",
                "runtime/engine/weights/shared_weights.py": "import torch",
            },
            "shoal.runtime.controller.a: imports a model library by way of "
            "shoal.runtime.b -> shoal.runtime.engine.weights.shared_weights -> torch",
            id="vllm-in-the-controller-by-way-of-others",
        ),
        pytest.param(
            {
                "runtime/a.py": "import shoal.runtime.b",
                "runtime/b.py": "from shoal.runtime import a",
            },
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
                "runtime/x/a.py": "import shoal.runtime.y.c",
                "runtime/x/b.py": "",
                "runtime/y/c.py": "",
                "runtime/y/d.py": "def f():\n    import shoal.runtime.x.b",
            },
            "import cycle of folders: ",
            id="folder-cycle-through-a-function",
        ),
        pytest.param(
            {
                "runtime/a.py": "import shoal.runtime.x.b",
                "runtime/x/b.py": "import shoal.runtime.c",
                "runtime/c.py": "",
            },
            "import cycle of folders: ",
            id="folder-cycle-with-its-parent",
        ),
        pytest.param(
            {"runtime/a.py": "", "server/x/a.py": ""},
            "shoal.server.x.a: shoal.runtime.a has that name",
            id="one-name-for-two",
        ),
    ],
)
def test_broken_rule_is_reported(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    found = problems(read_modules(write_tree(tmp_path, files)))
    assert len(found) == 1
    assert found[0].startswith(problem)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(
            {
                "server/a.py": "import shoal.runtime.b, shoal.policies.c",
                "runtime/b.py": "",
                "policies/c.py": "",
            },
            id="downwards",
        ),
        pytest.param(
            {
                "loadgen/bench/a.py": "import shoal.server.x.b",
                "server/x/b.py": "import shoal.loadgen.c",
                "loadgen/c.py": "",
            },
            id="benchmarks-above-the-server",
        ),
        pytest.param(
            {
                "loadgen/bench/controller_loop.py": "import shoal.runtime.controller.b",
                "runtime/controller/b.py": "",
            },
            id="benchmark-of-the-controller",
        ),
        pytest.param(
            {
                "runtime/engine/a.py": "def b():\n    from shoal.runtime.engine.kernels"
                " import kv_copy_kernel",
                "runtime/engine/kernels/kv_copy_kernel.py": "import triton",
            },
            id="triton-when-it-is-needed",
        ),
        pytest.param(
            {"runtime/engine/weights/shared_weights.py": "import torch, vllm"}, id="named-module"
        ),
        pytest.param(
            {"server/frontend/frontend.py": "from vllm.config import x"}, id="named-front-end"
        ),
        pytest.param(
            {
                "runtime/controller/a.py": "def f():\n    import shoal.runtime.engine.kv.kv_cache",
                "runtime/engine/kv/kv_cache.py": "import torch",
            },
            id="lazily",
        ),
        pytest.param(
            {"runtime/a.py": "", "runtime/x/__init__.py": "", "runtime/y/__init__.py": ""}
            | {
                "runtime/x/b.py": "",
                "runtime/y/c.py": "import shoal.runtime.x.b",
            },
            id="folders-in-order",
        ),
    ],
)
def test_allowed_tree_is_not_reported(tmp_path: Path, files: dict[str, str]) -> None:
    assert problems(read_modules(write_tree(tmp_path, files))) == []
