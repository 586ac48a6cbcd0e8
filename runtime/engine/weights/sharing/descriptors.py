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
KV = 255
"""In place of an engine: the pieces of the runner's own KV buffer."""
_HELD, _END = b"+", b"."
"""What goes along with some descriptors, and what follows the last of them."""
_IN_A_MESSAGE = 253
"""The most descriptors that Linux passes in one message (``SCM_MAX_FD``)."""


class Descriptors:
    """The descriptors that one runner holds, by the engine whose memory it is.

    Args:
        directory: the node's private directory.
        engine: this runner's engine.
    """

    def __init__(self, directory: Path, engine: int) -> None:
        self._directory, self._held = directory, dict[int, tuple[int, ...]]()
        path = self._path(engine)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, name="descriptors", daemon=True).start()

    def hold(self, engine: int, *files: int) -> None:
        """Hand out descriptors of an engine's memory, or of ``KV``, from now on."""
        self._held[engine] = files

    def ask(self, holder: int, engine: int) -> int | None:
        """Return a descriptor of an engine's memory that another runner holds, else None.

        Args:
            holder: the engine whose runner is asked.
            engine: whose memory it is.
        """
        files = self.ask_all(holder, engine)
        return files[0] if files else None

    def ask_all(self, holder: int, engine: int) -> list[int]:
        """Return all descriptors that another runner holds of an engine's memory, or of ``KV``.

        The caller closes them. Of a runner that does not answer, or ends meanwhile, there are none.
        """
        files: list[int] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            try:
                connection.connect(str(self._path(holder)))
                connection.sendall(bytes([engine]))
                answer = b""
                while answer != _END:
                    answer, found, _, _ = socket.recv_fds(
                        connection, 1, _IN_A_MESSAGE, socket.MSG_CMSG_CLOEXEC
                    )
                    files += found
                    if not answer:
                        raise ConnectionResetError(f"the runner of engine {holder} has ended")
            except OSError:  # it has not started yet, or it has ended
                for file in files:
                    os.close(file)
                return []
        return files

    def close(self) -> None:
        """Hand out nothing any more. Held descriptors are closed."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for files in self._held.values():
            for file in files:
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
        files = self._held.get(asked[0], ()) if asked else ()
        for begin in range(0, len(files), _IN_A_MESSAGE):
            socket.send_fds(connection, [_HELD], files[begin : begin + _IN_A_MESSAGE])
        connection.sendall(_END)

    def _path(self, engine: int) -> Path:
        return self._directory / f"weights-{engine}"
