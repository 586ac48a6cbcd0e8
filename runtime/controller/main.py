"""The controller as a process of the node."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

from shoal.policies.installed_policies import load_policies
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.controller.loop import Controller
from shoal.runtime.node.heartbeat import Heartbeat, heartbeat_path
from shoal.runtime.protocol.transport import ZmqControllerTransport

SWITCH_SECONDS = 0.0005
"""After so long the thread of studies (``Studies``) lets the loop go on. The loop waits for that
after each message that it reads or sends, by default for up to 5 ms."""


def run_controller(config: NodeConfig) -> None:
    """Run the controller's process."""
    load_policies(config.policy)
    heartbeat = Heartbeat(heartbeat_path(config.runtime_dir))
    addresses = Addresses(config.runtime_dir)
    transport = ZmqControllerTransport(addresses, config.api_servers, heartbeat.beat)
    sys.setswitchinterval(SWITCH_SECONDS)
    controller = Controller(config, transport, thread=ThreadPoolExecutor(1, "policy"))
    # To look through all that was loaded takes 5 ms, in which no message is read.
    gc.collect()
    gc.freeze()
    controller.run()
