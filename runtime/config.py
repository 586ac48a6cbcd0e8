"""What a node is started with, and where its processes find each other."""

from pathlib import Path
from typing import Any

import msgspec

from policies.cost_model import CostModel
from policies.partition import Group, degrees
from policies.snapshot import Target
from runtime.logs import LogFormat

AGING_SECONDS = 30.0
"""Wait in the task pool that makes up for one class of priority, unless it is set."""
INTERLEAVE_RATIO = 4
"""Steps of a group to one of a member's own where they interleave, unless it is set: new requests,
the urgent ones among them, are in the group."""
QUEUED_AHEAD = 1
"""Requests that a unit with a full batch is given beyond it. When the whole batch ends in one step,
the next step starts with this one, and not after a round trip to the controller."""


class FakeSettings(msgspec.Struct, frozen=True):
    """Settings of the fake engine (``engine/fake.py``)."""

    step_seconds: float = 0.0
    """Time of one step."""
    num_blocks: int = 1024
    block_tokens: int = 16
    max_num_seqs: int = 64
    max_model_len: int = 4096
    kv_heads: int = 8
    """Up to as many members of a group each hold a part of them: a block takes more tokens."""
    max_num_batched_tokens: int = 1 << 30
    """Tokens of one step: longer prompts are computed in several."""
    steps_at_once: int = 1
    """Steps that decode the same requests run as one of their total length, up to this many: for
    simulated time. Their tokens come together; whatever arrives ends the run at the next step."""


class NodeConfig(msgspec.Struct, frozen=True):
    """One Shoal node. Picklable: it is handed to every process."""

    engines: int
    max_group: int
    policy: str
    runtime_dir: str
    """Private directory of the node's sockets; removed when the node ends."""
    vllm_args: dict[str, Any]
    """Fields of vLLM's ``AsyncEngineArgs`` that the user set."""
    api_servers: int = 1
    fake: FakeSettings | None = None
    prepare_timeout_seconds: float = 10.0
    """How long a member may take to answer ``Prepare`` under hard preemption, and any other step
    of a switch under either treatment."""
    seed: int = 0
    cost_model: CostModel | None = None
    """Of the model on this node's engines, before anything was measured."""
    targets: tuple[Target, ...] = ()
    """What priority classes were promised, the most urgent first: for the policy ``slo``."""
    max_waiting_requests: int | None = None
    """Requests that may wait in the task pool; None: any number."""
    max_waiting_tokens: int | None = None
    """Prompt tokens that may wait in the task pool; None: any number."""
    aging_seconds: float = AGING_SECONDS
    """See ``controller.pool.TaskPool``."""
    interleave_ratio: int = INTERLEAVE_RATIO
    """See ``engine.turns.Turns``."""
    queued_ahead: int = QUEUED_AHEAD
    log_format: LogFormat = LogFormat.TEXT
    tracing: bool = False
    """Whether front ends trace requests and switches, and so are to be told their times."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Group sizes this node forms."""
        return degrees(self.max_group)


class Addresses:
    """The node's ZMQ endpoints: Unix sockets in the private runtime directory."""

    def __init__(self, runtime_dir: str | Path) -> None:
        self._dir = Path(runtime_dir)

    def _ipc(self, name: str) -> str:
        return f"ipc://{self._dir / name}"

    @property
    def engines(self) -> str:
        """Controller's ROUTER that the engines' DEALERs connect to (identity ``engine-<i>``)."""
        return self._ipc("engines")

    @property
    def control(self) -> str:
        """Controller's ROUTER for front ends (identity ``front-<i>``) and ``supervisor``."""
        return self._ipc("control")

    def front_input(self, index: int) -> str:
        """Front end's ROUTER that vLLM's ``AsyncMPClient`` binds; the controller connects."""
        return self._ipc(f"front-in-{index}")

    def front_output(self, index: int) -> str:
        """Front end's PULL that vLLM's ``AsyncMPClient`` binds; controller and engines push."""
        return self._ipc(f"front-out-{index}")

    def runner(self, engine: int) -> str:
        """A runner's own PULL: steps of its single unit, and ``Attach``."""
        return self._ipc(f"runner-{engine}")

    def group_runner(self, group: Group, engine: int) -> str:
        """A runner's PULL for the steps of one group."""
        return self._ipc(f"group-{'-'.join(map(str, group))}-{engine}")

    def queue(self, group: Group, engine: int) -> str:
        """The PULL that ``engine``'s runner reads for the unit ``group``: its own when alone."""
        return self.runner(engine) if len(group) == 1 else self.group_runner(group, engine)

    def responses(self, engine: int) -> str:
        """An engine's PULL for the results of every core it leads."""
        return self._ipc(f"responses-{engine}")
