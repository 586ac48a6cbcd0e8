"""A status line for people who wait for a replay."""

import asyncio
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from shoal.loadgen.open_loop import Replay

REFRESH_SECONDS = 0.5


class StatusLine:
    """A progress bar and a line of figures in a terminal; without a terminal, nothing.

    Args:
        stream: where the line is shown.
        replay: the replay whose progress is shown.
    """

    def __init__(self, stream: TextIO, replay: Replay) -> None:
        self._console = Console(file=stream)
        self._replay = replay
        self._chunks = 0
        self._at = 0.0

    async def show(self) -> None:
        """Show the line until this is cancelled, and then remove it."""
        if not self._console.is_terminal:
            return
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
        run = self._replay.run_so_far
        with Progress(
            *columns, console=self._console, transient=True, auto_refresh=False
        ) as progress:
            task = progress.add_task("", total=run.planned)
            while True:
                progress.update(task, completed=len(run.exchanges), description=self.text())
                progress.refresh()
                await asyncio.sleep(REFRESH_SECONDS)

    def text(self) -> str:
        """Return the replay's progress, and the rate of chunks since the last call."""
        run, elapsed = self._replay.run_so_far, self._replay.elapsed
        chunks = sum(len(exchange.chunk_times) for exchange in run.exchanges)
        rate = (chunks - self._chunks) / max(elapsed - self._at, 1e-3)
        self._chunks, self._at = chunks, elapsed
        sent, running = len(run.exchanges), self._replay.running
        failed = sum(exchange.failed for exchange in run.exchanges)
        lag = 1000 * max((exchange.lag for exchange in run.exchanges), default=0.0)
        return (
            f"{elapsed:.0f} s  sent {sent}/{run.planned}  running {running}  "
            f"done {sent - running - failed}  failed {failed}  {rate:.0f} chunks/s  "
            f"sent up to {lag:.1f} ms late"
        )
