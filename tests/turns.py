"""How often the event loop has looked after other tasks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Turns:
    """Turns of a task that does nothing else."""

    count: int = 0


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Turns]:
    """Count the turns that another task has within the context."""
    turns = Turns()

    async def other() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    try:
        yield turns
    finally:
        task.cancel()
