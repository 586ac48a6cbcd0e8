"""What is copied of KV in one go, and what copies it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from shoal.runtime.engine.kv.carry_plan import Numbers, Piece
from shoal.runtime.engine.kv.kv_memory import Mapped
from shoal.runtime.engine.kv.kv_pages import Side


class Portion(NamedTuple):
    """The pieces of one KV group, and what is needed to copy them."""

    group: int
    token_bytes: int
    """Of one token and head: key and value."""
    source: Side
    target: Side
    pieces: Sequence[tuple[Piece, Mapped]]
    """Each with the memory that it is read from."""
    memory: Mapped
    """What is written to."""

    @property
    def bytes(self) -> int:
        """Bytes that are copied."""
        each = len(self.source.layers) * self.token_bytes
        return sum(piece.tokens * piece.strip.heads * each for piece, _ in self.pieces)


class Copy(Protocol):
    """Copies KV on one device, from any thread."""

    def __call__(
        self, portions: Sequence[Portion], table: Numbers | None = None
    ) -> Callable[[], float]:
        """Begin to copy.

        Args:
            portions: what to copy.
            table: memory that the host and the device reach, for what the device is told. Until the
                copy has ended nobody else may use it. None: it is allocated, which may have to wait
                for other work of the device.

        Returns:
            Waits until the device has copied all; returns the seconds that took.
        """


class Copier(Protocol):
    """Copies KV between mapped buffers, the engine's own and others."""

    def after_steps(self, *, beside: bool) -> Copy:
        """Return what copies after all work that the device has been given up to now.

        Args:
            beside: whether work that the device is given later need not wait for it. Otherwise
                such work finds the KV, and only the thread that gives the device its work copies.
        """

    def at_once(self) -> Copy:
        """Return what copies without waiting for any work of the device."""

    def settle(self) -> None:
        """Wait until the device has copied all that it was told to, from any thread."""
