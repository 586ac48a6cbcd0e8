"""Whether a runner compiles a kernel: what it notes in a file, and its engines' agents look at.

Triton compiles a kernel when it is first needed for new shapes, in the midst of a step. That takes
seconds, in which the step looks as if it hung.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.runtime.clock import Clock

IDLE, BUSY = b"0", b"1"


def note_file(runtime_dir: str, engine: int) -> Path:
    """Return the file in which an engine's runner notes that it compiles."""
    return Path(runtime_dir) / f"compiling-{engine}"


class CompilationNotes:
    """Notes of one runner.

    Args:
        path: see ``note_file``. It is made anew: a former runner may have died while it compiled.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(IDLE)

    def follow(self, runtime: Any) -> None:
        """Note what Triton compiles from now on.

        Args:
            runtime: ``triton.knobs.runtime``, whose hooks go on to be called.
        """
        before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

        def begins(**what: Any) -> Any:
            self._path.write_bytes(BUSY)
            return before(**what) if before is not None else None

        def has_ended(**what: Any) -> Any:
            self._path.write_bytes(IDLE)
            return after(**what) if after is not None else None

        runtime.jit_cache_hook, runtime.jit_post_compile_hook = begins, has_ended


def compiled_lately(paths: Iterable[Path], seconds: float, wall: Clock = time.time) -> bool:
    """Return whether any runner compiles a kernel, or did so within so many seconds.

    Args:
        paths: the runners' files; those that are not there are ignored.
        seconds: for how long a compilation that has ended counts.
        wall: seconds since the epoch.
    """
    return any(_compiled_lately(path, seconds, wall) for path in paths)


def _compiled_lately(path: Path, seconds: float, wall: Clock) -> bool:
    try:
        return path.read_bytes() == BUSY or wall() - path.stat().st_mtime < seconds
    except OSError:
        return False
