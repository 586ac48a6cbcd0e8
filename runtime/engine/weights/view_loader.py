"""Every layout's weights in the bytes of one: zero-copy views of the full weights.

Flying Serving, 4.1 (model weights manager). The DP model is loaded by vLLM. The model of another
layout is of vLLM's own model class, and its parameters are views for this member's rank. The rule
for each kind of layer (``rules``) says which views. How a layer applies its weights is vLLM's
``quant_method`` seam (``shared_weights``), so no vLLM class is changed. Layers that vLLM repacks as
it loads them can be no views: the layout loads its own shard of these, and of a draft model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.weights.experts_by_length import add_whole_experts
from shoal.runtime.engine.weights.rules.formats import owns_weights
from shoal.runtime.engine.weights.rules.rule_registry import rule_of
from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import Shard, UnviewableWeights
from shoal.runtime.engine.weights.store import ResidentWeights, layers_of
from shoal.runtime.whole_experts import WholeExperts

VIEW_LOAD_FORMAT = "shoal_view"
"""``load_format`` of every layout but DP."""


def arrange_weights(store: ResidentWeights, groups: int) -> None:
    """Put the rows of the DP model in an order in which shards are ranges, in place.

    Args:
        store: has the DP model's weights, loaded.
        groups: size of the largest group the node can form.

    Raises:
        UnviewableWeights: a layer's rows cannot be put in that order.
    """
    if groups == 1:
        return
    for name, module in layers_of(store.model).items():
        rule_of(module).arrange(FullLayer(name, module, store.tensor), groups)


def view_weights(
    model: nn.Module, store: ResidentWeights, layout: Layout, rank: int, heads: int | None = None
) -> None:
    """Turn the parameters of a layout's model into views of the full weights.

    Args:
        model: vLLM's model for this rank, built with ``SharedWeights(views=True)``.
        store: has the DP model's weights, loaded and arranged.
        layout: the model's layout.
        rank: tensor parallel rank.
        heads: which shard of the attention heads it holds, if not that of its rank
            (``head_order.head_shard``).

    Raises:
        UnviewableWeights: a layer's split is not one that its rule knows.
    """
    heads = rank if heads is None else heads
    # DP's output layer may be its embeddings, under two names. A stage without an output layer has
    # vLLM's ``PPMissingLayer`` under that name.
    full_modules = layers_of(store.model)
    layers = list(model.named_modules())
    attention = {_parent(name) for name, layer in layers if isinstance(layer, QKVParallelLinear)}
    for name, layer in layers:
        if name not in full_modules:
            raise UnviewableWeights(f"{name} exists in TP-{layout.tp} only")
        if owns_weights(layer):
            if heads != rank:
                raise UnviewableWeights(f"{name} is loaded in the order of the ranks")
            continue
        rule = rule_of(layer)
        of_heads = rule.of_heads and not attention.isdisjoint((name, _parent(name)))
        full = FullLayer(name, full_modules[name], store.tensor)
        shard = Shard(heads if of_heads else rank, layout.tp)
        if isinstance(layer, LinearBase) and not getattr(layer, "disable_tp", False):
            # By which vLLM's layer around it divides an adapter (LoRA).
            layer.tp_rank = store.place(name, shard)
        rule.view(layer, *store.part(full, shard))
    _check_no_meta(model)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _check_no_meta(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in tensors if tensor.is_meta]
    if left:
        raise UnviewableWeights(f"no bytes behind {', '.join(left[:3])}")


def load_owned(loader: BaseModelLoader, model: nn.Module, config: ModelConfig) -> None:
    """Load the layers of a layout that cannot be views, as vLLM does for this rank.

    vLLM's loader hands the whole checkpoint to the model. What will be views has no bytes yet, so
    nothing of it is copied, and nothing is read where the checkpoint is mapped.

    Args:
        loader: reads the checkpoint.
        model: vLLM's model for this rank, whose other layers are no views yet.
        config: says which checkpoint.
    """
    owned = [layer for layer in model.modules() if owns_weights(layer)]
    if not isinstance(loader, DummyModelLoader):
        if owned:
            loader.load_weights(model, config)
        return
    for layer in owned:  # it would also fill tensors without bytes
        loader.load_weights(layer, config)


def owned_bytes(model: nn.Module, draft: nn.Module | None = None) -> int:
    """Return the bytes of the layers that a layout has for itself, as they are computed with.

    Args:
        model: the layout's.
        draft: its draft model, some of whose layers may be the model's.
    """
    owned = {part for layer in model.modules() if owns_weights(layer) for part in layer.modules()}
    if draft is not None:
        owned |= set(draft.modules()) - set(model.modules())
    return sum(
        tensor.nbytes
        for layer in owned
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    )


def compile_kernels(model: nn.Module) -> None:
    """Compile what the layers of a viewed model launch, once for each shape of a layer."""
    shapes: set[Any] = set()
    for layer in model.modules():
        rule_of(layer).warm_up(layer, shapes)


def show_weights(model: nn.Module) -> None:
    """Give each layer that consists of parts a weight: vLLM asks it where adapters have to be."""
    for layer in model.modules():
        if isinstance(layer, LinearBase) and hasattr(layer, "parts"):
            layer.weight = layer.parts[0].weight


def register_view_loader(
    store: Callable[[], ResidentWeights],
    head_shard: Callable[[int, Layout], int],
    loader: Callable[[], BaseModelLoader],
    whole: WholeExperts | None = None,
) -> None:
    """Register ``VIEW_LOAD_FORMAT`` with vLLM's model loaders.

    Args:
        store: returns what has this process's full weights.
        head_shard: the shard of the attention heads that a rank of a layout holds.
        loader: returns what loaded DP, and loads layers that can be no views.
        whole: see ``NodeConfig.whole_experts``.
    """

    class ViewLoader(BaseModelLoader):  # type: ignore[misc]
        """Builds a layout's model without storage and points it at the full weights."""

        def download_model(self, model_config: ModelConfig) -> None:
            """Nothing to fetch: the full weights are there."""

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            """Nothing to load: see ``load_model``."""

        def load_model(
            self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
        ) -> nn.Module:
            from vllm.distributed.parallel_state import get_tp_group

            if model_config is not vllm_config.model_config:
                # A draft model is small: each layout has a shard of its own.
                return loader().load_model(vllm_config, model_config, prefix)
            group = get_tp_group()
            device = torch.device(vllm_config.device_config.device_type)
            with set_default_torch_dtype(model_config.dtype), device:
                model = initialize_model(
                    vllm_config=vllm_config, model_config=model_config, prefix=prefix
                )
            load_owned(loader(), model, model_config)
            layout, rank = Layout(tp=group.world_size), group.rank_in_group
            view_weights(model, store(), layout, rank, head_shard(rank, layout))
            if whole is not None:
                add_whole_experts(model, store(), Shard(rank, layout.tp), whole)
            compile_kernels(model)
            process_weights_after_loading(model, model_config, device)
            if vllm_config.lora_config is not None:
                show_weights(model)
            return model.eval()

    register_model_loader(VIEW_LOAD_FORMAT)(ViewLoader)
