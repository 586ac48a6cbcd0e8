"""Where the full weights of the model are."""

from typing import Protocol

import torch
from torch import nn


class WeightStore(Protocol):
    """The full weights, wherever they are: code that needs a tensor of DP's asks here."""

    @property
    def model(self) -> nn.Module:
        """The DP model: which layers there are, their sizes, and what vLLM made of them."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole parameter or buffer, as the DP model computes with it.

        Args:
            name: its name in the DP model, such as ``model.layers.0.mlp.down_proj.weight``.

        Raises:
            KeyError: there is no such tensor.
        """


class ResidentWeights:
    """The full weights on this engine's device: the DP model's own parameters and buffers.

    Args:
        model: the DP model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def tensor(self, name: str) -> torch.Tensor:
        """Return the parameter or buffer itself (see ``WeightStore``)."""
        path, _, key = name.rpartition(".")
        module = self.model.get_submodule(path)
        for tensors in (module._parameters, module._buffers):
            found: torch.Tensor | None = tensors.get(key)
            if found is not None:
                return found
        raise KeyError(name)
