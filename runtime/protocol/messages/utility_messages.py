"""Messages about vLLM's utility calls; ``engine.py`` has the unions that they belong to."""

from shoal.runtime.protocol.messages.values import Message


class Utility(Message, frozen=True):
    """Run a vLLM utility call (``EngineCoreRequestType.UTILITY``); raw frames follow.

    If ``call`` is the controller's number of the call, answer ``UtilityDone``.
    """

    call: int | None


class UtilityDone(Message, frozen=True):
    """Answer to ``Utility``: vLLM's encoded ``EngineCoreOutputs``, for the front end."""

    call: int
    engine: int
    frames: list[bytes]
