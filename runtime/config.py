"""What a node is started with, and where its processes find each other."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.policies.cost.cost_model import CostModel
from shoal.policies.shift import DEFAULT_THRESHOLD, ShiftThreshold
from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import DP, Layout, Unit, layouts_up_to
from shoal.policies.values.partition import units_of
from shoal.policies.values.snapshot import Target
from shoal.runtime.logs import LogFormat
from shoal.runtime.whole_experts import WholeExperts

AGING_SECONDS = 30.0
"""Default wait in the task pool that makes up for one class of priority."""
BACKGROUND_PRIORITY = 100
"""Requests of this priority, the least urgent one, run only where no other request needs the unit.
"""
ENGINE_COUNTS = (1, 2, 4, 8)
"""How many engines a node may have, and a group of them."""
MAX_RETRIES = 2
"""Default number of engine deaths that a request survives."""
MAX_WAITING_REQUESTS = 4096
"""Default number of requests that may wait in a served node's task pool. This limit and the next
one bound the memory of an overloaded node."""
MAX_WAITING_TOKENS = 16_000_000
"""Default number of prompt tokens that may wait: some 50 bytes each, mostly in the front end."""
MAX_HELD_BYTES = 8 << 30
"""Default number of bytes that all requests on a served node may have together."""
OUTAGE_LIMIT_SECONDS = 60.0
"""Default time that requests wait on a served node while no engine serves."""
RESTART_LIMIT = 5
"""Default number of restarts of one engine within ``restarts.WINDOW_SECONDS`` on a served node."""
RESTART_BACKOFF_SECONDS = 1.0
"""Default pause before an engine's first restart."""
SWITCH_WAIT_SECONDS = 2.0
"""Default time that a policy's switch waits for requests to end."""
MIXED_STEP_TOKENS = 0
"""Users' default of ``NodeConfig.mixed_step_tokens``. With 2,048 the mean request takes less time
in the simulator. But on two H200s first tokens came 39 % later than stock DP's, and with 0 they
came 1 % earlier."""
FULL_GRAPH_TOKENS = 1024
"""Users' default of ``NodeConfig.full_graph_tokens``. Without a graph, a step of so many tokens of
the 8B Llama shape takes one H100 as long as its host."""
EXPERTS_FULL_GRAPH_TOKENS = 8192
"""The same for models with experts: their layers launch more kernels. Without a graph, 8,192 tokens
of Qwen3-30B-A3B in FP8 take two H200s about as long as their host."""
PRECOPY_TOKENS = 8192
"""Default number of tokens from which on running requests are copied ahead of a switch. Copying
less takes less time than the messages that it needs."""
PEER_BYTES_PER_SECOND = 390e9
"""Rate at which an H200 reads the memory of another one over NVLink."""
TIER_BYTES_PER_SECOND = 24e9
"""Rate at which a GPU reads and writes pinned memory of the host over PCIe 4 with 16 lanes."""
QUEUED_AHEAD = 1
"""Requests that a unit gets beyond its full batch. When the whole batch ends in one step, the
unit's next step starts at once with these, without a round trip to the controller."""


class CarryPath(enum.StrEnum):
    """How KV goes from engine to engine."""

    AUTO = "auto"
    """Straight, where an engine's device can read the memory of the other one; otherwise as
    ``HOST``."""
    HOST = "host"
    """Through memory of the host."""


class FakeSettings(msgspec.Struct, frozen=True):
    """Settings of the fake engine (``fake_backend.py``)."""

    step_seconds: float = 0.0
    """Time of one step."""
    num_blocks: int = 1024
    block_tokens: int = 16
    whole_blocks: int = 0
    """Blocks that are left when an engine has whole weights instead of sharing them; 0: it
    cannot."""
    stage_blocks: dict[int, int] = {}
    """The same if it has the layers of its stage whole, by the stages of the pipeline (``Level``).
    It cannot have those that are not named."""
    fill_seconds: float = 0.0
    """Time in which an engine copies what its peers keep of all weights, beside its steps."""
    use_seconds: float = 0.0
    """Time for which an engine computes nothing when it goes on with other memory."""
    max_num_seqs: int = 64
    max_model_len: int = 4096
    kv_heads: int = 8
    """A group's members divide them, down to one each, so that blocks hold more tokens."""
    max_num_batched_tokens: int = 1 << 30
    """Most tokens of one step. A longer prompt takes several steps."""
    captured_tokens: int = 0
    """Tokens of the largest CUDA graph that the engine pretends to have. SP steps batch more."""
    poison_token: int | None = None
    """Deliberate damage: a step that computes a prompt with this token kills the engine."""
    steps_at_once: int = 1
    """For simulated time: up to so many steps that decode the same requests run as one step of
    their total length. Their tokens come together. Any arrival ends the run at the next step."""
    asynchronous: bool = False
    """Whether a step is scheduled when the step before it begins, as vLLM's asynchronous scheduling
    does: requests that come later wait for one step more."""
    token_bytes: int = 0
    """Bytes of one token's KV."""
    peer_bytes_per_second: float = PEER_BYTES_PER_SECOND
    """Rate at which one engine reads the memory of another."""
    copy_seconds: float = 0.0
    """Time of a copy of KV, beyond that of its bytes."""
    prefix_caching: bool = True
    """Whether full blocks are kept for prompts that begin with the same tokens, as vLLM does."""
    tier_blocks: int = 0
    """KV blocks of each engine's tier."""
    tier_bytes_per_second: float = TIER_BYTES_PER_SECOND
    """Rate at which an engine reads and writes the host's memory."""
    layers: int = 8
    """A unit's stages divide them, down to one each, so that blocks hold more tokens."""

    @property
    def kv_geometry(self) -> KvGeometry:
        """What a block holds in each layout."""
        return KvGeometry(self.layers, self.kv_heads, self.block_tokens)


class FitSettings(msgspec.Struct, frozen=True):
    """How a node times its steps at start (``fitting.py``)."""

    seconds: float = 0.0
    """How long that may take in all; 0: it is not done."""
    file: str | None = None
    """Where the result is kept; None: nowhere."""
    key: dict[str, str] = {}
    """What the result depends on."""
    cached: bool = False
    """Whether ``NodeConfig.cost_model`` has the result of an earlier start."""


class Adapter(NamedTuple):
    """A LoRA adapter that requests may name as their model."""

    name: str
    path: str
    """A directory, or a name on the Hugging Face hub."""


Facts = Mapping[str, str]
"""The values of a vLLM configuration as text, by the path of the field."""


@dataclass(frozen=True)
class LayoutConfigs:
    """vLLM's configuration of every layout, as the main process made it (``layout_configs.py``).

    It is picklable. It is in this module because some of its users, such as the controller, do not
    import vLLM.
    """

    pickled: Mapping[Layout, bytes]
    """The ``VllmConfig`` of every layout."""
    facts: Mapping[Layout, Facts] = field(default_factory=dict)
    """The values that each configuration had in the main process."""
    log_stats: bool = True
    takes_what_fits: bool = False
    """Whether memory decides the longest request, as the user asked (``--max-model-len -1``)."""
    asynchronous_on_cpu: bool = False
    """Whether the user asked for asynchronous scheduling, which vLLM turns off on a CPU."""
    sizes_are_chosen: bool = False
    """Whether the user chose the sizes of the captured CUDA graphs, which bounds their memory.
    Shoal then captures no other sizes."""


class NodeConfig(msgspec.Struct, frozen=True):
    """One Shoal node. It is picklable, because every process gets it."""

    engines: int
    max_group: int
    policy: str
    runtime_dir: str
    """Private directory of the node's sockets; removed when the node ends."""
    vllm: Any = None
    """vLLM's configuration of every layout, a ``LayoutConfigs``; None: the node has none."""
    api_servers: int = 1
    fake: FakeSettings | None = None
    prepare_timeout_seconds: float = 10.0
    """How long an engine may take to answer an audit, or a switch that waits for no request."""
    seed: int = 0
    cost_model: CostModel | None = None
    """The cost model of this model on this node's engines, before any step was measured."""
    fit: FitSettings = FitSettings()
    targets: tuple[Target, ...] = ()
    """Targets of the priority classes, the most urgent first, for policies that keep promises."""
    urgent_engines: int = 0
    """Engines of the group that urgent requests have to themselves while such come; 0: none."""
    max_waiting_requests: int | None = None
    """Requests that may wait in the task pool; None: any number."""
    max_waiting_tokens: int | None = None
    """Prompt tokens that may wait in the task pool; None: any number."""
    max_held_bytes: int | None = None
    """Bytes that all requests on the node may have together; None: any number."""
    aging_seconds: float = AGING_SECONDS
    """See ``TaskPool``."""
    max_sp: int = 1
    """Largest sequence-parallel degree: a group of ``p`` may run a step in SP of ``min(p, max_sp)``
    combined with TP. 1: no step runs in SP."""
    max_pp: int = 1
    """Most pipeline stages of a group; 1: no group has stages. No policy chooses such a group."""
    shift_threshold: ShiftThreshold = DEFAULT_THRESHOLD
    """Decides which steps run in SP."""
    whole_experts: WholeExperts | None = None
    """In which steps members of a group compute whole experts, if others divide each expert; None:
    in none."""
    share_weights: int = 1
    """How many adjacent engines share weights at the start, each keeping one part of so
    many. Layouts of fewer members stream what their engines do not keep. While the node serves,
    engines may get whole weights, or some layers whole (``controller.memory_changes``)."""
    move_memory: bool = False
    """Whether the policy may let engines have whole weights or layers, and share them again."""
    queued_ahead: int = QUEUED_AHEAD
    place_by_prefix: bool = True
    """Whether policies see where a request's prefix is cached."""
    short_first: bool = True
    """Whether long prompts let shorter ones pass (``unit_costs.patience``)."""
    switch_wait_seconds: float = SWITCH_WAIT_SECONDS
    """How long a switch that the policy asked for waits for requests to end. Then it goes on
    without waiting (``switch.py``)."""
    mixed_step_tokens: int = 0
    """Most prompt tokens of a single engine's step in which requests decode; groups have more
    (``mixed_steps.py``). 0: as many as of any step."""
    full_graph_tokens: int = 0
    """Steps with prompts have full CUDA graphs up to so many tokens (``full_graphs.py``)."""
    precopy_tokens: int = PRECOPY_TOKENS
    """A switch copies KV ahead if the requests that it carries have so many tokens together, and
    caches if these have (``precopy.py``); 0, or without prefix caching: no switch does."""
    carry_path: CarryPath = CarryPath.AUTO
    tier_bytes: int = 0
    """Bytes of the host's memory that each engine has for KV (its *tier*, ``tier_core.py``); 0: it
    has none."""
    rebalance: bool = True
    """Whether running requests go to units that have less to do (``balancing.py``). It takes a cost
    model."""
    max_retries: int = MAX_RETRIES
    """How often a request is started again after an engine died with the request in its batch."""
    engine_timeout_seconds: float | None = None
    """How long an engine's loop may be silent before the engine counts as dead; None: for ever."""
    controller_timeout_seconds: float | None = None
    """How long the controller's loop may be silent before front ends refuse requests that need it.
    After three times as long the node ends. None: for ever."""
    outage_limit_seconds: float | None = None
    """See ``outage.Outage``; None: requests wait for ever."""
    step_timeout_seconds: float | None = None
    """See ``watchdog.StepWatch``; None: steps may take for ever."""
    restart_limit: int = 0
    """How often a dead engine is restarted within ``restarts.WINDOW_SECONDS``; 0: never."""
    restart_backoff_seconds: float = RESTART_BACKOFF_SECONDS
    """Pause before the first restart; each further one is twice as long."""
    recording_dir: str | None = None
    """Directory where runners record binds, and, while a benchmark asks for it, the work of their
    devices (``recording.py``). A runner takes no step while it writes a recording, so no step then
    counts as hung. None: runners record nothing."""
    log_format: LogFormat = LogFormat.TEXT
    tracing: bool = False
    """Whether front ends trace requests and switches, and so need their times."""
    adapters: tuple[Adapter, ...] = ()
    """The LoRA adapters, in the order in which vLLM's front ends number them, from 1."""

    @property
    def copies_ahead(self) -> bool:
        """Whether KV is copied ahead of carries: it is found as a cached prefix."""
        return self.precopy_tokens > 0 and self.caches_prefixes

    @property
    def caches_prefixes(self) -> bool:
        """Whether engines keep the KV of prompts that others may begin with."""
        if self.fake is not None:
            return self.fake.prefix_caching
        facts = self.vllm.facts.get(DP, {}) if self.vllm else {}
        return bool(facts.get("cache_config.enable_prefix_caching") != repr(False))

    @property
    def schedules_ahead(self) -> bool:
        """Whether engines have two steps in flight, as with vLLM's asynchronous scheduling.

        The fake engine has one at most.
        """
        if not self.vllm:
            return False
        facts = self.vllm.facts.get(DP, {})
        by_default = facts.get("scheduler_config.async_scheduling") == repr(True)
        return bool(by_default or self.vllm.asynchronous_on_cpu)

    @property
    def weight_groups(self) -> int:
        """Groups of rows that each shard of an MLP consists of (``weights.rules.fused``)."""
        return max(self.max_group, self.share_weights)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that this node forms, narrowest first."""
        return layouts_up_to(self.max_group, self.max_pp)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every unit that this node forms; those of narrow layouts come first."""
        return tuple(unit for each in self.layouts for unit in units_of(self.engines, each))


class Addresses:
    """The node's ZMQ endpoints: Unix sockets in the private runtime directory."""

    def __init__(self, runtime_dir: str | Path) -> None:
        self._dir = Path(runtime_dir)

    def _ipc(self, name: str) -> str:
        return f"ipc://{self._dir / name}"

    @property
    def engines(self) -> str:
        """Controller's ROUTER to which the engines' DEALERs connect (identity ``engine-<i>``)."""
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
        """A runner's own PULL. It receives the steps of its single unit, and ``Attach``."""
        return self._ipc(f"runner-{engine}")

    def queue(self, unit: Unit, engine: int, generation: int = 0) -> str:
        """The PULL that a member's runner reads for a unit. A single unit's is the runner's own.

        Args:
            unit: whose steps are read.
            engine: the member.
            generation: how many times the group was formed before.
        """
        if not unit.is_group:
            return self.runner(engine)
        members = "-".join(map(str, unit.engines))
        return self._ipc(f"group-{unit.name}-{members}-{engine}.{generation}")

    def responses(self, engine: int) -> str:
        """An engine's PULL for the results of every core it leads."""
        return self._ipc(f"responses-{engine}")
