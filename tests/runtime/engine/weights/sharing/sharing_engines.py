"""Engines of one process that keep a part of some layers each."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import PPMissingLayer

from shoal.policies.values.layouts import Layout
from shoal.runtime.engine.groups.head_order import head_shard
from shoal.runtime.engine.weights.shared_weights import SharedWeights
from shoal.runtime.engine.weights.sharing.device_pages import DevicePages
from shoal.runtime.engine.weights.sharing.device_shards import DeviceShards
from shoal.runtime.engine.weights.sharing.nested_order import Heads
from shoal.runtime.engine.weights.sharing.pages import HostPages, Pages
from shoal.runtime.engine.weights.sharing.shard_memory import HostShards, ShardMemory
from shoal.runtime.engine.weights.sharing.shared_layers import SharedLayers
from shoal.runtime.engine.weights.sharing.shared_store import SharedStore
from shoal.runtime.engine.weights.sharing.shared_weight import Degree
from shoal.runtime.engine.weights.sharing.slots import Copier, HostCopier, WeightSlots, stream_by
from shoal.runtime.engine.weights.sharing.stream_copier import StreamCopier
from shoal.runtime.engine.weights.store import ResidentWeights
from shoal.runtime.engine.weights.view_loader import arrange_weights, view_weights
from tests.runtime.engine.one_rank import tensor_parallel
from tests.runtime.engine.weights.sharing.simulated_cuda import HostDriver


class Sizes(NamedTuple):
    """Of an MLP."""

    hidden: int
    inner: int


PLAIN, LAYERS, ENGINES = Sizes(96, 32), 3, 4
"""A half of ``gate_up_proj`` is three pages in fp32, and one of ``down_proj`` a page and a half."""
HEADS, KV_HEADS, HEAD_SIZE = 8, 4, 8
TOKENS = 250
"""Of the vocabulary, which vLLM pads to 256."""
EDGES = torch.tensor([0, 63, 64, 127, 128, TOKENS - 1])
"""Tokens that are the first or the last one of a part."""
BY_HEADS = Heads(KV_HEADS, partial(head_shard, max_sp=2))


def by_inputs(quant: SharedWeights, name: str, inputs: int, outputs: int) -> RowParallelLinear:
    """Return a layer of which members have some of the inputs, and whose outputs are not summed."""
    return RowParallelLinear(
        inputs, outputs, bias=False, quant_config=quant, prefix=name, reduce_results=False
    )


class Mlp(nn.Module):
    """As in vLLM's Llama."""

    def __init__(
        self, quant: SharedWeights, name: str, sizes: Sizes, act: nn.Module, *, bias: bool
    ) -> None:
        super().__init__()
        hidden, inner = sizes
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner] * 2, bias=bias, quant_config=quant, prefix=f"{name}.gate_up_proj"
        )
        self.act_fn = act
        self.down_proj = by_inputs(quant, f"{name}.down_proj", inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(x))
        return x


class Attention(nn.Module):
    """Projections as in vLLM's Qwen2, and between them what each head does for itself."""

    def __init__(self, quant: SharedWeights, name: str, hidden: int, head_size: int) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            *(hidden, head_size, HEADS, KV_HEADS),
            bias=True,
            quant_config=quant,
            prefix=f"{name}.qkv_proj",
        )
        self.o_proj = by_inputs(quant, f"{name}.o_proj", HEADS * head_size, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(x)
        heads = qkv.view(len(x), -1, self.qkv_proj.head_size)
        kv_heads = self.qkv_proj.num_kv_heads
        q, k, v = heads.split([self.qkv_proj.num_heads, kv_heads, kv_heads], dim=1)
        q = q.view(len(x), kv_heads, -1, self.qkv_proj.head_size)
        x, _ = self.o_proj((q.tanh() * k.unsqueeze(2) + v.unsqueeze(2)).reshape(len(x), -1))
        return x


class Model(nn.Module):
    """MLPs, and attention if it has any, in blocks."""

    def __init__(
        self,
        quant: SharedWeights,
        act: type[nn.Module] = SiluAndMul,
        *,
        sizes: Sizes = PLAIN,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            Mlp(quant, f"mlps.{layer}", sizes, act(), bias=bias) for layer in range(LAYERS)
        )

    @property
    def steps(self) -> list[nn.Module]:
        """What a step computes, in its order."""
        return [mlp for mlp in self.mlps if isinstance(mlp, Mlp)]


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, quant: SharedWeights, name: str, sizes: Sizes, head_size: int) -> None:
        super().__init__()
        self.attn = Attention(quant, f"{name}.attn", sizes.hidden, head_size)
        self.mlp = Mlp(quant, f"{name}.mlp", sizes, SiluAndMul(), bias=False)


class Decoder(Model):
    """Has attention, too."""

    def __init__(self, quant: SharedWeights, *, sizes: Sizes, head_size: int = HEAD_SIZE) -> None:
        nn.Module.__init__(self)
        self.blocks = nn.ModuleList(
            Block(quant, f"blocks.{layer}", sizes, head_size) for layer in range(LAYERS)
        )
        self.mlps = [block.mlp for block in self.blocks]  # type: ignore[assignment]

    @property
    def steps(self) -> list[nn.Module]:
        """What a step computes, in its order."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        return [part for block in blocks for part in (block.attn, block.mlp)]


class Embedding(nn.Module):
    """Embeddings as vLLM's models make them: without their name."""

    def __init__(self, quant: SharedWeights, hidden: int) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(
            TOKENS, hidden, quant_config=quant, reduce_results=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x[:, 0].mul(1e6).long() % TOKENS
        embedded: torch.Tensor = self.tokens(torch.cat([tokens, EDGES]))
        return embedded


class Head(nn.Module):
    """An LM head. A member has zeros where the logits are others'."""

    def __init__(self, quant: SharedWeights, name: str, hidden: int) -> None:
        super().__init__()
        self.lm_head = ParallelLMHead(
            TOKENS, hidden, bias=True, quant_config=quant, prefix=f"{name}.lm_head"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.lm_head
        logits = head.quant_method.apply(head, x, bias=head.bias)
        before = head.tp_rank * logits.shape[1]
        after = head.num_embeddings_padded - before - logits.shape[1]
        return nn.functional.pad(logits, (before, after))


class Language(Decoder):
    """Has a vocabulary, too."""

    def __init__(self, quant: SharedWeights, *, sizes: Sizes) -> None:
        super().__init__(quant, sizes=sizes)
        self.embedding = Embedding(quant, sizes.hidden)
        self.head = Head(quant, "head", sizes.hidden)

    @property
    def steps(self) -> list[nn.Module]:
        """What a step computes, in its order."""
        steps: list[nn.Module] = [*super().steps]
        if isinstance(self.embedding.tokens, VocabParallelEmbedding):
            steps.insert(0, self.embedding)
        if isinstance(self.head.lm_head, ParallelLMHead):
            steps.append(self.head)
        return steps


STAGES: tuple[range, ...] = (range(2), range(2, LAYERS))
"""Which layers the stages of a pipeline have."""


def keep_stage(model: Any, stage: int) -> None:
    """Leave a model the layers of a stage, as vLLM does: others do nothing under the same names."""
    layers = model.blocks if isinstance(model, Decoder) else model.mlps
    for number in set(range(LAYERS)) - set(STAGES[stage]):
        layers[number] = PPMissingLayer()
    if isinstance(model, Language) and stage:
        model.embedding.tokens = PPMissingLayer()
    elif isinstance(model, Language):
        model.head.lm_head = PPMissingLayer()


def load(model: Model) -> None:
    """Load weights that are not quantised."""
    draw = torch.Generator().manual_seed(5)
    for mlp in model.mlps:
        for half in range(2):
            rows = torch.randn(PLAIN.inner, PLAIN.hidden, generator=draw)
            mlp.gate_up_proj.weight.weight_loader(mlp.gate_up_proj.weight, rows, half)
        down = torch.randn(PLAIN.hidden, PLAIN.inner, generator=draw)
        mlp.down_proj.weight.weight_loader(mlp.down_proj.weight, down)


def load_decoder(model: Any) -> None:
    """Load weights of a ``Decoder`` that are not quantised."""
    load(model)
    draw = torch.Generator().manual_seed(7)
    for block in model.blocks:
        qkv, output = block.attn.qkv_proj, block.attn.o_proj
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            for parameter, shape in ((qkv.weight, (PLAIN.hidden,)), (qkv.bias, ())):
                rows = torch.randn(heads * HEAD_SIZE, *shape, generator=draw)
                parameter.weight_loader(parameter, rows, name)
        columns = torch.randn(PLAIN.hidden, HEADS * HEAD_SIZE, generator=draw)
        output.weight.weight_loader(output.weight, columns)


def load_language(model: Any) -> None:
    """Load weights of a ``Language``."""
    load_decoder(model)
    draw = torch.Generator().manual_seed(9)
    embedding, head = model.embedding.tokens.weight, model.head.lm_head
    for parameter, shape in ((embedding, (PLAIN.hidden,)), (head.weight, (PLAIN.hidden,))):
        parameter.weight_loader(parameter, torch.randn(TOKENS, *shape, generator=draw))
    head.bias.weight_loader(head.bias, torch.randn(TOKENS, generator=draw))


class Weights(NamedTuple):
    """What weights engines have."""

    sizes: Sizes
    load: Callable[[Model], None]
    """Loads the whole model's."""
    inner: Callable[[], QuantizationConfig | None] = lambda: None
    """Makes vLLM's configuration of a quantised checkpoint."""
    model: Callable[..., Model] = Model
    heads: Heads | None = None
    """What engines share of attention."""
    vocabulary: bool = False
    """Whether they share the embeddings and the LM head."""
    adapters: bool = False
    """Whether vLLM puts layers around those of the DP model that add what adapters compute."""

    def config(self, *, views: bool) -> SharedWeights:
        """Return the configuration of a layout."""
        config = SharedWeights(views=views, inner=self.inner())
        config.packed_modules_mapping = {
            "gate_up_proj": ["gate_proj", "up_proj"],
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        }
        return config

    def outputs(self, model: Model) -> list[torch.Tensor]:
        """Return what each part of the model makes of the same input, in a step's order, twice."""
        draw = torch.Generator().manual_seed(3)
        x = torch.randn(5, self.sizes.hidden, generator=draw, dtype=torch.float32)
        x = x.to(torch.get_default_dtype())
        return [part(x.clone()) for _ in range(2) for part in model.steps]

    def whole(self) -> Model:
        """Return the DP model of an engine that shares nothing, with its rows grouped."""
        with tensor_parallel(0, 1):
            model = self.model(self.config(views=False), sizes=self.sizes)
            self.load(model)
        arrange_weights(ResidentWeights(model), ENGINES)
        return model


class Adapted(BaseLayerWithLoRA):  # type: ignore[misc]
    """Stands in for vLLM's layers with adapters, of which no request names one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_layer, name)

    @property
    def bias(self) -> torch.Tensor | None:
        bias: torch.Tensor | None = self.base_layer.bias
        return bias

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x)


def put_adapters_around(model: Any) -> None:
    for part in model.steps:
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            if hasattr(part, name):
                setattr(part, name, Adapted(getattr(part, name)))


UNQUANTISED = Weights(PLAIN, load)
DECODER = Weights(PLAIN, load_decoder, model=Decoder, heads=BY_HEADS)
LANGUAGE = Weights(PLAIN, load_language, model=Language, heads=BY_HEADS, vocabulary=True)


Parts = tuple[ShardMemory, Copier, Pages]
Kind = Callable[[], Parts]
"""Makes an engine's memory, what copies in it, and what exchanges it."""


def on_cpu() -> Parts:
    return HostShards("test"), HostCopier(), HostPages()


def on_simulated_gpu() -> Parts:
    driver: Any = HostDriver()
    device = torch.device("cpu")
    return DeviceShards(device, driver), StreamCopier(device, driver), DevicePages(device, driver)


class SharingEngine:
    """One engine: its DP model, of which it keeps a part."""

    made: ClassVar[list["SharingEngine"]] = []
    """Those of this test, whose descriptors are closed after it."""

    def __init__(
        self,
        directory: Path,
        number: int,
        share: int,
        groups: int = ENGINES,
        kind: Kind = on_cpu,
        weights: Weights = UNQUANTISED,
    ) -> None:
        self.number, self._weights = number, weights
        memory, copier, self.pages = kind()
        self.slots = WeightSlots(copier)
        self.mlps = SharedLayers(
            number, Degree(share, groups), directory, memory, self.slots, self.pages
        )
        self.mlps.heads = weights.heads
        self.mlps.shares_vocabulary = weights.vocabulary
        self.mlps.has_adapters = weights.adapters
        quant = weights.config(views=False)
        quant.shared = self.mlps.method
        with tensor_parallel(0, 1):
            self.dp = weights.model(quant, sizes=weights.sizes)
            weights.load(self.dp)
        if weights.adapters:
            put_adapters_around(self.dp)
        self.store = SharedStore(self.dp, self.mlps)
        arrange_weights(self.store, groups)
        self.mlps.whole.patience = 0.0
        self.made.append(self)

    def complete(self) -> None:
        self.mlps.complete(self.dp, dummy=False)
        self.mlps.whole.find_stages(self.number, [len(STAGES)])
        self.mlps.stream_in(self.dp, Layout())

    def member(self, tp: int, pp: int = 1) -> Model:
        """Return the engine's model in a TP layout, or in a pipeline of two stages."""
        rank, layout = self.number % tp, Layout(tp=tp, pp=pp)
        with tensor_parallel(rank, tp):
            model = self._weights.model(self._weights.config(views=True), sizes=self._weights.sizes)
            if pp > 1:
                keep_stage(model, layout.place(self.number % layout.world_size).stage)
            view_weights(model, self.store, layout, rank)
        self.mlps.stream_in(model, layout)
        return model

    @cached_property
    def lent(self) -> list[torch.Tensor]:
        """Memory that KV lends for all weights."""
        return self._lent(1)

    def _lent(self, stages: int) -> list[torch.Tensor]:
        sizes = self.mlps.whole.moving_bytes(stages)
        return list(self.pages.create(sizes).split(sizes))

    def be_whole(self, stages: int = 1) -> None:
        lent = self.lent if stages == 1 else self._lent(stages)
        self.mlps.fill_whole(lent, stages)()
        self.mlps.be_whole()

    def outputs(self, tp: int, pp: int = 1) -> list[torch.Tensor]:
        stream_by(self.slots)
        return self._weights.outputs(self.dp if tp * pp == 1 else self.member(tp, pp))


def pipeline_outputs(engines: list[SharingEngine], tp: int) -> list[torch.Tensor]:
    """Return what the members of a pipeline of two stages compute, in the order of ``outputs``."""
    steps: list[list[torch.Tensor]] = [[], []]
    for first in range(0, len(engines), tp):
        members = [engine.outputs(tp, len(STAGES)) for engine in engines[first : first + tp]]
        sums = [torch.stack(parts).sum(0) for parts in zip(*members, strict=True)]
        for number, step in enumerate(steps):
            half = len(sums) // 2
            step += sums[number * half : (number + 1) * half]
    return [*steps[0], *steps[1]]


def node(
    directory: Path, share: int, kind: Kind = on_cpu, weights: Weights = UNQUANTISED
) -> list[SharingEngine]:
    """Return engines that have met."""
    engines = [
        SharingEngine(directory, number, share, kind=kind, weights=weights)
        for number in range(ENGINES)
    ]
    # Not by ``map``: when one fails, it does not begin with the others, which their peers wait for.
    with ThreadPoolExecutor(ENGINES) as threads:
        completed = [threads.submit(engine.complete) for engine in engines]
    for each in completed:
        each.result()
    return engines


def close_all() -> None:
    """Close what the engines of a test have open."""
    while SharingEngine.made:
        SharingEngine.made.pop().mlps.kept.descriptors.close()
