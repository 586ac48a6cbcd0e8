"""What an engine tells the controller of the load of each of its units."""

import msgspec

from shoal.policies.values.batch import NO_PROMPTS, PromptWork
from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol.messages.values import NOTHING_DONE, Message, Mode, ModeWork


class Load(Message, frozen=True):
    """State of one unit of an engine; sent at the end of every turn of its loop that changed it."""

    engine: int
    unit: Unit
    running: int
    waiting: int
    free_blocks: int
    added: int
    """Requests for this unit, of ``AddRequest`` and ``Import``, that the engine has taken in since
    it started. The counts above include no later ones."""
    finished: list[str]
    """Requests that ended since the last report, for any reason except ``AbortRequests``."""
    work: dict[Mode, ModeWork] = msgspec.field(default_factory=dict)
    """What the steps of each mode computed since the unit started; modes without steps are left
    out."""
    begun: PromptWork = NO_PROMPTS
    """What no step has computed or computes of the prompts of running requests."""

    def done(self, mode: Mode) -> ModeWork:
        """Return what the steps of a mode computed."""
        return self.work.get(mode, NOTHING_DONE)

    @property
    def steps(self) -> int:
        """Steps that the unit has computed since it started."""
        return sum(done.total.steps for done in self.work.values())
