"""Which layouts of a node run steps by sequence, on which models, and what that takes."""

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from shoal.policies.values.layouts import DP, Layout, Unit
from shoal.runtime.engine.groups.head_order import base_of
from shoal.runtime.engine.sequence.capture_sizes import wanted_sizes
from shoal.runtime.engine.sequence.peer_exchange import exchanges_by_peers
from shoal.runtime.engine.sequence.piecewise_graphs import CapturedSteps, share_of
from shoal.runtime.engine.sequence.sp_settings import exchange_setting

LARGER_CAPTURES_BYTES = 256 << 20
"""GPU memory kept free of KV for each layout beyond DP with larger graphs (``capture_sizes.py``);
DP's are measured by vLLM. A guess: vLLM's own 86 graphs of a layout took 0.36 GiB."""


class SequencePlan:
    """What all layouts of a node need for steps by sequence.

    Args:
        layouts: the node's, DP first.
        max_sp: largest SP degree; 1: no step runs by sequence.
        sizes_are_chosen: whether the user chose the sizes of CUDA graphs.

    Raises:
        SettingError: the environment asks for something impossible (``sp_settings``).
    """

    def __init__(self, layouts: Sequence[Layout], max_sp: int, *, sizes_are_chosen: bool) -> None:
        by_sequence = max_sp > 1
        self.max_sp = max_sp
        tensor_parallel = [layout for layout in layouts[1:] if layout.pp == 1]
        self._groups = tuple(tensor_parallel) if by_sequence else ()
        self._exchange = exchange_setting() if by_sequence else ""
        self._captures_larger = by_sequence and not sizes_are_chosen

    def includes(self, layout: Layout) -> bool:
        """Return whether a layout's steps may run by sequence."""
        return layout in self._groups

    def base(self, layout: Layout) -> Layout:
        """Return the layout whose model runs a step of this layout by sequence."""
        return Layout(tp=base_of(layout.tp, self.max_sp).tp)

    @property
    def requires_peers(self) -> bool:
        """Whether members must exchange through each other's memory, and not by collectives."""
        return self._exchange == "peer"

    @property
    def reorders(self) -> bool:
        """Whether some layout's heads are not in the order of its members (``head_order``)."""
        return any(self.base(layout) != DP for layout in self._groups)

    @property
    def reserved_bytes(self) -> int:
        """Device memory that graphs of layouts beyond DP take for steps by sequence alone."""
        bases = {self.base(layout) for layout in self._groups if self._captures_larger} - {DP}
        return LARGER_CAPTURES_BYTES * len(bases)

    def captures(self, layout: Layout, config: VllmConfig) -> CapturedSteps:
        """Return a record for a layout's graphs, which stays empty unless a group replays them.

        Args:
            layout: one of the node's.
            config: vLLM's configuration of the layout.
        """
        shares = [
            base_of(group.tp, self.max_sp).sp
            for group in self._groups
            if self.base(group) == layout
        ]
        if not shares:
            return CapturedSteps()
        most = share_of(config, min(shares))
        larger = wanted_sizes(config, most) if self._captures_larger else []
        return CapturedSteps(wanted=True, larger=larger)

    def exchanges_by_peers(self, unit: Unit) -> bool:
        """Return whether the members of a unit exchange through their memory.

        Raises:
            SettingError: they must, and cannot.
        """
        if not self.includes(unit.layout):
            return False
        devices = unit.engines if current_platform.is_cuda() else ()
        return exchanges_by_peers(self._exchange, devices)
