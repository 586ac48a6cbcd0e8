"""LoRA adapters: vLLM's own, in slots that every layout's worker has for itself.

vLLM puts a layer around each layer of a loaded model (``LoRAModelRunnerMixin.load_lora_model``) and
computes what adapters add beside the product of the layer's own weights, which are views in all
layouts but DP. It adapts only ``LAYERS`` in three cases:

- In models with routed experts, for which its layers need weights of their own
  (``FusedMoEWithLoRA``).
- With speculation: an adapted head would have to know whose each row of logits is, and vLLM's V2
  model runner says this only where each request has one row (``LoraState.make_lora_inputs``).
- Where engines share weights, because these may be the vocabulary's.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest

from shoal.runtime.config import NodeConfig
from shoal.runtime.engine.layouts.layout_worker import LayoutWorker

LAYERS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Layers of attention, of dense networks and of shared experts, by vLLM's names."""


class UnreadableAdapter(ValueError):
    """An adapter that cannot be served; the message names it."""


def adapter_requests(node: NodeConfig) -> list[LoRARequest]:
    """Return what vLLM's front ends send with requests for the node's adapters.

    They number adapters from 1, in order (``OpenAIServingModels.init_static_loras``).
    """
    return [
        LoRARequest(lora_name=adapter.name, lora_int_id=number, lora_path=adapter.path)
        for number, adapter in enumerate(node.adapters, start=1)
    ]


def limit_adapters(config: VllmConfig, share_weights: int) -> None:
    """Leave all but ``LAYERS`` without slots for adapters, where only these may be adapted.

    Args:
        config: of a layout; changed in place.
        share_weights: how many engines share weights.
    """
    is_limited = config.model_config.is_moe or config.speculative_config is not None
    is_limited |= share_weights > 1
    if config.lora_config is not None and is_limited:
        config.lora_config.target_modules = list(LAYERS)


def load_adapters(node: NodeConfig, worker: LayoutWorker) -> None:
    """Let a layout's worker read the node's adapters. Not collective.

    The start of the layout's core drops them: vLLM removes all adapters after each of its trials.

    Args:
        node: names the adapters.
        worker: of one of this engine's layouts.

    Raises:
        UnreadableAdapter: vLLM refuses one, or it adapts what has no adapters; the message names it
            and the reason.
    """
    for request in adapter_requests(node):
        try:
            worker.call("add_lora", (request,))
        except Exception as error:  # vLLM and safetensors raise every kind here
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UnreadableAdapter(f"adapter {request.lora_name}: {reason[0]}") from error
        if left_out := _left_out(worker, request):
            raise UnreadableAdapter(
                f"adapter {request.lora_name}: it adapts {left_out}, and in models with routed "
                "experts, with speculative decoding and with --share-weights, only attention, "
                "dense networks and shared experts have adapters"
            )


def _left_out(worker: LayoutWorker, request: LoRARequest) -> str | None:
    """Return a layer that the adapter adapts and this model does not; None if there is none.

    VLLM computes without that part of an adapter and says nothing
    (``LoRAModelManager.activate_adapter``).
    """
    if worker.config.lora_config.target_modules is None:
        return None
    manager: Any = worker.model_runner.lora_manager._adapter_manager
    loras = manager.get_adapter(request.lora_int_id).loras
    return next((name for name in loras if name not in manager.modules), None)
