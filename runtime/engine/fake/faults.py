"""Damage on purpose, which this project's checks must notice."""

import enum

import msgspec

from shoal.runtime.engine.agent.interface import RunnerDied


class Seam(enum.Enum):
    """Where a fault can strike: what the agent calls for each message of a switch or a carry."""

    LEND = "lend"
    ATTACH = "attach"
    BIND = "bind"
    RELEASE = "release"
    TAKE_BACK = "take_back"
    ANNOUNCE = "announce"
    EXPORT = "export"
    ALLOT = "allot"
    ADOPT = "adopt"
    COPY = "copy"
    DROP = "drop"
    KEEP = "keep"
    PIN = "pin"
    UNPIN = "unpin"
    RESERVE = "reserve"
    SETTLE = "settle"
    COPY_AHEAD = "copy_ahead"
    CLOSE = "close"
    FILL = "fill"
    USE = "use"
    OPEN = "open"


class Faults(msgspec.Struct, frozen=True):
    """What is wrong with one fake engine."""

    die_at: Seam | None = None
    """Raise ``RunnerDied`` at this seam."""
    double_lend: bool = False
    """Lend blocks that are lent already."""
    drop_block: bool = False
    """Lose one of the blocks that are taken back."""
    fail_form: bool = False
    """Do not make this engine's part of a group that is formed anew."""
    keep_blocks: bool = False
    """Say that all blocks are given up that are to be, but go on to use them."""
    wrong_copy: bool = False
    """Copy weights that differ from what peers keep."""
    repeat_token: bool = False
    """Emit the second token of every request twice."""
    lose_token: bool = False
    """Leave the last output token out of every request that is exported."""
    wrong_block: bool = False
    """Say of every request that is exported that another block holds its last tokens."""

    def strike(self, seam: Seam) -> None:
        """Die if this is the seam at which the engine has to die.

        Raises:
            RunnerDied: it is that seam.
        """
        if self.die_at is seam:
            raise RunnerDied(f"died in {seam.value} on purpose")


NO_FAULTS = Faults()
