"""The model that runs a step by sequence, and which models it is refused for."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    override_forward_context,
)
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.v1.attention.backend import AttentionType

from shoal.runtime.engine.sequence.piecewise_graphs import CapturedSteps
from shoal.runtime.engine.sequence.ulysses import (
    ExchangedAttention,
    SequenceParallelModel,
    UnexchangeableAttention,
    check_exchangeable,
    exchanged_bytes,
    exchanged_layers,
)
from tests.runtime.engine.one_rank import tensor_parallel
from tests.runtime.engine.sequence.test_piecewise_graphs import capture, captured_as

HEADS, SIZE = 8, 8

# --- the model that stands in ---


class Halves:
    """An exchange of two members that is no exchange: this member has the first half."""

    share = 0

    @property
    def own_rows(self) -> range:
        return range(self.share)

    def share_of(self, num_tokens: int) -> int:
        return num_tokens // 2

    def begin(self, num_tokens: int, share: int | None) -> None:
        self.share = share or self.share_of(num_tokens)

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[: self.share]

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden, hidden], dim=-1)


def stand_in(
    base: Any,
    layers: dict[str, Any],
    captured: CapturedSteps | None = None,
    adapters: Any = None,
) -> Any:
    return SequenceParallelModel(
        nn.Module(), base, nullcontext, Halves(), layers, captured or CapturedSteps(), adapters
    )


def test_the_base_runs_in_a_context_of_its_own() -> None:
    layers, seen = {"layers.0.attn": object()}, list[str]()

    def base(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        context = get_forward_context()
        assert context.no_compile_layers is layers
        assert context.batch_descriptor == BatchDescriptor(3)
        assert context.cudagraph_runtime_mode is CUDAGraphMode.NONE
        # The mask that was there is of all tokens.
        assert context.is_padding is None
        seen.append("base")
        return input_ids.float()

    model = stand_in(base, layers)
    outside = ForwardContext({}, {}, {}, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    outside.is_padding = torch.zeros(6, dtype=torch.bool)
    before = vars(outside).copy()
    with override_forward_context(outside):
        hidden = model(torch.arange(6), torch.arange(6))
        assert get_forward_context() is outside
    assert vars(outside) == before
    assert hidden.tolist() == [0, 1, 2, 0, 1, 2]
    assert seen == ["base"]


def test_the_hidden_states_of_single_layers_are_gathered_too() -> None:
    """A draft model of EAGLE 3 reads them, for all tokens."""

    def base(input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return input_ids + 10, [input_ids, -input_ids]

    with override_forward_context(ForwardContext({}, {}, {})):
        last, of_layers = stand_in(base, {})(torch.arange(4), torch.arange(4))
    assert last.tolist() == [10, 11, 10, 11]
    assert [hidden.tolist() for hidden in of_layers] == [[0, 1, 0, 1], [0, -1, 0, -1]]


def test_a_step_that_fails_leaves_the_context_as_it_was() -> None:
    def base(**_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    model = stand_in(base, {})
    outside = ForwardContext({}, {}, {}, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    before = vars(outside).copy()
    with override_forward_context(outside), pytest.raises(RuntimeError, match="out of memory"):
        model(torch.arange(6), torch.arange(6))
    assert vars(outside) == before


@pytest.mark.parametrize(
    ("tokens", "share"),
    [(8, 4), (14, 8), (16, 8), (1026, 576), (1152, 576), (2300, 1152), (2306, None)],
)
def test_what_graphs_were_captured_for_is_replayed_on_a_padded_share(
    tokens: int, share: int | None
) -> None:
    """Graphs read from where they were captured with; there are none of more than the largest."""
    buffers = torch.full((2, 1152), -1)
    captured, layers = capture(buffers, sizes=(1152, 576, 8, 4)), {"layers.0.attn": object()}
    rows = share or tokens // 2

    def base(input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        context = get_forward_context()
        assert context.no_compile_layers is layers
        assert context.batch_descriptor == BatchDescriptor(rows)
        piecewise = context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE
        in_place = [
            read.data_ptr() == buffer.data_ptr()
            for read, buffer in zip((input_ids, positions), buffers, strict=True)
        ]
        assert [piecewise, *in_place] == [share is not None] * 3
        return torch.stack([input_ids, positions])

    outside = ForwardContext({}, {}, {}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    with override_forward_context(outside):
        hidden = stand_in(base, layers, captured)(torch.arange(tokens), torch.arange(tokens) + 10)
    own = list(range(rows))
    assert hidden.tolist() == [2 * own, 2 * [place + 10 for place in own]]
    assert outside.cudagraph_runtime_mode is CUDAGraphMode.NONE


class Adapters:
    """``StepAdapters`` of a step of so many kinds of tokens."""

    def __init__(self, kinds: int) -> None:
        self.kinds = kinds
        self.active: range | None = None

    def activate(self, rows: range) -> None:
        self.active = rows


@pytest.mark.parametrize(("kinds", "loras"), [(0, 0), (3, 5)])
def test_the_base_has_the_adapters_of_the_padded_share_and_graphs_that_have_some(
    kinds: int, loras: int
) -> None:
    captured, adapters = capture(torch.zeros(2, 8), (8, 4), loras=(5, 0)), Adapters(kinds)

    def base(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        assert get_forward_context().batch_descriptor == captured_as(8, loras)
        assert adapters.active == range(8)
        return input_ids

    with override_forward_context(ForwardContext({}, {}, {})):
        stand_in(base, {}, captured, adapters)(torch.arange(14), torch.arange(14))
    assert adapters.active == range(8)


# --- refusals ---


@pytest.fixture
def config() -> Iterator[Any]:
    """What of a configuration is asked, and where layers that are made now are registered."""
    config = VllmConfig()
    model = SimpleNamespace(
        model="some/model",
        supports_multimodal_inputs=False,
        is_encoder_decoder=False,
        enable_prompt_embeds=False,
        uses_mrope=False,
        is_mm_prefix_lm=False,
        rswa_window=None,
        dtype=torch.float32,
    )
    config.model_config = model
    with set_current_vllm_config(config):
        yield config


class Layer(nn.Module):
    """An attention module as vLLM's model classes have them."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        with tensor_parallel(0, 1):
            self.qkv_proj = QKVParallelLinear(64, SIZE, HEADS, 4)
            self.o_proj = RowParallelLinear(64, 64)
        self.q_norm = nn.RMSNorm(32)
        self.attn = attention


def plain(prefix: str = "layers.0.attn", **options: Any) -> Attention:
    return Attention(HEADS, 32, 1.0, num_kv_heads=4, prefix=prefix, **options)


def refusal(config: Any, layer: Layer, *, reorders: bool = True) -> str:
    with pytest.raises(UnexchangeableAttention) as refused:
        check_exchangeable(config, layer, reorders=reorders)
    message = str(refused.value)
    assert message.startswith("some/model cannot run by sequence: ")
    assert message.endswith("; use --max-sp 1")
    return message


def test_plain_attention_is_exchanged_in_any_order(config: Any) -> None:
    for reorders in (False, True):
        config.compilation_config.static_forward_context.clear()
        check_exchangeable(config, Layer(plain()), reorders=reorders)


def test_adapters_are_no_obstacle(config: Any) -> None:
    """vLLM has put its layers for them around the projections."""
    layer = Layer(plain())
    for name in ("qkv_proj", "o_proj"):
        wrapper = BaseLayerWithLoRA()
        wrapper.base_layer = getattr(layer, name)
        setattr(layer, name, wrapper)
    check_exchangeable(config, layer, reorders=True)


def test_a_sliding_window_is_no_obstacle(config: Any) -> None:
    check_exchangeable(config, Layer(plain(per_layer_sliding_window=64)), reorders=True)


def test_members_get_heads_or_hidden_states_whichever_are_more(config: Any) -> None:
    plain()
    config.model_config.get_hidden_size = lambda: 256
    assert exchanged_bytes(config, copies=1) == 4 * (HEADS * 32 + 2 * 4 * 32)
    assert exchanged_bytes(config, copies=3) == 4 * (HEADS * 32 + 3 * 2 * 4 * 32)
    config.model_config.get_hidden_size = lambda: 1024
    assert exchanged_bytes(config, copies=1) == 4 * 1024


def test_layers_of_a_draft_model_stay_as_they_are(config: Any) -> None:
    """They run beside the step, and its model does not have them."""
    layer = Layer(plain())
    drafting = plain("layers.1.attn", alibi_slopes=[0.5] * HEADS)
    assert "layers.1.attn has ALiBi slopes" in refusal(config, layer, reorders=False)
    drafting.is_draft_layer = True
    check_exchangeable(config, layer, reorders=True)
    exchange: Any = SimpleNamespace(kv_parts=1)
    layers = exchanged_layers(config, config, exchange)
    assert isinstance(layers["layers.0.attn"], ExchangedAttention)
    assert layers["layers.1.attn"] is drafting


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        pytest.param(lambda: plain(alibi_slopes=[0.5] * HEADS), "ALiBi slopes", id="alibi"),
        pytest.param(
            lambda: plain(attn_type=AttentionType.ENCODER_ONLY),
            "is encoder_only attention",
            id="encoder",
        ),
        pytest.param(
            lambda: ChunkedLocalAttention(HEADS, 32, 1.0, 128, prefix="layers.0.attn"),
            "(ChunkedLocalAttention) is no plain attention",
            id="subclass",
        ),
    ],
)
def test_attention_with_more_than_heads_is_refused(
    config: Any, attention: Callable[[], Attention], reason: str
) -> None:
    message = refusal(config, Layer(attention()))
    assert "layers.0.attn" in message
    assert reason in message


def test_a_layer_that_shares_kv_is_refused(config: Any) -> None:
    layer = Layer(plain())
    layer.attn.kv_sharing_target_layer_name = "layers.1.attn"
    assert "shares another layer's KV" in refusal(config, layer)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("supports_multimodal_inputs", "inputs are not tokens alone"),
        ("is_encoder_decoder", "inputs are not tokens alone"),
        ("enable_prompt_embeds", "inputs are not tokens alone"),
        ("uses_mrope", "positions have several dimensions"),
    ],
)
def test_a_model_of_more_than_tokens_is_refused(config: Any, field: str, reason: str) -> None:
    setattr(config.model_config, field, True)
    assert reason in refusal(config, Layer(plain()))


def test_heads_that_more_than_two_projections_know_keep_their_order(config: Any) -> None:
    layer = Layer(plain())
    layer.q_norm = nn.RMSNorm(32 * HEADS)
    check_exchangeable(config, layer, reorders=False)
    assert "RMSNorm, which has weights of its own for each head" in refusal(config, layer)
    layer.q_norm = nn.RMSNorm(32)
    with tensor_parallel(0, 1):
        layer.qkv_proj = ColumnParallelLinear(64, 128)
    check_exchangeable(config, layer, reorders=False)
    assert "is not between one QKVParallelLinear and one RowParallelLinear" in refusal(
        config, layer
    )
