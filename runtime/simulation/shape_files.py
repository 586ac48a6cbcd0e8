"""Shape and hardware files: JSON descriptions of a simulated node.

A shape file has the properties of a model that decide its step times and its memory; a hardware
file has those of a device. The package contains some of both, which have names (``built_in``).
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from shoal.policies.cost.correction import Correction
from shoal.policies.cost.cost_model import CostModel, Hardware, ModelShape
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout
from shoal.policies.values.level import Level
from shoal.runtime.config import PEER_BYTES_PER_SECOND
from shoal.runtime.engine.fake.step_times import StepTimes
from shoal.runtime.shared_attention import is_attention_shared
from shoal.runtime.vocabulary_sharing import head_pieces, held_parts, is_vocabulary_shared

DTYPE_BYTES = {"mxfp4": 17 / 32, "fp8": 1.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
"""Bytes of one weight. In MXFP4 32 of them share a scale of one byte."""
ACTIVATION_BYTES = 2.0
BLOCK_TOKENS = 16
"""Tokens of one KV block of a single engine."""
MEMORY_SHARE = 0.92
"""Share of a device's memory that an engine uses, which is vLLM's default."""

LARGE_GPU_BYTES, LARGEST_GPU_BYTES = float(70 << 30), float(160 << 30)
"""From these sizes of memory on, vLLM's own limits of a batch are higher."""

_HERE = Path(__file__).parent
_File = TypeVar("_File", bound=msgspec.Struct)


class FileError(ValueError):
    """A shape or hardware file that cannot be read; the message is one line that names it."""


class UnreadableError(FileError):
    """There is no such file.

    Args:
        name: what was asked for.
        reason: the system's.
        built_in_ones: the names that need no file.
    """

    def __init__(self, name: str, reason: str | None, built_in_ones: Iterable[str]) -> None:
        super().__init__(f"cannot read {name}: {reason}; built-in ones: {', '.join(built_in_ones)}")
        self.reason = reason


class _Kind(NamedTuple):
    """Layers whose MLPs are alike."""

    layers: int
    """How many there are."""
    inner: int
    """The MLP's inner size, or that of all shared experts."""
    has_experts: bool
    """Whether they have routed experts."""


class ShapeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder-only transformer with gated MLPs or experts: the sizes in its ``config.json``."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    weight_dtype: Literal["fp8", "bf16", "fp16", "fp32"]
    """Type of the linear layers' weights; embeddings have at least two bytes."""
    kv_dtype: Literal["fp8", "bf16", "fp16", "fp32"]
    max_model_len: int
    experts: int = 0
    """Routed experts of a layer; 0: the model has none."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    """What ``intermediate`` is for one routed expert."""
    shared_intermediate: int = 0
    """The same for the shared experts of a layer together."""
    dense_layers: int = 0
    """Layers that have a gated MLP of ``intermediate`` in place of experts."""
    expert_dtype: Literal["", "mxfp4"] = ""
    """Type of the routed experts' weights; empty: ``weight_dtype``."""
    attention_parameters: int = 0
    """Parameters of a layer's projections around attention; 0: those that the heads say."""
    tied: bool = False
    """Whether the output layer is the embeddings, too."""
    whole_vocabulary: bool = False
    """Whether each engine has the embeddings and the output layer whole, as those of GPT-OSS have:
    vLLM makes them without asking who divides them."""

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of all layers."""
        layers = self.layers - self.dense_layers if self.experts else 0
        return layers * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def common_parameters(self) -> int:
        """Parameters of all other linear layers, the output layer's included."""
        attention = self.attention_parameters or self._projections
        dense = self.dense_layers if self.experts else self.layers
        mlp = dense * self.intermediate
        if self.experts:
            mlp += (self.layers - dense) * self.shared_intermediate
        return self.layers * attention + 3 * self.hidden * mlp + self.hidden * self.vocab

    @property
    def _projections(self) -> int:
        """Parameters of a layer's attention, as the heads say."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    def sharable_bytes(self, share: int, widest: int = 1, max_sp: int = 1) -> float:
        """Return the bytes of weights that engines stream from each other.

        These are those of MLPs and experts, and of attention and the output layer where they can be
        shared.

        Args:
            share: how many engines share weights.
            widest: members of the widest group.
            max_sp: see ``NodeConfig.max_sp``.
        """
        head = self.hidden * self.vocab * self._shares_vocabulary(share, widest)
        attention = self.layers * self._sharable_attention(share, widest, max_sp)
        mlps = sum(kind.layers * self._mlp_bytes(kind) for kind in self._kinds)
        return (attention + head) * DTYPE_BYTES[self.weight_dtype] + mlps

    def _shares_vocabulary(self, share: int, widest: int) -> bool:
        """Return whether engines share the embeddings and the output layer."""
        return not self.whole_vocabulary and is_vocabulary_shared(self.tied, share, widest)

    def _sharable_attention(self, share: int, widest: int, max_sp: int) -> int:
        """Return the parameters of a layer's attention that engines share."""
        shares_heads = is_attention_shared(self.kv_heads, share, widest, max_sp)
        return self._projections if shares_heads and not self.attention_parameters else 0

    @property
    def _kinds(self) -> list[_Kind]:
        """The kinds of layers that there are."""
        dense = self.dense_layers if self.experts else self.layers
        kinds = [
            _Kind(dense, self.intermediate, False),
            _Kind(self.layers - dense, self.shared_intermediate, True),
        ]
        return [kind for kind in kinds if kind.layers]

    def _mlp_bytes(self, kind: _Kind) -> float:
        """Return the bytes of the MLP and the experts of one layer."""
        routed = self.experts * self.expert_intermediate * self.expert_width
        inner = kind.inner * DTYPE_BYTES[self.weight_dtype] + kind.has_experts * routed
        return 3 * self.hidden * inner

    def kept_bytes(self, share: int, widest: int = 1, max_sp: int = 1, stages: int = 1) -> float:
        """Return the bytes of weights on one engine (see ``sharable_bytes``).

        With stages (``Level.stages``) they are those of the last one, which has the output layer.
        """
        if share == 1:
            return self.weight_bytes
        width, saved = DTYPE_BYTES[self.weight_dtype], 1 - 1 / share
        attention = self._sharable_attention(share, widest, max_sp) * width
        shared = self.sharable_bytes(share, widest, max_sp)
        mlps = [self._mlp_bytes(kind) for kind in self._kinds]
        slots = 2 * (attention + sum(mlps))
        layer = attention + max(mlps)
        whole = -(-self.layers // stages) * layer if stages > 1 else 0.0
        if self._shares_vocabulary(share, widest):
            whole += self.hidden * self.vocab * width if stages > 1 else 0.0
            shared += self.hidden * self.vocab * self._embedding_width
            rows = self.vocab // share
            pieces = head_pieces(rows, int(self.hidden * width), share)
            slots += 2 * self.hidden * rows * share / pieces * width
        return self.weight_bytes - shared * saved + (slots + whole) * held_parts(share) / share

    @property
    def parameters(self) -> float:
        """Parameters of all linear layers that one token passes through."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        return self.common_parameters + share * self.expert_parameters

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights on one engine."""
        width = DTYPE_BYTES[self.weight_dtype]
        linear = self.common_parameters * width + self.expert_parameters * self.expert_width
        if self.tied:
            linear -= self.hidden * self.vocab * width
        return linear + self.hidden * self.vocab * self._embedding_width

    @property
    def _embedding_width(self) -> float:
        """Bytes of one parameter of the embeddings."""
        return max(DTYPE_BYTES[self.weight_dtype], ACTIVATION_BYTES)

    @property
    def expert_width(self) -> float:
        """Bytes of one parameter of a routed expert."""
        return DTYPE_BYTES[self.expert_dtype or self.weight_dtype]

    def model_shape(self, share: int = 1, widest: int = 1, max_sp: int = 1) -> ModelShape:
        """Return what the cost model knows about the model (see ``sharable_bytes``)."""
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            parameters=self.parameters,
            weight_bytes=DTYPE_BYTES[self.weight_dtype],
            kv_bytes=DTYPE_BYTES[self.kv_dtype],
            activation_bytes=ACTIVATION_BYTES,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            expert_parameters=self.expert_parameters,
            expert_bytes=self.expert_width if self.expert_dtype else 0.0,
            sharable_bytes=self.sharable_bytes(share, widest, max_sp),
        )


class BatchLimits(NamedTuple):
    """The most that a unit batches."""

    requests: int
    tokens: int
    """Of one step."""


class HardwareFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's device and its links, with the rates that measured steps reach."""

    memory_bytes: float
    memory_bytes_per_second: float
    flops_per_second: dict[str, float]
    """Rate of arithmetic, by dtype of the weights."""
    link_bytes_per_second: float
    """Rate of an all-reduce, per engine."""
    allreduce_seconds: float
    """Time of an all-reduce of zero bytes."""
    step_seconds: float
    """Time of a step without work."""
    request_seconds: float
    """Time that one more decoding request adds to a step, for scheduling, sampling and output."""
    message_seconds: float
    """Time of a message between two processes. A bind and a release take four messages each."""
    front_seconds: float = 0.0
    """Time that a first token takes besides its steps and messages: HTTP, tokenizing, and what the
    host does for a step before it is launched. Other requests' steps do not wait for it."""
    stream_seconds: float = 0.0
    """Time that each token of a stream takes a front end."""
    sp_layer_host_seconds: float = 0.0
    """Host time of one layer of a step in SP, for any number of tokens. Where nothing else was
    measured, it is the time of the two exchanges."""
    tp_layer_host_seconds: float = 0.0
    """Host time of one layer of a group's step in TP that computes prompts while requests decode,
    up to the largest CUDA graph."""
    peer_bytes_per_second: float = PEER_BYTES_PER_SECOND
    """Rate at which one engine reads the memory of another."""
    fetch_bytes_per_second: float | None = None
    """Rate at which copy engines read weights from another engine's memory, beside what is
    computed; null: as ``peer_bytes_per_second``."""
    copy_seconds: float = 0.001
    """Time of a copy of KV beyond that of its bytes: the host plans the copy and launches it."""
    kv_bytes_per_second: float | None = None
    """Rate at which attention reads keys and values; null: as fast as weights are read."""
    attention_flops_per_second: float | None = None
    """Rate of attention's arithmetic, whatever the dtype of the weights; null: as that of linear
    layers."""
    reserved_bytes: float = 6e9
    """Memory that is neither weights nor KV: activations, communicators, graphs of every layout."""

    @property
    def is_gpu(self) -> bool:
        """Whether each engine has a GPU: those of a CPU compute in fp32 alone."""
        return not self.flops_per_second.keys() <= {"fp32"}

    @property
    def batch_limits(self) -> BatchLimits:
        """The limits that vLLM's API server has by default (``EngineArgs.get_batch_defaults``).

        vLLM makes an exception of the A100, the only such large GPU that computes no FP8.
        """
        if self.memory_bytes >= LARGEST_GPU_BYTES:
            return BatchLimits(1024, 16_384)
        if self.memory_bytes >= LARGE_GPU_BYTES and "fp8" in self.flops_per_second:
            return BatchLimits(1024, 8192)
        return BatchLimits(256, 2048)

    def for_dtype(self, dtype: str) -> Hardware:
        """Return what the cost model knows about the device.

        Raises:
            FileError: the file has no rate for this dtype.
        """
        if dtype not in self.flops_per_second:
            raise FileError(f"the hardware file has no flops_per_second of {dtype}")
        return Hardware(
            memory_bytes_per_second=self.memory_bytes_per_second,
            flops_per_second=self.flops_per_second[dtype],
            link_bytes_per_second=self.link_bytes_per_second,
            allreduce_seconds=self.allreduce_seconds,
            overhead_seconds=self.step_seconds,
            sp_layer_host_seconds=self.sp_layer_host_seconds,
            tp_layer_host_seconds=self.tp_layer_host_seconds,
            peer_bytes_per_second=self.peer_bytes_per_second,
            fetch_bytes_per_second=self.fetch_bytes_per_second,
            kv_bytes_per_second=self.kv_bytes_per_second,
            attention_flops_per_second=self.attention_flops_per_second,
            request_seconds=self.request_seconds,
        )

    def num_blocks(
        self, shape: ShapeFile, share: int = 1, widest: int = 1, max_sp: int = 1, stages: int = 1
    ) -> int:
        """Return the number of KV blocks of one engine.

        Args:
            shape: the model.
            share: how many engines share weights.
            widest: see ``ShapeFile.sharable_bytes``.
            max_sp: see there, too.
            stages: see ``ShapeFile.kept_bytes``.

        Raises:
            FileError: the weights leave no memory for a block.
        """
        weights = shape.kept_bytes(share, widest, max_sp, stages)
        free = self.memory_bytes * MEMORY_SHARE - weights - self.reserved_bytes
        blocks = int(free / (shape.model_shape().kv_bytes_per_token * BLOCK_TOKENS))
        if blocks < 1:
            raise FileError("the model's weights do not fit into one device of this hardware")
        return blocks


def cost_model(
    shape: ShapeFile,
    hardware: HardwareFile,
    max_sp: int = 1,
    share_weights: int = 1,
    widest: int = 1,
) -> CostModel:
    """Return the roofline of a model on this hardware.

    Args:
        shape: the model.
        hardware: the devices.
        max_sp: see ``NodeConfig.max_sp``.
        share_weights: see ``NodeConfig.share_weights``.
        widest: see ``ShapeFile.sharable_bytes``.

    Raises:
        FileError: the hardware file lacks the model's dtype.
    """
    rates = hardware.for_dtype(shape.weight_dtype)
    known = shape.model_shape(share_weights, widest, max_sp)
    return CostModel(known, rates, max_sp=max_sp, share_weights=share_weights)


def step_times(
    shape: ShapeFile,
    hardware: HardwareFile,
    max_sp: int = 1,
    share_weights: int = 1,
    corrections: tuple[Correction, ...] = (),
    captured_tokens: float = math.inf,
    widest: int = 1,
    stages: int = 1,
) -> StepTimes:
    """Return how long simulated steps take: the roofline, and what it leaves out of the host.

    A group's step in TP that is too long for CUDA graphs waits for its host as one in SP does. The
    policies' cost model does not know this, so that it has something to learn. If a fit has
    measured a node's steps, they take the time that it says instead.

    Args:
        shape: the model.
        hardware: the devices.
        max_sp: see ``NodeConfig.max_sp``.
        share_weights: see ``NodeConfig.share_weights``.
        corrections: what a fit has found.
        captured_tokens: tokens of the largest CUDA graph.
        widest: see ``ShapeFile.sharable_bytes``.
        stages: see ``Level``.

    Raises:
        FileError: the hardware file lacks the model's dtype.
    """
    model = cost_model(shape, hardware, max_sp, share_weights, widest)
    model = model.at(Level(share_weights, stages))
    if corrections:
        return replace(model, corrections=corrections).step_seconds
    host = shape.layers * hardware.sp_layer_host_seconds + hardware.step_seconds

    def seconds(layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        roofline = model.roofline_seconds(layout, batch, mode)
        if layout.tp > 1 and batch.tokens > captured_tokens:
            beside = batch.decodes if batch.prefill_tokens else 0
            roofline = max(roofline, host + beside * hardware.request_seconds)
        return roofline

    return seconds


def read_shape(name: str) -> ShapeFile:
    """Read a shape file, by its path or the name of a built-in one.

    Raises:
        FileError: the file does not exist, or is not a shape file.
    """
    return _read("shapes", name, ShapeFile)


def read_hardware(name: str) -> HardwareFile:
    """Read a hardware file, by its path or the name of a built-in one.

    Raises:
        FileError: the file does not exist, or is not a hardware file.
    """
    return _read("hardware", name, HardwareFile)


def built_in(folder: Literal["shapes", "hardware"]) -> list[str]:
    """Return the names of the files that are part of the package."""
    return sorted(path.stem for path in (_HERE / folder).glob("*.json"))


def _read(folder: Literal["shapes", "hardware"], name: str, kind: type[_File]) -> _File:
    names = built_in(folder)
    path = _HERE / folder / f"{name}.json" if name in names else Path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise UnreadableError(name, error.strerror, names) from error
    except msgspec.DecodeError as error:
        raise FileError(f"{name}: {error}") from error
