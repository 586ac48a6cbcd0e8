"""The exchange of tokens for heads, by all members at once; and which models it is refused for."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    override_forward_context,
)
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.v1.attention.backend import AttentionType

from runtime.engine.communicators import SpGroups
from runtime.engine.head_order import base_of, head_shard, peers_of
from runtime.engine.ulysses import (
    Entering,
    HeadExchange,
    SequenceParallelModel,
    UnexchangeableAttention,
    check_exchangeable,
)
from tests.runtime.engine.one_rank import tensor_parallel

HEADS, SIZE = 8, 8

# --- all members of a group, each in a thread with gloo groups of its own ---


class Members:
    """Every member's exchange of one group, in one process."""

    def __init__(self, degree: int, max_sp: int, kv_heads: int) -> None:
        self.degree, self.max_sp, self.kv_heads = degree, max_sp, kv_heads
        self._store = dist.HashStore()
        self.exchanges = self.each(lambda member: HeadExchange(self._groups(member)))

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """Return what every member's ``function`` returns; all run at the same time."""
        with ThreadPoolExecutor(self.degree) as pool:
            return list(pool.map(function, range(self.degree)))

    def _groups(self, member: int) -> SpGroups:
        peers = peers_of(self.degree, self.max_sp, self.kv_heads)
        within = self._group("within", member, peers.within)
        across = within and self._group("across", member, peers.across)
        return SpGroups(self._group("sp", member, peers.sp), across, within)

    def _group(self, kind: str, member: int, groups: Sequence[tuple[int, ...]]) -> Any:
        mine = next(group for group in groups if member in group)
        if len(mine) == 1 and kind != "sp":
            return None
        store = dist.PrefixStore(f"{kind}-{mine}", self._store)
        place, size = mine.index(member), len(mine)
        group = dist.ProcessGroup(store, place, size)
        gloo = dist.ProcessGroupGloo(store, place, size, timedelta(seconds=60))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group


def kept(tensor: torch.Tensor, shard: int, of: int) -> torch.Tensor:
    """Return a shard of the heads of ``[tokens, heads, size]`` as vLLM cuts them."""
    heads = tensor.shape[1]
    size = max(1, heads // of)
    return tensor.narrow(1, shard * heads // of, size)


@dataclass(frozen=True)
class Step:
    """What one step's attention gets, of the whole model and all tokens."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def of_base(self, members: Members, member: int) -> list[torch.Tensor]:
        """Return what the base's projections give a member: a share of the tokens, its heads."""
        base = base_of(members.degree, members.max_sp)
        shard = head_shard(member % base.tp, base.tp, members.max_sp)
        exchange = members.exchanges[member]
        parts = [kept(tensor, shard, base.tp) for tensor in (self.query, self.key, self.value)]
        # Side by side in one tensor, as a projection leaves them.
        sizes = [part.shape[1] for part in parts]
        rows = torch.stack([exchange.own(column) for column in torch.cat(parts, 1).flatten(1).T], 1)
        return list(rows.unflatten(1, (-1, SIZE)).split(sizes, 1))


def random_step(tokens: int, kv_heads: int, dtype: torch.dtype, query_heads: int = HEADS) -> Step:
    draw = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, heads, SIZE) for heads in (query_heads, kv_heads, kv_heads))
    return Step(*(torch.randn(shape, generator=draw).to(dtype) for shape in shapes))


SHAPES = [
    (degree, max_sp, kv_heads)
    for degree, max_sp, kv_heads in itertools.product((2, 4, 8), (2, 4, 8), (1, 2, 4, 8))
    if max_sp <= degree
]


@pytest.mark.parametrize(("degree", "max_sp", "kv_heads"), SHAPES)
def test_every_member_gets_the_heads_that_its_tp_layout_keeps(
    degree: int, max_sp: int, kv_heads: int
) -> None:
    """Of steps that the group divides, that it does not, and of fewer tokens than members."""
    members = Members(degree, max_sp, kv_heads)
    for tokens, dtype in ((16, torch.float32), (13, torch.bfloat16), (3, torch.float32)):
        step = random_step(tokens, kv_heads, dtype)

        def exchanged(member: int, step: Step = step) -> tuple[list[torch.Tensor], torch.Tensor]:
            exchange: HeadExchange = members.exchanges[member]
            exchange.begin(step.query.shape[0])
            inputs = step.of_base(members, member)
            heads = exchange.to_heads(*inputs)
            padded = heads[0].new_zeros(exchange.sp * exchange.share, *heads[0].shape[1:])
            padded[: exchange.num_tokens] = heads[0]
            output = torch.empty(inputs[0].shape, dtype=inputs[0].dtype)
            exchange.to_tokens(padded, output)
            assert torch.equal(output, inputs[0]), "there and back"
            return list(heads), exchange.gather(inputs[0].flatten(1))

        base = base_of(degree, max_sp)
        for member, (heads, gathered) in enumerate(members.each(exchanged)):
            shard = head_shard(member, degree, max_sp)
            for got, whole in zip(heads, (step.query, step.key, step.value), strict=True):
                assert torch.equal(got, kept(whole, shard, degree))
            place = head_shard(member % base.tp, base.tp, max_sp)
            assert torch.equal(gathered, kept(step.query, place, base.tp).flatten(1))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal grouped-query attention of ``[tokens, heads, size]`` each."""
    by_head = (tensor.transpose(0, 1) for tensor in (query, key, value))
    attended = nn.functional.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)
    return attended.transpose(0, 1)


def attended_by_sequence(members: Members, step: Step) -> list[torch.Tensor]:
    """Return what every member has of attention that all compute, each for its heads."""

    def attended(member: int) -> torch.Tensor:
        exchange: HeadExchange = members.exchanges[member]
        exchange.begin(step.query.shape[0])
        inputs = step.of_base(members, member)
        mine = attention(*exchange.to_heads(*inputs))
        heads = mine.new_zeros(exchange.sp * exchange.share, *mine.shape[1:])
        heads[: exchange.num_tokens] = mine
        output = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        exchange.to_tokens(heads, output)
        return output

    return members.each(attended)


def matching(members: Members, outputs: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Return whether every member has its tokens and heads of ``whole``, padding left aside."""
    found = []
    for member, output in enumerate(outputs):
        expected = Step(whole, whole[:, :1], whole[:, :1]).of_base(members, member)[0]
        real = expected.flatten(1).any(1)
        found.append(torch.allclose(output[real], expected[real]))
    return all(found)


WIDE_SHAPES = [
    (degree, max_sp, kv_heads)
    for degree, max_sp, kv_heads in itertools.product((4, 8), (2, 4, 8), (1, 2, 4))
    if max_sp <= degree
]


@pytest.mark.parametrize(("degree", "max_sp", "kv_heads"), WIDE_SHAPES)
def test_attention_by_sequence_is_that_of_the_whole_model(
    degree: int, max_sp: int, kv_heads: int
) -> None:
    """Three heads or six for each member, of fewer KV heads; 21 tokens leave padding."""
    members = Members(degree, max_sp, kv_heads)
    step = random_step(21, kv_heads, torch.float64, query_heads=24)
    outputs = attended_by_sequence(members, step)
    assert matching(members, outputs, attention(step.query, step.key, step.value))


def test_attention_to_other_kv_heads_is_another() -> None:
    """What the comparison above would say of KV heads that went to the wrong members."""
    members = Members(8, 8, 2)
    step = random_step(21, 2, torch.float64, query_heads=24)
    outputs = attended_by_sequence(members, step)
    assert matching(members, outputs, attention(step.query, step.key, step.value))
    swapped = attention(step.query, step.key.flip(1), step.value.flip(1))
    assert not matching(members, outputs, swapped)


def test_types_may_differ() -> None:
    """A backend may want queries as FP8 beside keys and values that are not."""
    members = Members(4, 4, 2)
    step = random_step(9, 2, torch.bfloat16)
    step = replace(step, query=step.query.to(torch.float8_e4m3fn).view(torch.uint8))

    def exchanged(member: int) -> Sequence[torch.Tensor]:
        exchange: HeadExchange = members.exchanges[member]
        exchange.begin(9)
        first = member * exchange.share
        share = slice(first, first + exchange.share)
        padded = [
            nn.functional.pad(tensor, (0, 0, 0, 0, 0, 12 - 9))[share]
            for tensor in (step.query, step.key, step.value)
        ]
        return exchange.to_heads(*padded)

    for member, (query, key, value) in enumerate(members.each(exchanged)):
        assert torch.equal(query, kept(step.query, member, 4))
        assert torch.equal(key, kept(step.key, member, 4))
        assert torch.equal(value, kept(step.value, member, 4))


def test_groups_connect_before_the_first_step() -> None:
    members = Members(8, 8, 4)
    members.each(lambda member: members.exchanges[member].connect(torch.device("cpu")))


# --- the model that stands in ---


class Halves:
    """An exchange of two members that is no exchange: this member has the first half."""

    share = 0

    def begin(self, num_tokens: int) -> None:
        self.share = num_tokens // 2

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[: self.share]

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden, hidden])


def test_the_base_runs_in_a_context_of_its_own_that_can_be_measured() -> None:
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

    @contextmanager
    def measured(manager: Entering, *args: Any) -> Iterator[None]:
        seen.append("in")
        with manager(*args):
            yield
        seen.append("out")

    exchange: Any = Halves()
    model: Any = SequenceParallelModel(nn.Module(), base, nullcontext, exchange, layers)
    model.entering = measured
    outside = ForwardContext({}, {}, {}, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    outside.is_padding = torch.zeros(6, dtype=torch.bool)
    before = vars(outside).copy()
    with override_forward_context(outside):
        hidden = model(torch.arange(6), torch.arange(6))
        assert get_forward_context() is outside
    assert vars(outside) == before
    assert hidden.tolist() == [0, 1, 2, 0, 1, 2]
    assert seen == ["in", "base", "out"]


def test_a_step_that_fails_leaves_the_context_as_it_was() -> None:
    def base(**_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    exchange: Any = Halves()
    model: Any = SequenceParallelModel(nn.Module(), base, nullcontext, exchange, {})
    outside = ForwardContext({}, {}, {}, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    before = vars(outside).copy()
    with override_forward_context(outside), pytest.raises(RuntimeError, match="out of memory"):
        model(torch.arange(6), torch.arange(6))
    assert vars(outside) == before


# --- refusals ---


@pytest.fixture
def config() -> Iterator[Any]:
    """What of a configuration is asked, and where layers that are made now are registered."""
    config = VllmConfig()
    model = SimpleNamespace(
        model="some/model",
        is_multimodal_model=False,
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


def plain(**options: Any) -> Attention:
    return Attention(HEADS, 32, 1.0, num_kv_heads=4, prefix="layers.0.attn", **options)


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


def test_a_sliding_window_is_no_obstacle(config: Any) -> None:
    check_exchangeable(config, Layer(plain(per_layer_sliding_window=64)), reorders=True)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        pytest.param(lambda: plain(alibi_slopes=[0.5] * HEADS), "ALiBi slopes", id="alibi"),
        pytest.param(lambda: plain(sinks=torch.zeros(HEADS)), "sinks for each head", id="sinks"),
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
        ("is_multimodal_model", "inputs are not tokens alone"),
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
