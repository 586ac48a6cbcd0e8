"""Shape and hardware files: JSON descriptions of a simulated node.

A shape file has the properties of a model that decide its step times and its memory; a hardware
file has those of a device. The package contains some of both, which have names (``built_in``).
"""

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from shoal.policies.cost.cost_model import CostModel, Hardware, ModelShape
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import Layout
from shoal.runtime.config import PEER_BYTES_PER_SECOND
from shoal.runtime.engine.fake.step_times import StepTimes

DTYPE_BYTES = {"fp8": 1.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
ACTIVATION_BYTES = 2.0
BLOCK_TOKENS = 16
"""Tokens of one KV block of a single engine."""
MEMORY_SHARE = 0.9
"""Share of a device's memory that an engine uses, which is vLLM's default."""

_HERE = Path(__file__).parent
_File = TypeVar("_File", bound=msgspec.Struct)


class FileError(ValueError):
    """A shape or hardware file that cannot be read; the message is one line that names it."""


class ShapeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder-only transformer with gated MLPs, with the sizes in its ``config.json``."""

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

    @property
    def parameters(self) -> int:
        """Parameters of all linear layers, the output layer's included."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + self.hidden * self.vocab

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights on one engine."""
        width = DTYPE_BYTES[self.weight_dtype]
        return self.parameters * width + self.hidden * self.vocab * max(width, ACTIVATION_BYTES)

    def model_shape(self) -> ModelShape:
        """Return what the cost model knows about the model."""
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
        )


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
    prefill_seconds: float = 0.0
    """Time that prompts add to a step; on GPUs, steps with prompts are launched piece by piece."""
    sp_layer_host_seconds: float = 0.0
    """Host time of one layer of a step in SP, for any number of tokens. Where nothing else was
    measured, it is the time of the two exchanges."""
    peer_bytes_per_second: float = PEER_BYTES_PER_SECOND
    """Rate at which one engine reads the memory of another."""
    reserved_bytes: float = 6e9
    """Memory that is neither weights nor KV: activations, communicators, graphs of every layout."""

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
            peer_bytes_per_second=self.peer_bytes_per_second,
        )

    def num_blocks(self, shape: ShapeFile) -> int:
        """Return the number of KV blocks of one engine.

        Raises:
            FileError: the weights leave no memory for a block.
        """
        free = self.memory_bytes * MEMORY_SHARE - shape.weight_bytes - self.reserved_bytes
        blocks = int(free / (shape.model_shape().kv_bytes_per_token * BLOCK_TOKENS))
        if blocks < 1:
            raise FileError("the model's weights do not fit into one device of this hardware")
        return blocks


def cost_model(shape: ShapeFile, hardware: HardwareFile, max_sp: int = 1) -> CostModel:
    """Return the roofline of a model on this hardware.

    Args:
        shape: the model.
        hardware: the devices.
        max_sp: see ``NodeConfig.max_sp``.

    Raises:
        FileError: the hardware file lacks the model's dtype.
    """
    return CostModel(shape.model_shape(), hardware.for_dtype(shape.weight_dtype), max_sp=max_sp)


def step_times(shape: ShapeFile, hardware: HardwareFile, max_sp: int = 1) -> StepTimes:
    """Return how long simulated steps take: the roofline, and the time that requests add.

    The policies' cost model knows neither the time that each decoding request adds nor the time
    that prompts add, so that it has something to learn.

    Raises:
        FileError: the hardware file lacks the model's dtype.
    """
    model = cost_model(shape, hardware, max_sp)
    each = hardware.request_seconds

    def seconds(layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        prefill = hardware.prefill_seconds if batch.prefill_tokens else 0.0
        return model.roofline_seconds(layout, batch, mode) + prefill + each * batch.decodes

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
        reason = f"{error.strerror}; built-in ones: {', '.join(names)}"
        raise FileError(f"cannot read {name}: {reason}") from error
    except msgspec.DecodeError as error:
        raise FileError(f"{name}: {error}") from error
