"""Writes to a V2 model runner's tables before its layout goes on.

A layout that is about to go on has no step in flight, so nothing reads its tables, and it can write
by now most of what its first step would write: the tokens and the blocks of requests that are
seated. For 64 requests of 1,024 tokens that takes the host about a millisecond, and the device gets
their first step so much later.
"""

from typing import Any

import torch
from vllm.platforms import current_platform


class WritingAhead:
    """Writes for one layout, on a stream of its own: the other layout's steps are long.

    vLLM has buffers for the writes of two steps. So no write begins here before the layout's last
    step and the last write here have ended, and no step begins before the last write has. From the
    layout's first step on nothing is written here until the layout is left again.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._left: torch.cuda.Event | None = None
        """When the layout's last step ends; None: it ran none, or steps end when they return."""
        self._written: torch.cuda.Event | None = None
        """When the last write here ends; None: it has."""
        self._runs = False
        """Whether the layout has run a step since it was left."""

    def leave(self) -> None:
        """Take note that another layout runs from now on."""
        self._runs = False
        if current_platform.is_cuda():
            self._left = torch.cuda.Event()
            self._left.record()

    @property
    def is_possible(self) -> bool:
        """Whether it is possible to write now: the layout is about to go on, but has not yet."""
        if self._runs:
            return False
        return all(event is None or event.query() for event in (self._left, self._written))

    def write(self, model_runner: Any) -> bool:
        """Write all that is staged, if that is possible now; return whether it was.

        Args:
            model_runner: the layout's.
        """
        if not self.is_possible:
            return False
        if self._stream is None and current_platform.is_cuda():
            self._stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            model_runner.req_states.apply_staged_writes()
            model_runner.block_tables.apply_staged_writes()
            if self._stream is not None:
                self._written = torch.cuda.Event()
                self._written.record()
        return True

    def join(self) -> None:
        """Wait until all is written. Call it before the layout's tables are read or written."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None

    def go_on(self) -> None:
        """Do the same before the layout runs a step; nothing is written here until it is left."""
        self.join()
        self._runs = True
