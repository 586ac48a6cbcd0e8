"""Descriptors of memory that engines of a node keep, handed on over Unix sockets.

Each runner listens on a socket in the node's private directory, and hands out every descriptor that
it holds: those of its own memory and those of others'. Memory lives as long as anybody holds it. So
a runner that was restarted gets the memory back that its former process filled.
"""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

ANSWER_SECONDS = 5.0
"""How long a runner may take to answer; one that is stopped answers never."""
_HELD, _UNKNOWN = b"+", b"-"


class Descriptors:
    """The descriptors that one runner holds, by the engine whose memory it is.

    Args:
        directory: the node's private directory.
        engine: this runner's engine.
    """

    def __init__(self, directory: Path, engine: int) -> None:
        self._directory, self._held = directory, dict[int, int]()
        path = self._path(engine)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, name="descriptors", daemon=True).start()

    def hold(self, engine: int, file: int) -> None:
        """Hand out a descriptor of an engine's memory from now on."""
        self._held[engine] = file

    def ask(self, holder: int, engine: int) -> int | None:
        """Return a descriptor of an engine's memory that another runner holds, else None.

        Args:
            holder: the engine whose runner is asked.
            engine: whose memory it is.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            try:
                connection.connect(str(self._path(holder)))
                connection.sendall(bytes([engine]))
                _, files, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError:  # it has not started yet, or it has ended
                return None
        return files[0] if files else None

    def close(self) -> None:
        """Hand out nothing any more. Held descriptors are closed."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for file in self._held.values():
            os.close(file)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # A thread of its own: an asking process that is stopped holds up no other.
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_SECONDS)
        with connection, suppress(OSError):  # the asking process has ended
            self._answer_to(connection)

    def _answer_to(self, connection: socket.socket) -> None:
        asked = connection.recv(1)
        file = self._held.get(asked[0]) if asked else None
        if file is None:
            connection.sendall(_UNKNOWN)
        else:
            socket.send_fds(connection, [_HELD], [file])

    def _path(self, engine: int) -> Path:
        return self._directory / f"weights-{engine}"
