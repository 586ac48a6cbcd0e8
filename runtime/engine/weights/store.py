"""Where the full weights of the model are."""

from collections.abc import Iterator

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA

from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import Shard


class ResidentWeights:
    """The full weights on this engine's device: the DP model's own parameters and buffers.

    Args:
        model: the DP model: which layers there are, their sizes, and what vLLM made of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole parameter or buffer, as the DP model computes with it.

        Args:
            name: its name in the DP model, such as ``model.layers.0.mlp.down_proj.weight``.

        Raises:
            KeyError: there is no such tensor.
        """
        path, _, key = name.rpartition(".")
        module = without_adapters(self.model.get_submodule(path))
        for tensors in (module._parameters, module._buffers):
            found: torch.Tensor | None = tensors.get(key)
            if found is not None:
                return found
        raise KeyError(name)

    def part(self, full: FullLayer, shard: Shard) -> tuple[FullLayer, Shard]:
        """Return which layer a layout's layer is a part of, and which part: here ``full`` itself.

        Args:
            full: the layer of the DP model.
            shard: which share of it a member of a layout has, by its rank or its heads.
        """
        return full, shard

    def place(self, _name: str, shard: Shard) -> int:
        """Return which of a layout's parts of a layer a member computes: here its shard's."""
        return shard.rank

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights on this engine's device."""
        tensors = [tensor for name, tensor in self._named() if self._is_resident(name)]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def _is_resident(self, _name: str) -> bool:
        """Return whether a tensor's whole storage is on this engine's device, for it alone."""
        return True


def without_adapters(layer: nn.Module) -> nn.Module:
    """Return vLLM's own layer, where vLLM has put another around it that adds adapters (LoRA)."""
    return layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else layer


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules of a model by the names that they have where there are no adapters."""
    return {
        name.replace(".base_layer", ""): module
        for name, module in model.named_modules(remove_duplicate=False)
        if without_adapters(module) is module
    }
