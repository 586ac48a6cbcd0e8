"""The KV buffers of a node's other engines, as one engine's runner has them mapped.

Each runner announces its buffer in a file of the node's private directory. An engine that was
restarted replaces its file. All others unmap the memory of a runner that has ended at once, because
it stays allocated while anybody has it mapped, and the restarted runner needs room.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.runtime.clock import Clock
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.kv.kv_memory import KvMemory, Mapped

POLL_SECONDS = 0.05
"""Time between two looks for the announcement of a peer that is still starting."""


class _Peer(NamedTuple):
    buffer: Mapped
    announced: tuple[int, int]
    """The file from which it was mapped: number and time."""


class PeerBuffers:
    """The KV buffers of a node's engines.

    Args:
        directory: the node's private directory.
        engine: this runner's engine.
        memory: how buffers are shared.
        settle: waits until nothing reads mapped memory any more; called from another thread.
        name: of the files in which buffers of this kind are announced.
    """

    def __init__(
        self,
        directory: Path,
        engine: int,
        memory: KvMemory,
        settle: Callable[[], None] = lambda: None,
        name: str = "kv",
    ) -> None:
        self._name = name
        self._directory, self._engine, self._memory = directory, engine, memory
        self._settle = settle
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.RLock()

    def announce(self, buffer: torch.Tensor) -> None:
        """Let other engines map this engine's buffer.

        Raises:
            NotSharedError: they cannot. They are told why.
        """
        told = {"pid": os.getpid(), "refused": ""}
        try:
            told |= self._memory.handle(buffer)
        except NotSharedError as error:
            told["refused"] = str(error)
            raise
        finally:
            path = self._file(self._engine)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(told))
            new.replace(path)

    def open_all(
        self,
        engines: int,
        seconds: float,
        clock: Clock = time.monotonic,
        reaches: Callable[[int], bool] = lambda _: True,
    ) -> dict[int, str]:
        """Map the buffers of all other engines.

        A peer that has ended says nothing about the node: its successor will map this buffer.

        Args:
            engines: number of the node's engines.
            seconds: how long to wait for engines that have announced nothing yet.
            clock: a monotonic clock.
            reaches: whether this engine's device can read an engine's memory.

        Returns:
            The engines whose buffers cannot be read, each with the reason in one line.
        """
        deadline, problems = clock() + seconds, dict[int, str]()
        for peer in set(range(engines)) - {self._engine}:
            while not self._file(peer).exists() and clock() <= deadline:
                time.sleep(POLL_SECONDS)
            if not self._file(peer).exists():
                problems[peer] = f"engine {peer} has not announced its KV cache"
            elif not reaches(peer):
                problems[peer] = f"engine {self._engine} cannot read the memory of engine {peer}"
            elif problem := self._problem(peer):
                problems[peer] = problem
        return {peer: problem for peer, problem in problems.items() if self._may_live(peer)}

    def _problem(self, peer: int) -> str:
        try:
            with self.reading():
                self.buffer(peer)
        except NotSharedError as error:
            return str(error)
        return ""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While active, no buffer is unmapped."""
        with self._lock:
            yield

    def buffer(self, engine: int) -> Mapped:
        """Return the buffer of another engine; only while ``reading``.

        Raises:
            NotSharedError: it cannot be mapped, for instance because that engine's runner ended.
        """
        path = self._file(engine)
        try:
            status = path.stat()
        except FileNotFoundError as error:
            raise NotSharedError(f"engine {engine} has not announced its KV cache") from error
        announced = (status.st_ino, status.st_mtime_ns)
        peer = self._peers.get(engine)
        if peer is None or peer.announced != announced:
            self._drop(engine)
            peer = self._open(engine, announced)
        return peer.buffer

    def _open(self, engine: int, announced: tuple[int, int]) -> _Peer:
        told = json.loads(self._file(engine).read_text())
        if told["refused"]:
            raise NotSharedError(told["refused"])
        try:
            process = os.pidfd_open(told["pid"])
        except OSError as error:
            raise NotSharedError(f"the runner of engine {engine} has ended") from error
        try:
            peer = _Peer(self._memory.open(told["pid"], told), announced)
        except NotSharedError:
            os.close(process)
            raise
        self._peers[engine] = peer
        watch = threading.Thread(target=self._watch, args=(engine, peer, process), daemon=True)
        watch.start()
        return peer

    def _watch(self, engine: int, peer: _Peer, process: int) -> None:
        """Unmap a peer's buffer once its process has ended."""
        wait([process])
        os.close(process)
        with self._lock:
            if self._peers.get(engine) is peer:
                self._drop(engine)

    def _drop(self, engine: int) -> None:
        peer = self._peers.pop(engine, None)
        if peer is not None:
            self._settle()
            peer.buffer.close()

    def _may_live(self, engine: int) -> bool:
        """Return whether a peer's process is there, or has announced nothing yet."""
        if not self._file(engine).exists():
            return True
        told = json.loads(self._file(engine).read_text())
        try:
            process = os.pidfd_open(told["pid"])
        except OSError:
            return False
        ended = wait([process], 0)
        os.close(process)
        return not ended

    def _file(self, engine: int) -> Path:
        return self._directory / f"{self._name}-{engine}"
