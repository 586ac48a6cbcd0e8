"""What a wheel installs: its files and nothing else, and all that it needs by its own metadata."""

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from importlib.metadata import distribution, packages_distributions
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from packaging.markers import Environment, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.import_rules import MODEL_LIBRARIES
from tests.loadgen.stand_in import stand_in
from tests.server.node import served_node
from tests.sources import PRODUCT, sources

ROOT = Path(__file__).parents[1]
BROUGHT_BY_PYTORCH = {"cuda"}
"""Packages of the libraries that PyTorch's builds for CUDA require (``cuda-bindings``)."""
LINKS = sorted(path.name for path in (ROOT / "shoal").iterdir() if path.is_symlink())
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def run(command: list[str], folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the tree."""
    tree, out = (tmp_path_factory.mktemp(name) for name in ("tree", "out"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("shoal", *LINKS):
        shutil.copytree(
            ROOT / name,
            tree / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    run(["-c", BUILD, str(out)], tree)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel as an installer does."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_a_wheel_installs_one_package(installed: Path) -> None:
    (about,) = (path.name for path in installed.glob("shoal-*.dist-info"))
    assert {path.name for path in installed.iterdir()} == {"shoal", about}


def test_it_has_every_file_of_the_packages(installed: Path) -> None:
    package = installed / "shoal"
    there = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    wanted = {
        path.relative_to(ROOT)
        for name in LINKS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".pyc")
    }
    training = {path for path in wanted if path.is_relative_to("server/demo/training")}
    assert training, "the demo model's training is no part of serving"
    assert there == wanted - training | {Path("__init__.py")}
    demo, boards = Path("server/demo/checkpoint"), Path("grafana/dashboards")
    assert {demo / "model.safetensors", boards / "shoal-serving.json"} <= there


def test_it_runs_by_its_names(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    code = (
        "import shoal.server.options.serve_options as options\n"
        "print(options.__file__, options.DEMO_CHECKPOINT.is_dir())"
    )
    file, demo = run(["-c", code], installed, environment).split()
    assert Path(file).is_relative_to(installed)
    assert demo == "True"
    shown = run(["-m", "shoal.server.commands.cli", "--help"], installed, environment)
    assert "serve a model" in shown


# --- what it declares -----------------------------------------------------------------------------


def requirements(installed: Path) -> list[Requirement]:
    """Return what the wheel's metadata says that it requires."""
    (metadata,) = installed.glob("shoal-*.dist-info/METADATA")
    return [
        Requirement(line)
        for line in Parser().parsestr(metadata.read_text()).get_all("Requires-Dist", [])
    ]


def needed(
    requirements: Iterable[Requirement], extra: str = "", **environment: str
) -> list[Requirement]:
    """Return the requirements that hold with an extra, in an environment like this one."""
    here: Environment = {**default_environment(), **environment, "extra": extra}  # type: ignore[typeddict-item]
    return [one for one in requirements if one.marker is None or one.marker.evaluate(here)]


def imported(module: Path) -> set[str]:
    """Return the packages of others that a module imports, in functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found - {"shoal"} - sys.stdlib_module_names


def test_it_declares_all_that_it_imports(installed: Path) -> None:
    """vLLM brings its own libraries; the dashboards' generators have an extra of their own."""
    declared = requirements(installed)
    own = {canonicalize_name(one.name) for one in needed(declared)}
    dashboards = own | {canonicalize_name(one.name) for one in needed(declared, "dashboards")}
    owners = packages_distributions()
    missing = [
        (module.relative_to(installed).as_posix(), name)
        for module in (installed / "shoal").rglob("*.py")
        for name in sorted(imported(module) - MODEL_LIBRARIES - BROUGHT_BY_PYTORCH)
        for allowed in (dashboards if "grafana" in module.parts else own,)
        if not allowed & {canonicalize_name(owner) for owner in owners.get(name, [])}
    ]
    assert missing == []
    assert len(own) > 10


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_lock_for_gpus_is_what_the_extra_asks_for(installed: Path, python: str) -> None:
    """So ``pip install shoal[cuda]`` has one solution at least, on both Pythons."""
    environment = {"python_version": python, "python_full_version": f"{python}.5"}
    lines = (ROOT / "requirements" / "cuda.lock").read_text()
    pins = [Requirement(line) for line in re.findall(r"^([\w.-]+==[^\\\n]+)", lines, re.MULTILINE)]
    locked = {canonicalize_name(one.name): one for one in needed(pins, **environment)}
    wanted = needed(requirements(installed), "cuda", **environment)
    for one in wanted:
        (pin,) = locked[canonicalize_name(one.name)].specifier
        assert one.specifier.contains(pin.version), (one, pin)
    assert {one.name for one in wanted} >= {"vllm", "starlette"}
    assert {"torch", "triton"} <= locked.keys()


# --- without vLLM ---------------------------------------------------------------------------------


def closure(declared: Iterable[Requirement]) -> Iterator[str]:
    """Yield the distributions that requirements need, by the metadata of those installed here."""
    seen: set[tuple[str, str]] = set()
    waiting = [(one.name, extra) for one in needed(declared) for extra in ("", *one.extras)]
    while waiting:
        name, extra = waiting.pop()
        if (key := (canonicalize_name(name), extra)) in seen:
            continue
        seen.add(key)
        further = needed(map(Requirement, distribution(name).requires or ()), extra)
        waiting += [(one.name, more) for one in further for more in ("", *one.extras)]
    yield from sorted({name for name, _ in seen})


def link(path: Path, target: Path) -> None:
    """Have a path lead to a file, and where a module's compiled form is sought, to that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target.resolve())
    if path.suffix == ".py" and (compiled := Path(cache_from_source(target))).exists():
        link(Path(cache_from_source(path)), compiled)


@pytest.fixture(scope="module")
def clean(wheel: Path, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel where there is nothing but what it declares, and return the executables.

    The files of the declared packages are linked one by one from the environment of the tests, and
    what Python has compiled of them, too: this takes a second, and needs no package index.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in closure(requirements(installed)):
        for file in distribution(name).files or ():
            if not file.parts[0].startswith("..") and file.suffix != ".pyc":
                link(site / file, Path(str(file.locate())))
    pip = ["-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", str(wheel)], folder)
    return folder / "bin"


def environment_of(folder: Path) -> dict[str, str]:
    """Return an environment in which nothing but the command is the checkout's."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "MPLCONFIGDIR": str(folder)}


def command(clean: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(clean / words[0]), *words[1:]],
        cwd=folder,
        env=environment_of(folder),
        capture_output=True,
        text=True,
        check=False,
    )


_IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
import shoal
assert not any(importlib.util.find_spec(name) for name in sys.argv[1].split(","))
for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(module.name, error.name.partition(".")[0])
"""


def test_all_but_the_engines_is_imported_without_vllm(clean: Path, tmp_path: Path) -> None:
    words = ("python", "-c", _IMPORT_ALL, ",".join(sorted(MODEL_LIBRARIES)))
    done = command(clean, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    missing = dict(line.split() for line in done.stdout.splitlines())
    assert set(missing.values()) - MODEL_LIBRARIES <= {"grafana_foundation_sdk"}
    assert "shoal.server.frontend.frontend" in missing, "some module needs vLLM"
    assert len(missing) < len(list(sources(ROOT, PRODUCT))) / 3


async def test_a_workload_is_replayed_simulated_and_reported(clean: Path, tmp_path: Path) -> None:
    workload = ("--trace", "poisson", "--rate", "50", "--requests", "8", "--prompt-tokens", "5:40")
    async with stand_in() as server:
        replay = await asyncio.to_thread(
            command,
            *(clean, tmp_path, "shoal", "replay", "--base-url", server.url, *workload),
            *("--max-lag-ms", "60000", "--json", "run.json", "--html", "run.html"),
        )
        assert len(server.requests) == 8
    assert (replay.stderr, json.loads((tmp_path / "run.json").read_text())["completed"]) == ("", 8)
    assert "Successful requests:" in replay.stdout
    report = command(clean, tmp_path, "shoal", "report", "run.json", "--html", "report.html")
    assert (report.returncode, report.stderr) == (0, "")
    assert "<svg" in (tmp_path / "report.html").read_text()
    node = ("--policy", "flying", "--engines", "2", "--model-shape", "llama-3-8b-bf16")
    simulated = command(clean, tmp_path, "shoal", "simulate", *workload, *node)
    assert simulated.returncode == 0, simulated.stderr
    assert "flying" in simulated.stdout


def test_a_workload_is_replayed_against_a_node(clean: Path, tmp_path: Path) -> None:
    """The node is the checkout's, with engines without a model: its front end needs vLLM."""
    workload = ("--trace", "poisson", "--rate", "20", "--requests", "8", "--prompt-tokens", "5:40")
    with served_node(tmp_path, "--engines", "2") as node:
        replay = command(
            *(clean, tmp_path, "shoal", "replay", "--base-url", node.url, *workload),
            *("--output-tokens", "4:8", "--max-lag-ms", "60000", "--check-metrics"),
            *("--admin-url", node.admin_url, "--json", "run.json"),
        )
    assert (replay.returncode, replay.stderr) == (0, "")
    assert replay.stdout.count("agrees") >= 4
    assert "DIFFERS" not in replay.stdout
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["completed"], run["failed"]) == (8, 0)


@pytest.mark.parametrize("words", [("serve", "--fake-engine", "--port=0"), ("openapi", "public")])
def test_what_needs_vllm_says_in_one_line_what_to_install(
    clean: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = command(clean, tmp_path, "shoal", *words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("shoal: vLLM is not installed: ")
    assert "pip install 'shoal[cuda]'" in line
