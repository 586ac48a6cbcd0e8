"""What the commands' own help says there is, as their users read it."""

import functools
import re
import subprocess
import sys

_COMMANDS = {
    "serve": ("serve", "--help=all"),
    "simulate": ("simulate", "--help"),
    "replay": ("replay", "--help"),
    "report": ("report", "--help"),
    "bench switch": ("bench", "switch", "--help"),
    "bench steps": ("bench", "steps", "--help"),
    "bench gpu": ("bench", "gpu", "--help"),
    "bench serve-compare": ("bench", "serve-compare", "--help"),
}
COMMANDS = tuple(_COMMANDS)


@functools.cache
def options(command: str) -> frozenset[str]:
    """Return the long options of ``shoal COMMAND``."""
    shown = subprocess.run(
        [sys.executable, "-m", "server.cli", *_COMMANDS[command]],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", shown))
    assert "--help" in found
    return found
