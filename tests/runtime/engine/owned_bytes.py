"""What a layout has to itself of its weights."""

from collections.abc import Sequence

import torch
from torch import nn


def owned_bytes(model: nn.Module, full: nn.Module, others: Sequence[torch.Tensor] = ()) -> int:
    """Return the parameter bytes of ``model`` not in storages of ``full`` or of ``others``."""
    shared = {p.untyped_storage().data_ptr() for p in (*full.parameters(), *others)}
    return sum(
        p.numel() * p.element_size()
        for p in model.parameters()
        if p.untyped_storage().data_ptr() not in shared
    )
