"""What runners were told before a scheduler's books said it.

Books take longer than the message that follows from them, and requests stand still until runners
have that message. So where it is known what the books will say, it is sent first. When they say it,
it is not sent again. What was sent cannot be taken back, so an engine cannot go on if its books say
anything else.
"""

from collections import deque
from typing import Any


class SentWronglyError(Exception):
    """Runners were told something that the books do not say."""


class SentAhead:
    """What was sent and not yet said, in order."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Any, Any]] = deque()

    def note(self, told: Any, answer: Any) -> None:
        """Take note of what runners were told, and of what is to be known of their answer."""
        self._sent.append((told, answer))

    def take(self, said: Any) -> Any:
        """Return what is known of the answer to what the books say now; None: it was not sent.

        Raises:
            SentWronglyError: something else was sent.
        """
        if not self._sent:
            return None
        told, answer = self._sent.popleft()
        if told != said:
            raise SentWronglyError("runners were told of another copy or step than there is")
        return answer
