"""A status line for people who wait for a replay."""

import asyncio
from typing import TextIO

from loadgen.replay import Replay

REFRESH_SECONDS = 0.5
_CLEAR_LINE = "\r\x1b[2K"


class StatusLine:
    """One line of a terminal that is written anew again and again; nothing anywhere else."""

    def __init__(self, stream: TextIO, replay: Replay) -> None:
        self._stream = stream
        self._replay = replay
        self._chunks = 0
        self._at = 0.0

    async def show(self) -> None:
        """Show the line until this is cancelled."""
        if not self._stream.isatty():
            return
        try:
            while True:
                self._write(_CLEAR_LINE + self.text())
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            self._write(_CLEAR_LINE)

    def text(self) -> str:
        """Return what is happening, and since the last call how fast chunks have come."""
        run, elapsed = self._replay.run_so_far, self._replay.elapsed
        chunks = sum(len(exchange.chunk_times) for exchange in run.exchanges)
        rate = (chunks - self._chunks) / max(elapsed - self._at, 1e-3)
        self._chunks, self._at = chunks, elapsed
        sent, running = len(run.exchanges), self._replay.running
        failed = sum(exchange.failed for exchange in run.exchanges)
        lag = 1000 * max((exchange.lag for exchange in run.exchanges), default=0.0)
        return (
            f"{elapsed:6.0f} s  sent {sent}/{run.planned}  running {running}  "
            f"done {sent - running - failed}  failed {failed}  {rate:.0f} chunks/s  "
            f"latest {lag:.1f} ms"
        )

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
