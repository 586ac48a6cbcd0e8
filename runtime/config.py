"""What a node is started with, and where its processes find each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.shift import DEFAULT_THRESHOLD, ShiftThreshold
from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import Layout, Unit, layouts_up_to
from shoal.policies.values.partition import units_of
from shoal.policies.values.snapshot import Target
from shoal.runtime.logs import LogFormat

AGING_SECONDS = 30.0
"""Wait in the task pool that makes up for one class of priority, unless it is set."""
ENGINE_COUNTS = (1, 2, 4, 8)
"""How many engines a node may have, and a group of them."""
INTERLEAVE_RATIO = 4
"""Steps of a group to one of a member's own where they interleave, unless it is set: new requests,
the urgent ones among them, are in the group."""
MAX_RETRIES = 2
"""Engine deaths that a request survives, unless it is set."""
MAX_WAITING_REQUESTS = 4096
"""Requests that may wait in a served node's task pool, unless it is set: with the next, what bounds
the memory of a node that is asked for too much."""
MAX_WAITING_TOKENS = 16_000_000
"""Prompt tokens that may, unless it is set: some 50 bytes each, most of them in the front end."""
OUTAGE_LIMIT_SECONDS = 60.0
"""How long requests wait on a served node while no engine serves, unless it is set."""
PAUSE_LIMIT_SECONDS = 600.0
"""How long a paused request that cannot be moved waits for its unit, unless it is set."""
RESTART_LIMIT = 5
"""Restarts of one engine within ``restarts.WINDOW_SECONDS`` on a served node, unless it is set."""
RESTART_BACKOFF_SECONDS = 1.0
"""Pause before an engine's first restart, unless it is set."""
SWITCH_WAIT_SECONDS = 2.0
"""How long a policy's switch waits for requests to end, unless it is set."""
QUEUED_AHEAD = 1
"""Requests that a unit with a full batch is given beyond it. When the whole batch ends in one step,
the next step starts with this one, and not after a round trip to the controller."""


class FakeSettings(msgspec.Struct, frozen=True):
    """Settings of the fake engine (``fake_backend.py``)."""

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
    captured_tokens: int = 0
    """Tokens of the largest CUDA graph, had it any: steps in SP batch more."""
    failing_starts: int = 0
    """Restarts of each engine that fail, from the first on."""
    poison_token: int | None = None
    """Damage on purpose: an engine dies of a step that computes a prompt with this token."""
    steps_at_once: int = 1
    """Steps that decode the same requests run as one of their total length, up to this many: for
    simulated time. Their tokens come together; whatever arrives ends the run at the next step."""
    layers: int = 8
    """Up to as many stages of a unit each hold a part of them: a block takes more tokens."""

    @property
    def kv_geometry(self) -> KvGeometry:
        """What a block holds in each layout."""
        return KvGeometry(self.layers, self.kv_heads, self.block_tokens)


Facts = Mapping[str, str]
"""What a configuration of vLLM says, as text, by the path of the field."""


@dataclass(frozen=True)
class LayoutConfigs:
    """vLLM's configuration of every layout, as the main process made it (``layout_configs.py``).

    Picklable, and here so that who is handed it needs no vLLM: the controller, for one.
    """

    pickled: Mapping[Layout, bytes]
    """The ``VllmConfig`` of every layout."""
    facts: Mapping[Layout, Facts] = field(default_factory=dict)
    """What each said where it was made."""
    log_stats: bool = True
    takes_what_fits: bool = False
    """Whether the user left the length of requests to the memory (``--max-model-len -1``)."""
    asynchronous_on_cpu: bool = False
    """Whether the user asked for asynchronous scheduling, which vLLM turns off on a CPU."""
    sizes_are_chosen: bool = False
    """Whether the user chose what sizes of CUDA graphs are captured, and so bounds what they take:
    no others are captured then."""


class NodeConfig(msgspec.Struct, frozen=True):
    """One Shoal node. Picklable: it is handed to every process."""

    engines: int
    max_group: int
    policy: str
    runtime_dir: str
    """Private directory of the node's sockets; removed when the node ends."""
    vllm: Any = None
    """vLLM's configuration of every layout, ``LayoutConfigs``; None without it."""
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
    """See ``TaskPool``."""
    interleave_ratio: int = INTERLEAVE_RATIO
    """See ``engine.turns.Turns``."""
    max_sp: int = 1
    """Largest sequence-parallel degree: a group of ``p`` may run a step in SP of ``min(p, max_sp)``
    combined with TP. 1: steps are never run in SP."""
    shift_threshold: ShiftThreshold = DEFAULT_THRESHOLD
    """Which steps are."""
    queued_ahead: int = QUEUED_AHEAD
    switch_wait_seconds: float = SWITCH_WAIT_SECONDS
    """How long a switch that the policy asked for waits for requests to end, before it goes on
    without waiting (``controller.switch``)."""
    pause_limit_seconds: float = PAUSE_LIMIT_SECONDS
    """See ``controller.pauses.Pauses``."""
    max_retries: int = MAX_RETRIES
    """How often a request is begun again because an engine died that had it in its batch."""
    engine_timeout_seconds: float | None = None
    """How long an engine's loop may be silent before the engine counts as dead; None: for ever."""
    controller_timeout_seconds: float | None = None
    """How long the controller's loop may be silent before front ends refuse what needs it, and a
    third of how long before the node ends; None: for ever."""
    outage_limit_seconds: float | None = None
    """See ``controller.outage.Outage``; None: requests wait for ever."""
    step_timeout_seconds: float | None = None
    """See ``engine.watchdog.StepWatch``; None: steps may take for ever."""
    restart_limit: int = 0
    """How often an engine that dies is restarted within ``restarts.WINDOW_SECONDS``; 0: never."""
    restart_backoff_seconds: float = RESTART_BACKOFF_SECONDS
    """Pause before the first restart; each further one is twice as long."""
    recording_dir: str | None = None
    """Where runners record binds, and what their devices do while a benchmark asks for it
    (``recording.py``). One that writes a recording takes no step, so none counts as hung. None:
    nothing is."""
    log_format: LogFormat = LogFormat.TEXT
    tracing: bool = False
    """Whether front ends trace requests and switches, and so are to be told their times."""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that this node forms, narrowest first."""
        return layouts_up_to(self.max_group)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every unit that this node forms, of narrow layouts first."""
        return tuple(unit for each in self.layouts for unit in units_of(self.engines, each))


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

    def queue(self, unit: Unit, engine: int, generation: int = 0) -> str:
        """The PULL that a member's runner reads for a unit, which was made so many times before.

        Alone it reads its own.
        """
        if not unit.is_group:
            return self.runner(engine)
        members = "-".join(map(str, unit.engines))
        return self._ipc(f"group-{unit.name}-{members}-{engine}.{generation}")

    def responses(self, engine: int) -> str:
        """An engine's PULL for the results of every core it leads."""
        return self._ipc(f"responses-{engine}")
