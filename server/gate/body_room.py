"""How many bytes of bodies a front end keeps at once.

A body is kept, and what is made of it, until its response ends. One body has a limit of its own,
and a front end has room for many of them, but not for as many as there may be connections.
"""


class BodyRoom:
    """Counts the bytes of the bodies that are read, or whose requests are in progress.

    Args:
        most_bytes: as many as they may have together.

    Attributes:
        taken: as many as they have.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.taken = 0

    def take(self, size: int) -> None:
        """Count bytes that have come.

        Raises:
            NoBodyRoomError: there is no room for them. They are counted all the same.
        """
        self.taken += size
        if self.taken > self.most_bytes:
            raise NoBodyRoomError(
                f"the front end is full: the bodies of its requests may have {self.most_bytes} "
                "bytes together"
            )

    def give_back(self, size: int) -> None:
        """Count bytes that are not kept any more."""
        self.taken -= size


class NoBodyRoomError(Exception):
    """A front end has no room for a body; the message says why."""
