"""Linear layers that are not fused: a range of outputs, a range of inputs, or the whole layer."""

from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
)

from shoal.runtime.engine.weights.rules.formats import format_of
from shoal.runtime.engine.weights.rules.shard_rule import (
    FullLayer,
    ShardRule,
    view_tensors,
    view_whole,
)
from shoal.runtime.engine.weights.rules.shards import Shard, UnviewableWeights, named
from shoal.runtime.engine.weights.rules.unquantised import PlainLinear
from shoal.runtime.served_weights import LayerKind


class LinearRule(ShardRule):
    """A layer whose format says where its tensors have outputs and inputs."""

    kind = LayerKind.LINEAR
    plain = PlainLinear

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """View the member's share of the tensors, and choose kernels that can read it."""
        with named(full.name):
            if getattr(layer, "disable_tp", False):
                view_tensors(layer, full, lambda _axes, tensor: tensor)
            else:
                self.cut(layer, full, shard)
            format_of(layer).bind_kernels(layer)

    def cut(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Make the layer's tensors views of this share of the full layer: a range of outputs."""
        dimension = format_of(full.module).axes(full.module)["weight"].outputs
        begin, size = shard.cut(full.module.weight.shape[dimension])
        view_tensors(layer, full, lambda axes, tensor: axes.take_outputs(tensor, begin, size))


class RowParallelRule(LinearRule):
    """A strided range of the weight's columns. The bias stays whole: vLLM adds it on rank 0."""

    layers = (RowParallelLinear,)
    of_heads = True

    def cut(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Take a range of inputs."""
        begin, size = shard.cut(full.module.input_size)
        view_tensors(layer, full, lambda axes, tensor: axes.take_inputs(tensor, begin, size))


class ColumnParallelRule(LinearRule):
    """A range of the weight's rows."""

    layers = (ColumnParallelLinear,)


class ReplicatedRule(LinearRule):
    """The whole layer on every member. Refuses linear layers that no earlier rule knows."""

    layers = (LinearBase,)

    def view(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Share the tensors as they are.

        Raises:
            UnviewableWeights: vLLM may divide the layer; the message names its class.
        """
        if not isinstance(layer, ReplicatedLinear):
            raise UnviewableWeights(f"{full.name} ({type(layer).__name__}) cannot be viewed")
        if format_of(layer).KEEPS_SHAPES:
            view_whole(layer, full)
        else:
            super().view(layer, full, shard)

    def cut(self, layer: nn.Module, full: FullLayer, shard: Shard) -> None:
        """Take the whole layer."""
        view_tensors(layer, full, lambda _axes, tensor: tensor)
