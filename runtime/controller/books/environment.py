"""What a controller is given, and hands to all of its parts."""

from dataclasses import dataclass

from shoal.runtime.clock import Clock
from shoal.runtime.config import NodeConfig
from shoal.runtime.protocol.transport import ControllerTransport


@dataclass(frozen=True)
class Environment:
    """The node's configuration, the transport to all processes, and the time.

    Attributes:
        config: the node.
        transport: carries messages to and from engines, front ends and the supervisor.
        clock: monotonic seconds; injected so that tests control it.
        wall: seconds since the epoch, for people to read.
    """

    config: NodeConfig
    transport: ControllerTransport
    clock: Clock
    wall: Clock
