"""HTTP requests with several engine requests: the task pool takes all of these, or none."""

from collections import deque
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from shoal.runtime.protocol.messages import Outcome

REFUSED_REMEMBERED = 256
"""Number of refused families to remember, because their last members may still be on the way."""


@dataclass(frozen=True)
class Refusal:
    """Why a request may not wait, and the HTTP status that its caller gets."""

    outcome: Outcome
    status: int
    message: str


@dataclass(eq=False)
class Family:
    """The engine requests of one HTTP request.

    Attributes:
        members: the ids of the requests that have come.
        started: whether a unit has had one of them, so that the response may have begun.
        refused: why the family is refused, if it is.
    """

    members: list[str] = field(default_factory=list)
    started: bool = False
    refused: Refusal | None = None


class Families:
    """The families that have a request on the node, and those that were refused lately.

    A family is forgotten with the last of its requests; no message has to end it.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[int, int], Family] = WeakValueDictionary()
        self._refused: deque[Family] = deque(maxlen=REFUSED_REMEMBERED)

    def join(self, client: int, number: int | None, request_id: str) -> Family | None:
        """Return the family that a request belongs to, and count the request in.

        Args:
            client: number of the front end.
            number: the front end's number for the family; None: the request has no family.
            request_id: the request.
        """
        if number is None:
            return None
        family = self._known.setdefault((client, number), Family())
        family.members.append(request_id)
        return family

    def refuse(self, family: Family | None, refusal: Refusal) -> None:
        """Refuse the members of a family that are still to come."""
        if family is not None:
            family.refused = refusal
            self._refused.append(family)
