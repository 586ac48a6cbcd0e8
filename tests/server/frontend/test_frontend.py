"""A front end before it serves."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from shoal.server.frontend import frontend
from shoal.server.frontend.frontend import Frontend


class NoConfigurationError(Exception):
    """What a front end without one ends with."""


def no_configuration(*args: object) -> NoReturn:
    raise NoConfigurationError


@pytest.mark.parametrize("option", ["tool_parser_plugin", "reasoning_parser_plugin"])
def test_it_loads_the_plugins_of_parsers_itself(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main process has, but a front end that is spawned knows nothing of that."""
    plugin = tmp_path / f"{option}.py"
    plugin.write_text("from pathlib import Path\n\nPath(__file__).with_suffix('.loaded').touch()\n")
    plugins = {"tool_parser_plugin": "", "reasoning_parser_plugin": ""} | {option: str(plugin)}
    monkeypatch.setattr(frontend, "take", no_configuration)
    config: Any = SimpleNamespace(api_servers=1, vllm=None, policy="manual")
    nothing: Any = None
    target = Frontend(config, 0, Namespace(**plugins), nothing, nothing, nothing)
    with pytest.raises(NoConfigurationError):
        target(lambda: None)
    assert plugin.with_suffix(".loaded").exists()


def test_its_level_of_vllms_log_may_have_small_letters() -> None:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "error"}
    command = [sys.executable, "-c", "from shoal.server.frontend import frontend"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
