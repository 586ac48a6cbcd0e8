"""A scheduler process whose leader chooses the mode of each step as the test says, at any time."""

import enum
import itertools
import random
from pathlib import Path
from typing import Any, ClassVar

from shoal.runtime.config import NodeConfig
from shoal.runtime.engine.agent.step_mode import Shift
from shoal.runtime.engine.scheduler import scheduled_steps, vllm_core
from shoal.runtime.engine.scheduler.vllm_backend import run_scheduler
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from shoal.runtime.protocol.messages import Mode


class Script(enum.StrEnum):
    """How the mode of the next steps is chosen."""

    TP = "tp"
    SP = "sp"
    ALTERNATE = "alternate"
    PREFILL = "prefill"
    """SP for steps that can only be prompts."""
    RANDOM = "random"


LARGEST_DECODE = 16
"""Tokens of a step that may be decodes alone: the nodes' ``max_num_seqs``."""


def _file(config: NodeConfig) -> Path:
    return Path(config.runtime_dir) / "script"


def set_script(config: NodeConfig, script: Script) -> None:
    """Let every leader of the node choose by ``script`` from its next step on."""
    new = _file(config).with_suffix(".new")
    new.write_text(script)
    new.replace(_file(config))


class ScriptedShift(Shift):
    """Chooses as the node's script says, above the floor."""

    file: ClassVar[Path]

    def __init__(self, *args: int | None, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self._turns = itertools.cycle((Mode.SP, Mode.TP))
        self._draw = random.Random(7)

    def mode(self, num_tokens: int, scheduler_output: Any = None) -> Mode:
        if self.floor is None or num_tokens <= self.floor:
            return Mode.TP
        match Script(self.file.read_text()):
            case Script.ALTERNATE:
                return next(self._turns)
            case Script.RANDOM:
                return self._draw.choice(list(Mode))
            case Script.PREFILL:
                return Mode.SP if num_tokens > LARGEST_DECODE else Mode.TP
            case script:
                return Mode(script)


def _ahead_file(config: NodeConfig, engine: int) -> Path:
    return Path(config.runtime_dir) / f"ahead-{engine}"


def steps_ahead(config: NodeConfig, engine: int) -> int:
    """Return how many steps an engine's cores scheduled ahead of an older one's outcome."""
    file = _ahead_file(config, engine)
    return file.stat().st_size if file.exists() else 0


def _count_ahead(file: Path) -> None:
    """Have small batches go ahead too, and add a byte to the file whenever one does."""
    scheduled_steps.AHEAD_REQUESTS = 2
    dispatch_ahead = VllmCore.dispatch_ahead

    def counted(core: VllmCore) -> bool:
        dispatched = dispatch_ahead(core)
        if dispatched:
            with file.open("ab") as counts:
                counts.write(b".")
        return dispatched

    VllmCore.dispatch_ahead = counted  # type: ignore[method-assign]


def run_scripted_scheduler(config: NodeConfig, engine: int, incarnation: int = 0) -> None:
    """Process entry: ``run_scheduler`` with a ``ScriptedShift``, and steps ahead counted."""
    ScriptedShift.file = _file(config)
    vllm_core.Shift = ScriptedShift
    _count_ahead(_ahead_file(config, engine))
    run_scheduler(config, engine, incarnation)
