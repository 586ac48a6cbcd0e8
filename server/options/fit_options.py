"""Options of the fit: how long steps are timed at start, and where the result is kept."""

import argparse
import hashlib
import importlib.metadata
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.policies.cost.cost_model import CostModel
from shoal.runtime.config import FitSettings
from shoal.runtime.fit_file import FitFileError, path_of, read_fit
from shoal.runtime.node.supervisor import Say
from shoal.server.number_options import check_at_least

FIT_SECONDS = 10.0
"""Default time of a fit on GPUs; on CPUs, and with fake engines, there is none by default."""


def add_fit_options(group: argparse._ArgumentGroup, environ: Mapping[str, str]) -> None:
    """Add ``--fit-seconds`` and ``--fit-dir``."""
    group.add_argument(
        "--fit-seconds",
        type=float,
        metavar="SECONDS",
        help="how long the start may time the steps of all layouts, for the policies' cost model; "
        f"0: it does not (default: {FIT_SECONDS:g} on GPUs, 0 otherwise and with --recording-dir)",
    )
    group.add_argument(
        "--fit-dir",
        metavar="DIR",
        default=str(_default_directory(environ)),
        help="where the times are kept for later starts (default: %(default)s)",
    )


def _default_directory(environ: Mapping[str, str]) -> Path:
    """Return a directory beside that of vLLM's caches (``vllm.envs.VLLM_CACHE_ROOT``)."""
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("VLLM_CACHE_ROOT") or f"{caches}/vllm").parent / "shoal"


def check_fit_options(args: Namespace) -> None:
    """Refuse a negative time.

    Raises:
        UserError: the message names the option.
    """
    if args.fit_seconds is not None:
        check_at_least(args, 0, "fit_seconds")


def node_fit(
    args: Namespace,
    vllm_config: Any,
    model: CostModel | None,
    *,
    engines: int,
    gpu: str | None,
    vllm: str,
    say: Say,
) -> tuple[CostModel | None, FitSettings]:
    """Return the node's cost model, as an earlier fit corrects it, and the fit that is left to do.

    Args:
        args: the parsed arguments.
        vllm_config: vLLM's ``VllmConfig`` of an engine alone.
        model: the cost model before any measurement; None: there is none.
        engines: number of engines.
        gpu: the driver's name of this machine's GPUs; None on a CPU.
        vllm: vLLM's version.
        say: called with the reason if a file cannot be used.
    """
    seconds = args.fit_seconds
    if seconds is None:
        real = gpu is not None and not args.fake_engine and args.recording_dir is None
        seconds = FIT_SECONDS if real else 0.0
    if model is None or not seconds:
        return model, FitSettings()
    key = _key(args, vllm_config, model) | {
        "gpu": gpu or "cpu",
        "engines": str(engines),
        "shoal": importlib.metadata.version("shoal"),
        "vllm": vllm,
    }
    try:
        path = path_of(Path(args.fit_dir).expanduser(), key)
    except RuntimeError:  # some containers have users without a home
        say("  step times are not kept: there is no home directory (--fit-dir names another)")
        return model, FitSettings(seconds)
    try:
        found = read_fit(path, key)
    except FitFileError as error:
        say(f"  step times of an earlier start are not used: {error}")
        found = None
    if found is None:
        return model, FitSettings(seconds, str(path), key)
    say(f"  step times are those of an earlier start: {path}")
    return replace(model, corrections=found), FitSettings(cached=True)


def _key(args: Namespace, vllm_config: Any, model: CostModel) -> dict[str, str]:
    """Return what the times of steps depend on, beside the machine and the versions."""
    config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    graphs = vllm_config.compilation_config
    shape = config.hf_config.to_json_string(use_diff=False)
    values = {
        "fake": args.fake_engine and args.fake_step_ms,
        "max_group": args.max_group,
        "max_pp": args.max_pp,
        "shift_threshold": args.shift_threshold,
        "whole_experts": config.is_moe and args.whole_experts,
        "roofline": model,
        "model": hashlib.sha256(shape.encode()).hexdigest(),
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "enforce_eager": config.enforce_eager,
        "kernels": (vllm_config.attention_config, vllm_config.kernel_config),
        "graphs": (graphs.cudagraph_mode, graphs.cudagraph_capture_sizes),
        "full_graph_tokens": args.full_graph_tokens,
        "adapters": vllm_config.lora_config,
        "speculation": vllm_config.speculative_config,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
    }
    return {name: str(value) for name, value in values.items()}
