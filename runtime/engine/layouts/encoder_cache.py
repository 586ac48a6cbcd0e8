"""How much memory a layout's worker takes to keep what its encoder makes of images."""

from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget


def encoder_cache_bytes(config: VllmConfig) -> int:
    """Return the bytes that a worker's encoder cache may have: none if the model takes no images.

    A unit's scheduler says which images its workers keep (``EncoderCacheManager``), so each layout
    has a cache of its own, and vLLM has measured DP's alone.

    Args:
        config: vLLM's configuration of the layout.
    """
    model = config.model_config
    if not model.supports_multimodal_inputs:
        return 0
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
    size: int = model.get_inputs_embeds_size() * model.dtype.itemsize
    return int(budget.encoder_cache_size * size)
