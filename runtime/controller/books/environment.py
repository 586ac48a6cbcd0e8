"""What a controller is given, as all of its parts need it."""

from dataclasses import dataclass

from shoal.runtime.clock import Clock
from shoal.runtime.config import NodeConfig
from shoal.runtime.protocol.transport import ControllerTransport


@dataclass(frozen=True)
class Environment:
    """The node's configuration, the way to everybody, and the time.

    Attributes:
        config: the node.
        transport: the way to engines, front ends and the supervisor.
        clock: monotonic seconds; injected so that tests own it.
        wall: seconds since the epoch, for people to read.
    """

    config: NodeConfig
    transport: ControllerTransport
    clock: Clock
    wall: Clock
