"""How much Python a call executes: what it costs by size, without a clock."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def bytecodes(action: Callable[[], object]) -> int:
    """Return the bytecode instructions that a call executes, in every frame that it opens.

    What C code does by itself (a whole list in one call) counts as one. No garbage is collected
    meanwhile: what it calls of other tests' objects would count, too.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
