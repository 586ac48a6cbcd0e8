"""The pages name what there is: files, headings, options, targets of make."""

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.dockerfile import ROOT
from tests.deploy.shoal_help import COMMANDS, options

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "examples/*.md", "grafana/*.md")
    for path in ROOT.glob(pattern)
)
OTHERS = frozenset(
    {
        *("--build-arg", "--cache-from", "--shm-size"),  # Docker
        *("--cascade", "--set"),  # kubectl, Helm
        "--max-instance-failover-reroute-attempts",  # production-stack
        "--without",  # shoal.grafana.verify
        "--cap-add",  # Docker
        "--divide-weights",  # shoal.loadgen.bench.host_tier
    }
)
"""Options of other programs that the pages name by themselves."""

_FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
_COMMAND = re.compile(
    r"\b(?:shoal(?::\w+)? +|server\.cli +)(" + "|".join(map(re.escape, COMMANDS)) + r")\b(.*)"
)


def blocks(text: str) -> list[str]:
    """Return the blocks of code of a page, lines that go on joined."""
    found = [match[0] for match in _FENCE.finditer(text)] + _INDENTED.findall(_FENCE.sub("", text))
    return [re.sub(r"\\\n\s*", " ", block) for block in found]


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield every call of Shoal on a page: the command, and what it is given."""
    lines = [line for block in blocks(text) for line in block.splitlines()]
    for line in [*lines, *_CODE.findall(_FENCE.sub("", text))]:
        if match := _COMMAND.search(line):
            arguments = re.split(r"\s(?:\||&&|#|>)\s", match[2])[0]
            yield match[1], arguments


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    )


@functools.cache
def all_options() -> frozenset[str]:
    return OTHERS.union(*(options(command) for command in COMMANDS))


def test_the_pages_were_found() -> None:
    assert {"README.md", "docs/operations.md", "deploy/docker/README.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    text = _FENCE.sub("", here.read_text())
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (here.parent / name).resolve() if name else here
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_they_are_given(page: str) -> None:
    for command, arguments in commands((ROOT / page).read_text()):
        named = set(_OPTION.findall(arguments))
        # These hand what they do not know on to `shoal serve`.
        hands_on = command.startswith(("bench", "run-batch"))
        known = options(command) | (options("serve") if hands_on else set())
        # A workload of this one is given as `shoal replay` would be.
        known |= options("replay") if command == "bench traffic" else set()
        assert named <= known, f"shoal {command}: {named - known}"


@pytest.mark.parametrize("page", PAGES)
def test_options_that_are_named_exist(page: str) -> None:
    codes = _CODE.findall(_FENCE.sub("", (ROOT / page).read_text()))
    alone = [code for code in codes if code.startswith("--")]
    named = {option for code in alone for option in _OPTION.findall(code)}
    assert named <= all_options(), named - all_options()


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    code = [*_CODE.findall(text), *(line for block in blocks(text) for line in block.splitlines())]
    named = {match[1] for line in code if (match := re.match(r"\s*make ([a-z-]+)\b", line))}
    assert named <= made, named - made


def test_what_is_wrong_is_seen() -> None:
    page = "So:\n\n    shoal serve M --engines 2 \\\n        --enginess 4 | tee --append\n"
    assert list(commands(page)) == [("serve", " M --engines 2  --enginess 4")]
    assert "--enginess" not in all_options()
    assert {"--engines", "--trace"} <= all_options()
    assert anchors(ROOT / "docs" / "alerts.md") >= {"shoaldown", "alerts"}


def test_a_page_leads_from_nothing_to_kubernetes() -> None:
    """Every value that it sets is one of the chart, and the image is the one that it builds."""
    page = (ROOT / "docs" / "getting-started.md").read_text()
    (block,) = (b for b in blocks(page) if "helm install" in b)
    lines = [line.strip() for line in block.splitlines()]
    build, push, install = (
        next(shlex.split(line) for line in lines if line.startswith(verb))
        for verb in ("docker build", "docker push", "helm install")
    )
    image = build[build.index("-t") + 1]
    assert push[-1] == image
    assert (ROOT / build[build.index("-f") + 1]).is_file()
    chart = ROOT / install[3]
    values = yaml.safe_load((chart / "values.yaml").read_text())
    version = yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    given = dict(word.split("=") for word in install if "=" in word)
    assert image == f"{given['image.repository']}:{version}"
    for path in given:
        place = values
        for key in path.split("."):
            assert key in place, path
            place = place[key]
