"""What the commands' own help says there is, as their users read it."""

import functools
import os
import re

from shoal.server.commands.bench import BENCHMARKS
from tests.server.node import run_shoal

_COMMANDS = {
    "serve": ("serve", "--help=all"),
    "simulate": ("simulate", "--help"),
    "replay": ("replay", "--help"),
    "report": ("report", "--help"),
    "run-batch": ("run-batch", "--help"),
    "openapi": ("openapi", "--help"),
    **{f"bench {name}": ("bench", name, "--help") for name in BENCHMARKS},
}
COMMANDS = tuple(_COMMANDS)


@functools.cache
def options(command: str) -> frozenset[str]:
    """Return the long options of ``shoal COMMAND``."""
    process = run_shoal(list(_COMMANDS[command]), dict(os.environ))
    shown, _ = process.communicate(timeout=240)
    assert process.returncode == 0, shown
    found = frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", shown))
    assert "--help" in found
    return found
