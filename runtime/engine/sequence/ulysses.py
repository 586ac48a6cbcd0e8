"""Steps of a group by sequence: Arctic Ulysses on the TP layout's KV cache, without its model.

Shift Parallelism, 3.2 (Algorithms 1 and 2). The narrower base layout's own model, as it was
compiled, runs on this member's share of the step's tokens. Only its attention differs: when vLLM's
opaque attention operators look a layer up in the forward context, they find one that exchanges
tokens for heads, runs the TP layout's attention on the TP layout's KV cache and metadata, and
exchanges back. So a step may run either way, and needs no further weights, cache or graphs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.v1.attention.backend import AttentionType

from shoal.runtime.engine.sequence.head_exchange import HeadExchange
from shoal.runtime.engine.sequence.piecewise_graphs import CapturedStep, CapturedSteps
from shoal.runtime.engine.sequence.step_adapters import StepAdapters
from shoal.runtime.engine.weights.store import without_adapters

# --- what can be exchanged ------------------------------------------------------------------------


class UnexchangeableAttention(ValueError):
    """A model that cannot run by sequence; the message names it and the reason."""


def check_exchangeable(config: VllmConfig, model: nn.Module, *, reorders: bool) -> None:
    """Check that every attention layer can be computed for some heads and all tokens.

    Args:
        config: vLLM's configuration of the DP layout, whose model is loaded.
        model: the DP model.
        reorders: whether a layout's heads are not in the order of its members (``head_order``).

    Raises:
        UnexchangeableAttention: a layer cannot.
    """
    problems = _model_problems(config)
    parents = _parents(model) if reorders else {}
    for name, layer in _attention_of(config):
        problems += [f"{name} {problem}" for problem in _layer_problems(layer)]
        if reorders and not problems:
            problems += [f"{name} {problem}" for problem in _order_problems(parents, layer)]
    if problems:
        raise _refusal(config, problems[0])


def _attention_of(config: VllmConfig) -> Iterator[tuple[str, Any]]:
    """Yield the names and attention layers of a loaded model.

    Those of its draft model are left out (``DraftModelSpeculator.load_model`` marks them). They are
    registered at the same place, but run in no step: a draft model runs after it, in TP.
    """
    for name, layer in config.compilation_config.static_forward_context.items():
        if isinstance(layer, AttentionLayerBase) and not layer.is_draft_layer:
            yield name, layer


def _refusal(config: VllmConfig, problem: str) -> UnexchangeableAttention:
    return UnexchangeableAttention(
        f"{config.model_config.model} cannot run by sequence: {problem}; use --max-sp 1"
    )


def _model_problems(config: VllmConfig) -> list[str]:
    model = config.model_config
    problems = {
        "its inputs are not tokens alone": model.supports_multimodal_inputs
        or model.is_encoder_decoder
        or model.enable_prompt_embeds,
        "its positions have several dimensions": model.uses_mrope,
    }
    return [problem for problem, holds in problems.items() if holds]


def _layer_problems(layer: Any) -> Iterator[str]:
    if type(layer) is not Attention:
        yield f"({type(layer).__name__}) is no plain attention over heads"
        return
    problems = {
        f"is {AttentionType(layer.attn_type).value} attention": layer.attn_type
        != AttentionType.DECODER,
        "shares another layer's KV": layer.kv_sharing_target_layer_name is not None,
        "has ALiBi slopes for each head": getattr(layer.impl, "alibi_slopes", None) is not None,
        "has heads of a size that is not a multiple of 8": bool(
            layer.head_size % 8 or layer.head_size_v % 8
        ),
    }
    yield from (problem for problem, holds in problems.items() if holds)


def _parents(model: nn.Module) -> dict[nn.Module, nn.Module]:
    return {child: module for module in model.modules() for child in module.children()}


def _order_problems(parents: Mapping[nn.Module, nn.Module], layer: Attention) -> Iterator[str]:
    """Yield why the heads around an attention layer cannot change their order.

    The layout views two projections in that order; nothing else there may know heads apart.
    """
    others = [without_adapters(child) for child in parents[layer].children() if child is not layer]
    projections = (QKVParallelLinear, RowParallelLinear)
    for kind in projections:
        if sum(isinstance(child, kind) for child in others) != 1:
            yield f"is not between one {projections[0].__name__} and one {projections[1].__name__}"
            return
    for child in others:
        sizes = {parameter.numel() for parameter in child.parameters()}
        if not isinstance(child, projections) and not sizes <= {layer.head_size}:
            yield f"is beside {type(child).__name__}, which has weights of its own for each head"


# --- the model ------------------------------------------------------------------------------------


class ExchangedAttention:
    """What vLLM's attention operators find as a layer, and as its impl, in a step by sequence.

    vLLM updates the KV cache in a call of its own before attention. Here that call only notes where
    to write; ``forward`` does the update, after one exchange of queries, keys and values.

    Args:
        layer: the TP layout's attention layer.
        exchange: the group's exchange.
    """

    def __init__(self, layer: Attention, exchange: HeadExchange) -> None:
        self.impl = self
        self._layer = layer
        self._exchange = exchange
        self._slots: torch.Tensor | None = None

    @property
    def kv_cache(self) -> torch.Tensor:
        """The TP layout's KV cache of this layer."""
        cache: torch.Tensor = self._layer.kv_cache
        return cache

    def do_kv_cache_update(
        self,
        _layer: object,
        _key: torch.Tensor,
        _value: torch.Tensor,
        _kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Take note of where this step's keys and values go (``unified_kv_cache_update``)."""
        self._slots = slot_mapping

    def forward(
        self,
        _layer: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        *,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write to ``output`` what the layer computes; all are ``[share, heads, size]``.

        Raises:
            NotImplementedError: vLLM wants the output quantised in blocks.
        """
        if output_block_scale is not None:
            raise NotImplementedError("outputs quantised in blocks are not exchanged")
        exchange, layer = self._exchange, self._layer
        query, key, value = exchange.to_heads(query, key, value)
        if self._slots is not None:
            layer.impl.do_kv_cache_update(layer, key, value, kv_cache, self._slots)
            self._slots = None
        rows = exchange.sp * exchange.share
        heads = exchange.new_heads(output, query.shape[1])
        if rows > exchange.num_tokens:
            # These rows may hold NaNs, and a scale may be computed over all rows.
            heads[exchange.num_tokens :].zero_()
        layer.impl.forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output=heads[: exchange.num_tokens],
            output_scale=output_scale,
        )
        exchange.to_tokens(heads, output)
        return output


def exchanged_layers(
    config: VllmConfig, base: VllmConfig, exchange: HeadExchange
) -> dict[str, Any]:
    """Return what a step by sequence finds in its forward context: layers by name.

    Args:
        config: configuration of the TP layout, whose attention layers are run.
        base: configuration of the base layout, whose model runs.
        exchange: the group's exchange.

    Raises:
        UnexchangeableAttention: a layer's number of KV heads is not the model's.
    """
    layers = dict(base.compilation_config.static_forward_context)
    for name, layer in _attention_of(config):
        if layer.num_kv_heads * exchange.kv_parts != layers[name].num_kv_heads:
            raise _refusal(config, f"{name} has a number of KV heads of its own")
        layers[name] = ExchangedAttention(layer, exchange)
    return layers


def exchanged_bytes(base: VllmConfig, copies: int) -> int:
    """Return the most bytes of one token that all members together get in an exchange.

    Args:
        base: configuration of the layout whose model runs: exchanges take its queries, keys and
            values, or its hidden state.
        copies: how many members get the same keys and values.
    """
    widths = [base.model_config.get_hidden_size()]
    for _, layer in _attention_of(base):
        keys_and_values = copies * layer.num_kv_heads * (layer.head_size + layer.head_size_v)
        widths.append(layer.num_heads * layer.head_size + keys_and_values)
    return int(max(widths) * base.model_config.dtype.itemsize)


_descriptor = lru_cache(maxsize=1024)(BatchDescriptor)


class SequenceParallelModel:
    """Stands in for a TP layout's model while a step runs by sequence.

    Everything but the forward pass is the TP layout's, also its vocabulary-parallel head and its
    draft model. That one proposes tokens after the step, from the hidden states of all tokens.

    Args:
        model: the TP layout's model.
        base: the model of the base layout.
        in_base: makes the base layout's groups vLLM's current ones.
        exchange: the group's exchange.
        layers: see ``exchanged_layers``.
        captured: the base layout's captured steps, which may be replayed.
        adapters: what the model runner tells of each step's adapters; None: there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        in_base: Callable[[], AbstractContextManager[None]],
        exchange: HeadExchange,
        layers: Mapping[str, Any],
        captured: CapturedSteps,
        adapters: StepAdapters | None = None,
    ) -> None:
        self._model = model
        self._base = base
        self._in_base = in_base
        self._exchange = exchange
        self._layers = layers
        self._captured = captured
        self.adapters = adapters
        """What the model runner has for its LoRA manager while a step runs by sequence."""

    def __getattr__(self, name: str) -> Any:
        """Answer as the TP layout's model."""
        return getattr(self._model, name)

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the last hidden states of all tokens, ``[tokens, hidden]``, on every member.

        If a draft model of EAGLE 3 reads hidden states of single layers, the model returns these in
        a list, too (``EagleModelMixin``). They are gathered as well, each ``[tokens, hidden]``.
        """
        num_tokens = input_ids.shape[0]
        kinds = 0 if self.adapters is None else self.adapters.kinds
        captured = self._captured.fitting(self._exchange.share_of(num_tokens), kinds)
        with self._entered(num_tokens, captured):
            if self.adapters is not None:
                self.adapters.activate(self._exchange.own_rows)
            ids, positions = self._own(input_ids, positions, captured)
            made = self._base(
                input_ids=ids,
                positions=positions,
                intermediate_tensors=intermediate_tensors,
                inputs_embeds=inputs_embeds,
            )
        gather = self._exchange.gather
        if isinstance(made, torch.Tensor):
            return gather(made)
        last, of_layers = made
        return gather(last), [gather(hidden) for hidden in of_layers]

    def _own(
        self, input_ids: torch.Tensor, positions: torch.Tensor, captured: CapturedStep | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this member's share of both, in the tensors that replayed graphs read, if any."""
        ids, positions = self._exchange.own(input_ids), self._exchange.own(positions)
        if captured is None:
            return ids, positions
        return captured.input_ids.copy_(ids), captured.positions.copy_(positions)

    def _entered(self, num_tokens: int, captured: CapturedStep | None) -> "_BySequence":
        """Enter a step by sequence: the base layout's groups, and exchanged attention."""
        self._exchange.begin(num_tokens, captured.descriptor.num_tokens if captured else None)
        # Only the base's piecewise graphs: whole graphs would contain its own attention.
        mode = CUDAGraphMode.PIECEWISE if captured else CUDAGraphMode.NONE
        descriptor = captured.descriptor if captured else _descriptor(self._exchange.share)
        return _BySequence(self._layers, mode, descriptor, self._in_base())


class _BySequence:
    """While entered, vLLM's context of the step is that of a step by sequence.

    The step's own context is changed and changed back. Making another one would take as long as all
    the rest, because the host's caches are cold between two steps.

    Args:
        layers: see ``exchanged_layers``.
        mode: which graphs are replayed.
        descriptor: the number of tokens that they are for.
        in_base: makes the base layout's groups vLLM's current ones.
    """

    __slots__ = ("_context", "_former", "_in_base", "_now")

    def __init__(
        self,
        layers: Mapping[str, Any],
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        in_base: AbstractContextManager[None],
    ) -> None:
        # The step's padding mask does not fit a share, and only routers of experts would read it.
        self._now = (layers, mode, descriptor, None)
        self._in_base = in_base

    def __enter__(self) -> None:
        self._in_base.__enter__()
        context = self._context = get_forward_context()
        self._former = (
            context.no_compile_layers,
            context.cudagraph_runtime_mode,
            context.batch_descriptor,
            context.is_padding,
        )
        self._set(self._now)

    def __exit__(self, *error: Any) -> None:
        self._set(self._former)
        self._in_base.__exit__(*error)

    def _set(self, values: tuple[Any, ...]) -> None:
        context = self._context
        (
            context.no_compile_layers,
            context.cudagraph_runtime_mode,
            context.batch_descriptor,
            context.is_padding,
        ) = values
