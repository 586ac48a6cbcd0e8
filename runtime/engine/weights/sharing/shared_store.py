"""The full weights of an engine that keeps a part of its MLPs only."""

from torch import nn

from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import Shard
from shoal.runtime.engine.weights.sharing.shared_layers import SharedLayers
from shoal.runtime.engine.weights.store import ResidentWeights


class SharedStore(ResidentWeights):
    """The DP model's weights, of which the MLPs' are what ``SharedLayers`` says.

    Args:
        model: the DP model.
        mlps: its MLPs.
    """

    def __init__(self, model: nn.Module, mlps: SharedLayers) -> None:
        super().__init__(model)
        self._mlps = mlps

    def part(self, full: FullLayer, shard: Shard) -> tuple[FullLayer, Shard]:
        """Return a layer that this engine keeps or streams (see ``WeightStore``)."""
        return self._mlps.part(full, shard)

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights on this engine's device: slots count, what peers keep does not."""
        return super().resident_bytes + self._mlps.resident_bytes

    def _is_resident(self, name: str) -> bool:
        return not self._mlps.has(name)
