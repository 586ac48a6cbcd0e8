"""What a layout has to itself of its weights."""

from torch import nn


def owned_bytes(model: nn.Module, full: nn.Module) -> int:
    """Return the parameter bytes of ``model`` that do not lie in storages of ``full``."""
    shared = {p.untyped_storage().data_ptr() for p in full.parameters()}
    return sum(
        p.numel() * p.element_size()
        for p in model.parameters()
        if p.untyped_storage().data_ptr() not in shared
    )
