"""The full weights of an engine that keeps only a part of some layers."""

from torch import nn

from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import Shard
from shoal.runtime.engine.weights.sharing.shared_layers import SharedLayers
from shoal.runtime.engine.weights.store import ResidentWeights


class SharedStore(ResidentWeights):
    """The DP model's weights, of which the shared ones are what ``SharedLayers`` says.

    Args:
        model: the DP model.
        layers: those that engines share.
    """

    def __init__(self, model: nn.Module, layers: SharedLayers) -> None:
        super().__init__(model)
        self._layers = layers

    def part(self, full: FullLayer, shard: Shard) -> tuple[FullLayer, Shard]:
        """Return a layer that this engine keeps or streams, or ``full`` itself."""
        return self._layers.part(full, shard)

    def place(self, name: str, shard: Shard) -> int:
        """Return which of a layout's parts of a layer this engine computes."""
        place = self._layers.place(name, shard.of)
        return super().place(name, shard) if place is None else place

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights on this engine's device: slots count, what peers keep does not."""
        return super().resident_bytes + self._layers.resident_bytes

    def _is_resident(self, name: str) -> bool:
        return not self._layers.has(name)
