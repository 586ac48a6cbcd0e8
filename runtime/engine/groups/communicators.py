"""All communicators of a node, created once at start and made current by one context manager.

Flying Serving, 4.3 (communicator pool). A process takes part in one unit of every layout; vLLM
keeps "the" groups of a process in module globals of ``vllm.distributed.parallel_state``, so being
in a layout means having its groups in those globals.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm.distributed.parallel_state as parallel_state
import vllm.v1.worker.workspace as workspace
from vllm.config import VllmConfig, set_current_vllm_config

from shoal.policies.values.layouts import Engines, Layout
from shoal.runtime.engine.groups.head_order import peers_of
from shoal.runtime.engine.groups.rendezvous import Rendezvous, new_group_replaced, number_process

# Every group that vllm.distributed.parallel_state.initialize_model_parallel creates.
GROUP_GLOBALS = ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB")
_GROUP_NAMES = ("tp", "dcp", "pcp", "pp", "dp", "ep")


class Communicators:
    """The groups of one layout on this process, and the workspace that goes with them.

    Args:
        layout: the layout.
        config: vLLM's configuration of the layout.
        backend: torch's backend for the process groups.
        rendezvous: where the members of this process's unit in the layout meet.
    """

    def __init__(
        self, layout: Layout, config: VllmConfig, backend: str, rendezvous: Rendezvous
    ) -> None:
        """Create the groups with vLLM's own initialiser. Collective over the unit."""
        # vLLM's CPU communicator uses shared memory only if all ranks have the same name for it.
        # Shared memory spins while it waits, starves engines that share cores, hangs for ever when
        # a member dies and leaks when one is killed. With a name for each rank, they use gloo.
        os.environ["VLLM_DIST_IDENT"] = rendezvous.own_name
        number = number_of(layout)
        parallel_state._group_name_counter.update(dict.fromkeys(_GROUP_NAMES, number))
        saved = {name: getattr(parallel_state, name) for name in GROUP_GLOBALS}
        for name in GROUP_GLOBALS:
            setattr(parallel_state, name, None)
        # As vLLM's worker does, but that starts after its groups have been made.
        parallel_state.set_custom_all_reduce(not config.parallel_config.disable_custom_all_reduce)
        try:
            with (
                set_current_vllm_config(config),
                new_group_replaced(rendezvous.new_group),
            ):
                parallel_state.initialize_model_parallel(layout.tp, layout.pp, backend=backend)
                self._groups = {name: getattr(parallel_state, name) for name in GROUP_GLOBALS}
                # Stock vLLM's world is one instance: its members agree on things without others.
                self._groups["_WORLD"] = self._world(layout)
        finally:
            for name, group in saved.items():
                setattr(parallel_state, name, group)
        _drop_broadcaster(self.tensor_parallel)
        self.process_groups: dict[Engines, Any] = {self.group: self.tensor_parallel.device_group}
        """torch's groups for the data of this layout, by their members."""
        self._finding_groups: list[Any] = []
        self._backend = backend
        self._rendezvous = rendezvous
        self.workspace: Any = None
        """vLLM keeps one per process, replaced by each worker's start and locked by its graph
        capture: each layout needs its own."""

    def _world(self, layout: Layout) -> Any:
        """Return the ``GroupCoordinator`` of the whole unit. It is made if there is none yet."""
        tensor, pipeline = self._groups["_TP"], self._groups["_PP"]
        if layout.pp == 1:
            return tensor
        if layout.tp == 1:
            return pipeline
        first = min(pipeline.ranks) // layout.world_size * layout.world_size
        members = list(range(first, first + layout.world_size))
        return parallel_state.init_world_group(members, tensor.local_rank, "gloo")

    @property
    def tensor_parallel(self) -> Any:
        """The layout's tensor parallel ``GroupCoordinator``."""
        return self._groups["_TP"]

    @property
    def group(self) -> Engines:
        """The engines of this process's tensor parallel group."""
        return tuple(self.tensor_parallel.ranks)

    @property
    def place(self) -> int:
        """This process's place in the group."""
        return int(self.tensor_parallel.rank_in_group)

    def new_process_group(self, members: Engines) -> Any:
        """Return another process group of some of the layout's engines. Collective over these."""
        group = self._rendezvous.new_group(members, backend=self._backend)
        self.process_groups[members] = group
        return group

    def finding_group(self, members: Engines) -> Any:
        """Return the gloo group in which some of the layout's engines tell each other addresses.

        Collective over these.
        """
        if members == self.group:
            return self.tensor_parallel.cpu_group
        self._finding_groups.append(self._rendezvous.new_group(members, backend="gloo"))
        return self._finding_groups[-1]

    def destroy(self) -> None:
        """Free the groups; nobody may use them any more. Waits for no peer: it may be dead."""
        extra = [group for key, group in self.process_groups.items() if key != self.group]
        extra += self._finding_groups
        coordinators = {id(group): group for group in self._groups.values() if group is not None}
        for coordinator in coordinators.values():
            coordinator.destroy()
        for group in extra:
            torch.distributed.destroy_process_group(group)

    def active(self, *, starts: bool = False) -> "Active":
        """Make this layout's groups and workspace vLLM's current ones, in a ``with``.

        Args:
            starts: leave the node as vLLM's world: a worker checks it while it starts.
        """
        groups = {name: self._groups[name] for name in GROUP_GLOBALS} if starts else self._groups
        return Active(self, groups)


class Active:
    """See ``Communicators.active``. A step by sequence enters it twice, so it has to be quick.

    Args:
        layout: the layout to be in, which owns the workspace.
        groups: its groups, by the names of vLLM's globals.
    """

    __slots__ = ("_groups", "_layout", "_saved", "_saved_workspace")

    def __init__(self, layout: Communicators, groups: dict[str, Any]) -> None:
        self._layout = layout
        self._groups = groups

    def __enter__(self) -> None:
        state = parallel_state.__dict__
        self._saved = {name: state[name] for name in self._groups}
        self._saved_workspace = workspace._manager
        state.update(self._groups)
        workspace._manager = self._layout.workspace

    def __exit__(self, *_: object) -> None:
        self._layout.workspace = workspace._manager
        workspace._manager = self._saved_workspace
        parallel_state.__dict__.update(self._saved)


def number_of(layout: Layout) -> int:
    """Return the number that the names of a layout's groups in vLLM end with, such as ``tp:2``.

    Compiled graphs, cached ones too, call vLLM's groups by these names. So a layout's number is the
    same in every process and on every node, however often the layout is made, and no other layout
    has it.
    """
    tp, pp, ep = (axis.bit_length() - 1 for axis in (layout.tp, layout.pp, layout.ep))
    return tp | pp << 4 | ep << 8


def _drop_broadcaster(group: Any) -> None:
    """Take vLLM's shared-memory broadcaster away from a ``GroupCoordinator``.

    Steps reach the members over the engine's own queues; the broadcaster would only be a segment
    that may leak. Its members have connected by now, so the names of its two sockets can be removed
    here. Nobody else removes them, and each forming of a group makes two more.
    """
    broadcaster, group.mq_broadcaster = group.mq_broadcaster, None
    if broadcaster is None or group.rank_in_group > 0:
        return
    handle = broadcaster.handle
    for address in filter(None, (handle.local_subscribe_addr, handle.local_notify_addr)):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


class SpGroups(NamedTuple):
    """The process groups in which a member of a TP layout exchanges heads (``head_order.Peers``).

    Attributes:
        sp: the members that share a step's tokens.
        across: the members that exchange KV heads among GQA groups; None if there is only this one.
        within: this member's GQA group; None if it is alone there: then KV heads are exchanged in
            ``sp``, and ``across`` is None too.
    """

    sp: Any
    across: Any | None
    within: Any | None


def sp_groups(layouts: Sequence[Communicators], max_sp: int, kv_heads: int) -> SpGroups:
    """Return the groups of the widest of these layouts. Collective over its group.

    A process group of the same members is used again, whichever of the layouts it was made for.

    Args:
        layouts: this one, after all narrower ones.
        max_sp: largest SP degree.
        kv_heads: KV heads of the model.
    """
    wide = layouts[-1]
    peers = peers_of(len(wide.group), max_sp, kv_heads)

    def find(divided: Sequence[Sequence[int]]) -> Any | None:
        mine = next(places for places in divided if wide.place in places)
        members = tuple(wide.group[place] for place in mine)
        if len(members) == 1:
            return None
        known = (layout.process_groups.get(members) for layout in layouts)
        found = next((group for group in known if group is not None), None)
        return wide.new_process_group(members) if found is None else found

    within = find(peers.within)
    across = None if within is None else find(peers.across)
    return SpGroups(find(peers.sp), across, within)


def size_of(group: Any | None) -> int:
    """Return how many members a process group has; None stands for this process alone."""
    return 1 if group is None else int(group.size())


def join_node(engine: int, engines: int) -> None:
    """Make this process engine ``engine`` of the node for torch and vLLM. Waits for nobody."""
    number_process(engine, engines)
    with new_group_replaced(lambda *_, **__: torch.distributed.GroupMember.WORLD):
        world = parallel_state.init_world_group(list(range(engines)), engine, "gloo")
    parallel_state._WORLD, parallel_state._NODE_COUNT = world, 1
