"""The command that ``docs/replay.md`` gives for ``vllm bench serve``."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.server.node import served_node

ROOT = Path(__file__).parents[2]


def documented() -> list[str]:
    """Return the command's words."""
    text = (ROOT / "docs" / "replay.md").read_text()
    section = text.partition("## `vllm bench serve` itself")[2].partition("\n## ")[0]
    (block,) = re.findall(r"(?m)(?:^    .*\n)+", section)
    return shlex.split(dedent(block).replace("\\\n", ""))


def test_it_measures_a_node(tmp_path_factory: pytest.TempPathFactory) -> None:
    python, *words = documented()
    assert python == ".venv/bin/python"
    with served_node(tmp_path_factory.mktemp("c")) as node:
        words[words.index("http://127.0.0.1:8000")] = node.url
        words[words.index("--num-prompts") + 1] = "3"
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Successful requests: +3\b", done.stdout)
    assert re.search(r"Total generated tokens: +48\b", done.stdout)
