"""GPUs of which only the data sheet is known: hardware scaled from the H200, which was measured.

A rate is taken to be the same share of the data sheet's as on an H200. So these figures are
projections; steps that a node measures correct them.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from shoal.runtime.simulation.shape_files import (
    HardwareFile,
    UnreadableError,
    built_in,
    read_hardware,
)

PCIE_ALLREDUCE_SECONDS = 25e-6
"""Assumed time of an all-reduce of zero bytes between GPUs that PCIe connects: it passes through
the host's memory."""


class DataSheet(NamedTuple):
    """What a vendor says of a GPU; rates are those of dense arithmetic."""

    names: str
    """Matches the names that the driver has for it."""
    memory_mib: int
    """As the driver counts it."""
    memory_gb_per_second: float
    bf16_tflops: float
    fp8_tflops: float | None
    link_gb_per_second: float
    """Each way, of all its links together."""
    nvlink: bool


H200 = DataSheet(r"H200\b", 143771, 4800, 989, 1979, 450, nvlink=True)
DATA_SHEETS: Mapping[str, DataSheet] = {
    "a10": DataSheet(r"A10\b", 23028, 600, 125, None, 32, nvlink=False),
    "a10g": DataSheet(r"A10G\b", 23028, 600, 70, None, 32, nvlink=False),
    "a100-40gb": DataSheet(r"A100-SXM4-40GB", 40960, 1555, 312, None, 300, nvlink=True),
    "a100-80gb": DataSheet(r"A100-SXM4-80GB", 81920, 2039, 312, None, 300, nvlink=True),
    "a100-80gb-pcie": DataSheet(r"A100 80GB PCIe", 81920, 1935, 312, None, 32, nvlink=False),
    "b200": DataSheet(r"B200\b", 183359, 8000, 2250, 4500, 900, nvlink=True),
    "h100": DataSheet(r"H100 80GB HBM3", 81559, 3350, 989, 1979, 450, nvlink=True),
    "h100-pcie": DataSheet(r"H100 PCIe", 81559, 2000, 756, 1513, 64, nvlink=False),
    "l4": DataSheet(r"L4\b", 23034, 300, 121, 242, 32, nvlink=False),
    "l40s": DataSheet(r"L40S\b", 46068, 864, 362, 733, 32, nvlink=False),
    "rtx-4090": DataSheet(r"RTX 4090\b", 24564, 1008, 165, 330, 32, nvlink=False),
    "rtx-6000-ada": DataSheet(r"RTX 6000 Ada", 49140, 960, 364, 728, 32, nvlink=False),
}
"""By the names that hardware files have."""


def all_hardware() -> list[str]:
    """Return the names of all hardware, measured and projected."""
    return sorted([*built_in("hardware"), *DATA_SHEETS])


def name_of(device: str) -> str | None:
    """Return the name of a GPU's hardware; None if nothing is known of it.

    Args:
        device: the name that the driver gives the GPU.
    """
    if re.search(H200.names, device):
        return "h200"
    found = (name for name, sheet in DATA_SHEETS.items() if re.search(sheet.names, device))
    return next(found, None)


def hardware_named(name: str) -> HardwareFile:
    """Return a GPU's projected hardware, or read a file by its path or built-in name.

    Raises:
        FileError: there is no such GPU and no such file.
    """
    if name in DATA_SHEETS:
        return projected(name)
    try:
        return read_hardware(name)
    except UnreadableError as error:
        raise UnreadableError(name, error.reason, all_hardware()) from error


def projected(name: str) -> HardwareFile:
    """Return the projected hardware of a GPU.

    Args:
        name: a key of ``DATA_SHEETS``.
    """
    sheet, measured = DATA_SHEETS[name], read_hardware("h200")
    arithmetic = sheet.bf16_tflops / H200.bf16_tflops
    memory = sheet.memory_gb_per_second / H200.memory_gb_per_second
    link = sheet.link_gb_per_second / H200.link_gb_per_second
    rates = {kind: arithmetic * measured.flops_per_second[kind] for kind in ("bf16", "fp16")}
    if sheet.fp8_tflops is not None and H200.fp8_tflops is not None:
        rates["fp8"] = sheet.fp8_tflops / H200.fp8_tflops * measured.flops_per_second["fp8"]
    attention = measured.attention_flops_per_second or measured.flops_per_second["bf16"]
    latency = measured.allreduce_seconds if sheet.nvlink else PCIE_ALLREDUCE_SECONDS
    kv_rate = measured.kv_bytes_per_second or measured.memory_bytes_per_second
    fetch_rate = measured.fetch_bytes_per_second or measured.peer_bytes_per_second
    return msgspec.structs.replace(
        measured,
        memory_bytes=float(sheet.memory_mib << 20),
        memory_bytes_per_second=memory * measured.memory_bytes_per_second,
        kv_bytes_per_second=memory * kv_rate,
        flops_per_second=rates,
        attention_flops_per_second=arithmetic * attention,
        link_bytes_per_second=link * measured.link_bytes_per_second,
        peer_bytes_per_second=link * measured.peer_bytes_per_second,
        fetch_bytes_per_second=link * fetch_rate,
        allreduce_seconds=latency,
    )
