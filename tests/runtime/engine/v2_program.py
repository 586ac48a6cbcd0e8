"""Runs programs with the V2 model runner on CPUs, by Triton's interpreter.

They are forked from one process that has imported vLLM the interpreter's way, and so are their
engines.
"""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from tests import preloaded

FIRST = ("tests.runtime.engine.triton_interpreter",)
"""What has to be imported before vLLM."""
ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
LONGEST_SECONDS = 24 * 3600.0


def run(module: str, directory: Path, *arguments: Any) -> dict[str, Any]:
    """Return what ``main(directory, *arguments)`` of a module returns, through JSON."""
    path = directory / "result.json"
    with preloaded.Process(
        f"{__name__}:write",
        [module, str(path), str(directory), *arguments],
        os.environ | ENVIRONMENT,
        FIRST,
    ) as process:
        output, _ = process.communicate(LONGEST_SECONDS)
    assert process.returncode == 0, output[-4000:]
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(module: str, path: str, directory: str, *arguments: Any) -> int:
    """Be the program: write what it returns."""
    found = import_module(module).main(Path(directory), *arguments)
    Path(path).write_text(json.dumps(found))
    return 0
