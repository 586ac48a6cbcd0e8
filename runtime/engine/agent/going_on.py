"""A core that goes on with requests of other units, until its first step with them is out."""

from collections.abc import Callable

from shoal.runtime.engine.agent.binding import Binding
from shoal.runtime.engine.agent.interface import Core
from shoal.runtime.engine.agent.stepping import Stepping


class GoingOn:
    """Follows the core that has gone on last in a switch.

    Args:
        binding: knows the core that has gone on, while it expects requests.
        stepping: counts the steps of each unit.
    """

    def __init__(self, binding: Binding, stepping: Stepping) -> None:
        self._binding = binding
        self._stepping = stepping
        self._begun: tuple[Core, int] | None = None
        """The core, and how many of its steps had ended when it had its requests."""

    @property
    def core(self) -> Core | None:
        """The core, if it has its requests, but no step with them has ended; None: there is none.

        Its requests stand still meanwhile, and so do the next tokens of all others there.
        """
        return None if self._begun is None else self._begun[0]

    def see(self, expects: Callable[[Core], bool]) -> None:
        """Take note of what has changed in a turn.

        Args:
            expects: whether requests are about to come to a core.
        """
        if self._begun is not None:
            core, before = self._begun
            has_stepped = not core.in_flight or self._stepping.ended(core.unit) > before
            # If a member has died, the group's step never ends, and the group is released.
            if has_stepped or core not in self._binding.serving:
                self._begun = None
        beginning = self._binding.beginning
        if beginning is not None and not expects(beginning.core):
            core = beginning.core
            self._begun = core, self._stepping.ended(core.unit)
            self._binding.beginning = None
