"""The page on vLLM names all code that only a GPU runs: what these tests cannot reach is known.

A row of its table names modules (below ``runtime/engine`` unless it says a folder) and after a
colon what of them: functions, classes or constants. A module with nothing after it is meant as a
whole.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sources import sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "vllm.md"
FOLDER = "runtime/engine"
HEAD = "| where | what | what tests see of it |\n|---|---|---|\n"

ATTRIBUTES = frozenset({"accelerator", "cuda", "CUDA", "is_cpu", "is_cuda", "is_cuda_alike"})
"""Of PyTorch and of vLLM's platforms. What asks for a CPU does something else without one."""
LIBRARIES = frozenset({"cuda", "cupy", "pynvml", "triton"})
INNER = frozenset({"_symmetric_memory", "partitioned_linear_kernel", "peer_exchange_kernel"})
"""Modules of PyTorch's and ours that are imported where there is a GPU."""
WORDS = re.compile(r"cuda(:\d+)?|nvidia-smi\b.*")
"""What strings are that name a GPU or ask its driver."""


class Place(NamedTuple):
    """Where code asks for a GPU, or speaks to one."""

    module: str
    scopes: tuple[str, ...]
    """Functions and classes around it, outermost first, or the constant; empty: none."""


def gpu_paths(root: Path) -> set[Place]:
    """Return all such places in the packages below ``root``."""
    return {
        Place(path.relative_to(root).as_posix(), scopes)
        for path in sources(root)
        for scopes in _places(ast.parse(path.read_text(), str(path)), ())
    }


def _places(node: ast.AST, scopes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if _asks_for_gpu(node):
        yield scopes
    for child in ast.iter_child_nodes(node):
        yield from _places(child, (*scopes, *_named(child)))


def _asks_for_gpu(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name):
            return name in ATTRIBUTES
        case ast.Constant(value=str(text)):
            return WORDS.fullmatch(text) is not None
        case ast.Import(names=names):
            imported = [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names):
            imported = [f"{module}.{alias.name}" for alias in names]
        case _:
            return False
    parts = [name.split(".") for name in imported]
    return any(part[0] in LIBRARIES or INNER & set(part) for part in parts)


def _named(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name] if name.isupper() else []
    return []


def table(page: str, root: Path) -> Mapping[str, set[str]]:
    """Return what the page's table names: of a module names of its code, or none if it is whole."""
    folders = {path.name: path.parent for path in (root / FOLDER).rglob("*.py")}
    found: dict[str, set[str]] = {}
    _, _, rows = page.partition(HEAD)
    for row in re.findall(r"^\| (.*?) \|.*\|$", rows, re.MULTILINE):
        for item in row.split("; "):
            modules, _, names = item.partition(": ")
            for module in re.findall(r"`([\w/]+\.py)`", modules):
                folder = folders.get(module, root / FOLDER).relative_to(root).as_posix()
                path = module if "/" in module else f"{folder}/{module}"
                found.setdefault(path, set()).update(re.findall(r"`(\w+)`", names))
    return found


def problems(page: str, root: Path) -> list[str]:
    """Return what the table lacks of the code below ``root``, and what it names that is not."""
    named = table(page, root)
    left_out = [
        f"{module}: {'.'.join(scopes) or 'the module'} is not named"
        for module, scopes in sorted(gpu_paths(root))
        if module not in named or (named[module] and not named[module] & set(scopes))
    ]
    gone = [
        f"{module}: {name or 'the module'} is not there"
        for module, names in sorted(named.items())
        for name in sorted(names) or [""]
        if not (root / module).is_file()
        or not re.search(rf"\b{name}\b", (root / module).read_text())
    ]
    return left_out + gone


def test_the_table_names_all_that_only_a_gpu_runs() -> None:
    assert problems(PAGE.read_text(), ROOT) == []


def test_the_search_finds_what_is_known_to_be_there() -> None:
    known = {
        ("runtime/engine/weights/rules/unquantised.py", ("_in_one_launch",)),
        ("runtime/layout_configs.py", ("DEFAULT_BLOCK_TOKENS",)),
        ("runtime/engine/runner/runner.py", ("RandomStates", "switch")),
        ("runtime/node/child_process.py", ("choose_context",)),
        ("loadgen/bench/system_info.py", ("_nvidia_smi",)),
    }
    assert known <= gpu_paths(ROOT)


@pytest.mark.parametrize(
    "source",
    [
        "def found(x): return x.is_cuda",
        "def found(): return torch.cuda.is_available()",
        "def found(x): return x.cuda()",
        "def found(): return current_platform.is_cuda_alike()",
        "def found(): return not current_platform.is_cpu()",
        "def found(x): return x.device.type == 'cuda'",
        "def found(): return torch.device('cuda:1')",
        "def found(): return torch.accelerator.current_device_index()",
        "def found(): subprocess.run(['nvidia-smi', '-L'])",
        "def found(): import triton.language as tl",
        "def found(): from cuda.bindings import driver",
        "def found(): from torch.distributed import _symmetric_memory",
        "def found(): from shoal.runtime.engine.kernels.partitioned_linear_kernel import multiply",
        "@torch.library.impl('ours', 'cuda')\ndef found(x): return x",
        "class found:\n    def inner(self): return torch.cuda.Stream()",
    ],
)
def test_code_for_gpus_has_to_be_named(tmp_path: Path, source: str) -> None:
    write(tmp_path, source)
    (problem,) = problems(page("`other.py`"), tmp_path)
    assert re.fullmatch(r"runtime/engine/room/module\.py: found\S* is not named", problem)
    (problem,) = problems(page("`other.py`; `module.py`: `else`"), tmp_path)[:1]
    assert problem.startswith("runtime/engine/room/module.py: found")
    for cell in ("`module.py`", "`module.py`: `found`", "`runtime/engine/room/module.py`: `found`"):
        assert problems(page(f"`other.py`; {cell}"), tmp_path) == []


@pytest.mark.parametrize(
    "source",
    [
        '"""Speaks of cuda, and of nvidia-smi."""',
        "def f(): return 'no cuda here'",
        "def f(config): return config.cudagraph_mode",
        "from vllm.model_executor.kernels.linear.scaled_mm.triton import Kernel",
    ],
)
def test_other_code_need_not_be_named(tmp_path: Path, source: str) -> None:
    write(tmp_path, source)
    assert problems(page("`other.py`"), tmp_path) == []


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("`gone.py`", "runtime/engine/gone.py: the module is not there"),
        ("`other.py`: `gone`", "runtime/engine/room/other.py: gone is not there"),
        ("`server/other.py`", "server/other.py: the module is not there"),
    ],
)
def test_what_is_gone_may_not_be_named(tmp_path: Path, cell: str, problem: str) -> None:
    write(tmp_path, "")
    assert problems(page(cell), tmp_path) == [problem]


def page(cell: str) -> str:
    return f"# A page\n\n{HEAD}| {cell} | what | seen |\n"


def write(root: Path, source: str) -> None:
    folder = root / FOLDER / "room"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text(source)
    (folder / "other.py").write_text("x = 1\n")
