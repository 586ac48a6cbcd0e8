"""What ``shoal bench sharing`` says of a node that is not there, and the job that it times."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.loadgen.workload import Arrival
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout, layouts_up_to
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import (
    FileError,
    HardwareFile,
    ShapeFile,
    cost_model,
    read_shape,
)
from shoal.runtime.simulation.simulated_node import simulate

Request = Arrival
LONGEST = 8
"""The longest output of a job, beside the mean."""
SEATS = 256


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve a job."""

    name: str
    share: int
    """How many engines share weights."""
    policy: str
    layout: Layout = DP
    """That of all engines at the start."""
    moves_memory: bool = False
    """Whether the policy may change the share level."""


@dataclass(slots=True)
class Projection:
    """See ``sharing.Sharing``."""

    steps: dict[str, dict[int, float]] = field(default_factory=dict)
    jobs: dict[str, float] = field(default_factory=dict)
    missing: str = ""


def job(count: int, prompt: int, output: int, seed: int) -> list[Request]:
    """Return requests that are all there at the start, with outputs of a long tail.

    Args:
        count: how many.
        prompt: tokens of each prompt.
        output: mean tokens of the outputs, which are exponentially distributed.
        seed: of the lengths.
    """
    draw = random.Random(seed)
    lengths = (draw.expovariate(1 / output) for _ in range(count))
    return [
        Arrival(0.0, prompt, max(1, min(LONGEST * output, round(length)))) for length in lengths
    ]


def systems(engines: int, share: int) -> list[System]:
    """Return the ways that are compared: SiDP's Figure 13, and groups."""
    widest = Layout(tp=engines)
    return [
        System("DP, whole weights", 1, "manual"),
        System("WaS only", share, "manual"),
        System(f"{widest.name.upper()} only", share, "manual", widest),
        System("WaS and groups (adaptive)", share, "adaptive"),
        System("the same, with whole weights when it pays", share, "adaptive", moves_memory=True),
    ]


def project(
    model: str,
    device: str,
    engines: int,
    share: int,
    batches: Mapping[int, int],
    requests: Sequence[Request],
) -> Projection:
    """Return what the cost model and the simulator say.

    Args:
        model: name or file of the simulator's shape.
        device: name or file of the hardware.
        engines: of the node.
        share: how many of them share weights.
        batches: requests on each GPU, and their tokens together.
        requests: the job; empty: none.

    Raises:
        FileError: a file is wrong, or the model does not fit with shared weights.
    """
    shape, hardware = read_shape(model), hardware_named(device)
    if shape.experts:
        raise FileError(f"{model} has experts, which are not shared")
    hardware.num_blocks(shape, share, engines)  # does it fit?
    found = Projection(missing=_too_large(shape, hardware))
    for name, layout, level in _columns(engines, share):
        if level == 1 and found.missing:
            continue
        costs = cost_model(shape, hardware, share_weights=level, widest=engines)
        found.steps[name] = {
            size: costs.step_seconds(layout, Batch(size * layout.tp, tokens * layout.tp))
            for size, tokens in batches.items()
        }
    for system in systems(engines, share) if requests else ():
        if not (system.share == 1 and found.missing):
            found.jobs[system.name] = _seconds(shape, hardware, engines, system, requests)
    return found


def _columns(engines: int, share: int) -> list[tuple[str, Layout, int]]:
    groups = [(layout.name.upper(), layout, share) for layout in layouts_up_to(engines)[1:]]
    return [("DP", DP, 1), ("WaS", DP, share), *groups]


def _too_large(shape: ShapeFile, hardware: HardwareFile) -> str:
    try:
        hardware.num_blocks(shape)
    except FileError as error:
        return str(error)
    return ""


def _seconds(
    shape: ShapeFile,
    hardware: HardwareFile,
    engines: int,
    system: System,
    requests: Sequence[Request],
) -> float:
    node = Node(
        shape=shape,
        hardware=hardware,
        engines=engines,
        max_group=engines,
        layout=system.layout if system.policy == "manual" else None,
        max_num_seqs=SEATS * engines,
        prefix_caching=False,
        share_weights=system.share,
        move_memory=system.moves_memory,
    )
    return max(life.ended or 0.0 for life in simulate(node, system.policy, requests).lives)
