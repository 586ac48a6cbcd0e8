"""How many lines are on their way to the node at once: about twice what it runs."""

LEAST = 16
"""Lines on their way to an idle node: with each look the window grows to twice what it runs."""


class SendingWindow:
    """The most lines that may be on their way.

    Lines that wait in the task pool keep units busy when others end; more would only take memory
    there. A node that refuses lines is full of other requests, so the window shrinks.

    Args:
        most_waiting: how many of the lines may wait.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._refused = False
        self.lines = min(LEAST, most_waiting)

    def see(self, running: int | None) -> None:
        """Take a look at the node; call this every second.

        Args:
            running: requests that it runs, of whomever; None: it could not be asked.
        """
        if self._refused or running is None:
            self.lines = max(1, self.lines // 2)
        else:
            wanted = running + max(LEAST, min(running, self._most_waiting))
            self.lines = min(wanted, 2 * self.lines)
        self._refused = False

    def refused(self) -> None:
        """Take note that the node has refused a line, or could not be reached."""
        self._refused = True
