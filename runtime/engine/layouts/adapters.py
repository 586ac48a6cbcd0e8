"""LoRA adapters: vLLM's own, in slots that every layout's worker has for itself.

vLLM puts a layer around each layer of a loaded model (``LoRAModelRunnerMixin.load_lora_model``) and
computes what adapters add beside the product of the layer's own weights, which are views in all
layouts but DP.
"""

from vllm.lora.request import LoRARequest

from shoal.runtime.config import NodeConfig
from shoal.runtime.engine.layouts.layout_worker import LayoutWorker


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


def load_adapters(node: NodeConfig, worker: LayoutWorker) -> None:
    """Let a layout's worker read the node's adapters. Not collective.

    The start of the layout's core drops them: vLLM removes all adapters after each of its trials.

    Args:
        node: names the adapters.
        worker: of one of this engine's layouts.

    Raises:
        UnreadableAdapter: vLLM refuses one; the message names it and the reason.
    """
    for request in adapter_requests(node):
        try:
            worker.call("add_lora", (request,))
        except Exception as error:  # vLLM and safetensors raise every kind here
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UnreadableAdapter(f"adapter {request.lora_name}: {reason[0]}") from error
