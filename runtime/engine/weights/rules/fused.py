"""Linear layers that are several in one: ``qkv_proj``, and ``gate_up_proj`` with its activation.

A member has a range of outputs of each logical part. QKV's rows stay in vLLM's order, so DP runs
vLLM's own GEMM. The rows of ``gate_up_proj`` are grouped once, ``[gate_0|up_0|gate_1|up_1|...]``,
with as many groups as the largest unit has members. So a member's share is one range and one GEMM,
and the activation behind it reads the grouped output in place.
"""

import itertools

import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

from shoal.runtime.engine.weights.rules.dense import LinearRule
from shoal.runtime.engine.weights.rules.formats import format_of, owns_weights
from shoal.runtime.engine.weights.rules.shard_rule import FullLayer, ShardRule, view_tensors
from shoal.runtime.engine.weights.rules.shards import Shard, UnviewableWeights, named
from shoal.runtime.engine.weights.rules.unquantised import Part
from shoal.runtime.served_weights import LayerKind


class FusedRule(LinearRule):
    """The same share of every part; one range of all rows where ``GatedMlpRule`` grouped them."""

    kind = LayerKind.FUSED
    layers = (MergedColumnParallelLinear,)
    scheme = "other_fused=partitioned_linear"

    def cut(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Take a range of outputs, or give the layer ``parts`` with one each."""
        if getattr(full.module, "shoal_grouped", False):
            super().cut(layer, full, shard)
            return
        sizes = list(full.module.output_sizes)
        begins = itertools.accumulate(sizes, initial=0)
        layer.parts = nn.ModuleList()
        for first, size, share in zip(begins, sizes, self.shares(full.module, shard), strict=False):
            begin, length = share.cut(size)
            layer.parts.append(_part(full, first + begin, length))
        for key in layer._parameters:
            layer._parameters[key] = None

    def shares(self, full: nn.Module, shard: Shard) -> list[Shard]:
        """Return which share of each part the member has."""
        return [shard] * len(full.output_sizes)


class QkvRule(FusedRule):
    """Query heads, and the key and value heads that they read."""

    layers = (QKVParallelLinear,)
    of_heads = True

    def shares(self, full: nn.Module, shard: Shard) -> list[Shard]:
        """With more members than KV heads, neighbours hold the same (``num_kv_head_replicas``)."""
        replicas = max(1, shard.of // full.total_num_kv_heads)
        return [shard, *[Shard(shard.rank // replicas, shard.of // replicas)] * 2]


def _part(full: FullLayer, begin: int, size: int) -> Part:
    part = Part()
    view_tensors(part, full, lambda axes, tensor: axes.take_outputs(tensor, begin, size))
    return part


class GroupedActivation(nn.Module):  # type: ignore[misc]
    """``SiluAndMul`` on grouped rows: ``[T, G*(g|u)]`` read in place as ``[T*G, g|u]``."""

    def __init__(self, activation: nn.Module, groups: int) -> None:
        super().__init__()
        self.activation = activation
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[T, intermediate]`` in stock order for ``x`` of ``[T, 2*intermediate]``."""
        shape = (*x.shape[:-1], x.shape[-1] // 2)
        if torch.compiler.is_compiling():
            # From the two-dimensional view, Inductor makes a kernel that takes twice as long.
            gate, up = x.view(*x.shape[:-1], self.groups, 2, -1).unbind(-2)
            return (nn.functional.silu(gate) * up).view(shape)
        return self.activation(x.view(-1, x.shape[-1] // self.groups)).view(shape)


class GatedMlpRule(ShardRule):
    """The module around ``gate_up_proj`` and its activation, not the projections themselves."""

    kind = LayerKind.FUSED
    scheme = "gate_up=grouped"

    def matches(self, layer: nn.Module) -> bool:
        """Return whether the module is a fused projection and vLLM's SwiGLU behind it."""
        return isinstance(
            getattr(layer, "gate_up_proj", None), MergedColumnParallelLinear
        ) and isinstance(getattr(layer, "act_fn", None), SiluAndMul)

    def arrange(self, full: FullLayer, groups: int) -> None:
        """Group the rows of ``gate_up_proj`` in place, and let the activation know.

        Raises:
            UnviewableWeights: the groups would cut through blocks of a block-wise scale.
        """
        projection = full.module.gate_up_proj
        if owns_weights(projection) or projection.disable_tp:  # no member has a part of it
            return
        in_groups = {"weight"} if getattr(projection, "shoal_grouped", False) else set()
        with named(f"{full.name}.gate_up_proj"):
            for key, axes in format_of(projection).axes(projection).items():
                if key in in_groups:  # as it was loaded
                    continue
                if axes.outputs is not None and projection._parameters.get(key) is not None:
                    tensor = full.tensor(f"gate_up_proj.{key}")
                    regroup(tensor.data.movedim(axes.outputs, 0), groups)
        full.module.act_fn = GroupedActivation(full.module.act_fn, groups)
        projection.shoal_grouped = True

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Let the activation read the groups that the member has."""
        super().view(layer, full, shard)
        if isinstance(full.module.act_fn, GroupedActivation):
            layer.act_fn = GroupedActivation(layer.act_fn, full.module.act_fn.groups // shard.of)


def check_shared_mlp(name: str, mlp: nn.Module, *, grouped: bool) -> None:
    """Refuse modules of which engines cannot keep a part each.

    Args:
        name: of the module.
        mlp: of the DP model, arranged.
        grouped: whether its rows are grouped.

    Raises:
        UnviewableWeights: it is no gated MLP of this kind, or has biases.
    """
    layers = [getattr(mlp, kind, None) for kind in ("gate_up_proj", "down_proj")]
    activation = GroupedActivation if grouped else SiluAndMul
    if not isinstance(getattr(mlp, "act_fn", None), activation) or None in layers:
        raise UnviewableWeights(f"{name} ({type(mlp).__name__}) cannot be shared")
    if any(layer is not None and layer.bias is not None for layer in layers):
        raise UnviewableWeights(f"{name}: MLPs with biases cannot be shared")


def regroup_rows(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Return ``[gate|up]`` rows as ``[gate_0|up_0|...]``: group g holds the g-th part of each.

    Args:
        weight: ``[2 * intermediate, ...]``, gate rows first.
        groups: number of groups; must divide ``intermediate``.
    """
    halves = weight.view(2, groups, -1, *weight.shape[1:])
    return halves.transpose(0, 1).reshape(weight.shape)


def regroup(rows: torch.Tensor, groups: int) -> None:
    """Do that in place.

    Raises:
        UnviewableWeights: the rows do not make so many groups.
    """
    if rows.shape[0] % (2 * groups):
        raise UnviewableWeights(f"its rows, or whole blocks of them, do not make {groups} groups")
    rows.copy_(regroup_rows(rows, groups))
