"""Dockerfiles, read far enough to check what they promise."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
KINDS = ("cpu", "cuda")

_DIGEST = re.compile(r"@sha256:([0-9a-f]{64})$")


@dataclass
class Stage:
    """One stage: its base, and its instructions in order, as (name, rest of the line)."""

    base: str
    name: str | None
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        """Return what follows every such instruction."""
        return [rest for name, rest in self.steps if name == instruction]

    def last(self, instruction: str) -> str:
        """Return what follows the last such instruction, the one that counts."""
        return self.all(instruction)[-1]

    def argv(self, instruction: str) -> list[str]:
        """Return the arguments of an instruction in exec form; any other form is an error."""
        return list(json.loads(self.last(instruction)))

    @property
    def environment(self) -> dict[str, str]:
        """What ENV sets."""
        pairs = (pair.partition("=") for rest in self.all("ENV") for pair in rest.split())
        return {name: value for name, _, value in pairs}


@dataclass(frozen=True)
class Dockerfile:
    """A Dockerfile: the arguments it may be built with, and its stages."""

    arguments: dict[str, str]
    stages: list[Stage]

    def stage(self, name: str) -> Stage:
        """Return the stage of this name."""
        (found,) = (stage for stage in self.stages if stage.name == name)
        return found

    @property
    def image(self) -> Stage:
        """The stage that becomes the image."""
        return self.stages[-1]


def read_dockerfile(kind: str) -> Dockerfile:
    """Read ``deploy/docker/Dockerfile.KIND``."""
    text = re.sub(r"^#.*\n", "", (FOLDER / f"Dockerfile.{kind}").read_text(), flags=re.MULTILINE)
    found = Dockerfile({}, [])
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        name, _, rest = line.partition(" ")
        if name == "ARG":
            argument, _, default = rest.partition("=")
            found.arguments[argument] = default
        if name == "ARG" and not found.stages:
            continue
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            found.stages.append(Stage(base, stage or None))
        elif name:
            found.stages[-1].steps.append((name, rest))
    return found


def is_pinned(image: str) -> bool:
    """Return whether an image has a tag and a digest that could be one.

    A digest is as good as random: of 64 digits hardly ever are fewer than eight different, or five
    in a row equal, and it does not repeat itself. What somebody made up to fill the place does.
    """
    digest = _DIGEST.search(image)
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    if digest is None or tag in ("", "latest"):
        return False
    digits = digest[1]
    return (
        len(set(digits)) >= 8
        and re.search(r"(.)\1{4}", digits) is None
        and re.search(r"(.{4,})\1", digits) is None
        and not any(run in digits * 2 for run in ("01234567", "abcdef01", "deadbeef", "cafebabe"))
    )
