"""When a start times steps, and which earlier start's result it takes instead."""

import argparse
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.policies.cost.correction import Correction
from shoal.policies.cost.cost_model import CostModel
from shoal.policies.values.batch import StepKind
from shoal.policies.values.layouts import DP
from shoal.runtime.config import FitSettings
from shoal.runtime.fit_file import write_fit
from shoal.runtime.whole_experts import ALWAYS
from shoal.server.errors import UserError
from shoal.server.options.fit_options import (
    FIT_SECONDS,
    add_fit_options,
    check_fit_options,
    node_fit,
)
from tests.policies.snapshots import MODEL

CORRECTIONS = (Correction(DP, StepKind.DECODE).fit([(0.01, 0.012)]),)


def arguments(directory: Path, **fields: Any) -> Namespace:
    fixed = {
        "fit_seconds": None,
        "fit_dir": str(directory),
        "fake_engine": False,
        "fake_step_ms": 0.0,
        "recording_dir": None,
        "max_group": None,
        "max_pp": 1,
        "full_graph_tokens": 1024,
        "shift_threshold": 512,
        "whole_experts": None,
    }
    return Namespace(**{**fixed, **fields})


def config(dtype: str = "bfloat16", **parts: str) -> SimpleNamespace:
    """Return what a key is made of, of vLLM's configuration."""
    return SimpleNamespace(
        lora_config=parts.get("lora"),
        speculative_config=parts.get("speculation"),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_json_string=lambda **_: "{}"),
            dtype=dtype,
            quantization=None,
            enforce_eager=False,
            is_moe="experts" in parts,
        ),
        attention_config=parts.get("attention"),
        kernel_config=parts.get("kernels"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=64),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            cudagraph_mode=parts.get("graphs", "FULL_AND_PIECEWISE"), cudagraph_capture_sizes=[8]
        ),
    )


def fit(
    args: Namespace,
    model: CostModel | None = MODEL,
    *,
    gpu: str | None = "GPU",
    engines: int = 4,
    dtype: str = "bfloat16",
    vllm: str = "0.32.0",
    said: list[str] | None = None,
    **parts: str,
) -> tuple[CostModel | None, FitSettings]:
    lines = [] if said is None else said
    of = config(dtype, **parts)
    return node_fit(args, of, model, engines=engines, gpu=gpu, vllm=vllm, say=lines.append)


def test_gpus_are_timed_by_default_and_nothing_else(tmp_path: Path) -> None:
    def seconds(gpu: str | None = "GPU", **fields: Any) -> float:
        return fit(arguments(tmp_path, **fields), gpu=gpu)[1].seconds

    assert seconds() == FIT_SECONDS
    assert seconds(gpu=None) == 0.0
    assert seconds(fake_engine=True) == 0.0
    assert seconds(recording_dir="there") == 0.0
    assert seconds(gpu=None, fit_seconds=3.0) == 3.0
    assert seconds(fit_seconds=0.0) == 0.0
    assert fit(arguments(tmp_path), None) == (None, FitSettings())


def test_the_result_of_an_equal_start_is_taken_and_of_no_other(tmp_path: Path) -> None:
    args, said = arguments(tmp_path), list[str]()
    _, settings = fit(args)
    assert settings.file is not None
    write_fit(Path(settings.file), settings.key, CORRECTIONS)
    expected = replace(MODEL, corrections=CORRECTIONS)
    assert fit(args, said=said) == (expected, FitSettings(cached=True))
    assert len(said) == 1
    others = (
        fit(args, gpu="Other"),
        fit(args, engines=8),
        fit(args, dtype="float16"),
        fit(args, vllm="0.33.0"),
        fit(args, replace(MODEL, max_sp=2)),
        fit(arguments(tmp_path, max_pp=2)),
        fit(arguments(tmp_path, full_graph_tokens=0)),
        fit(args, lora="8 adapters of rank 16"),
        fit(args, speculation="3 tokens by n-grams"),
        fit(args, graphs="PIECEWISE"),
        fit(args, attention="FLASHINFER"),
        fit(args, kernels="another of experts"),
    )
    assert [settings.seconds for _, settings in others] == [FIT_SECONDS] * len(others)
    assert not any(model is None or model.corrections for model, _ in others)


def test_how_groups_divide_experts_counts_for_a_model_that_has_some(tmp_path: Path) -> None:
    whole = arguments(tmp_path, whole_experts=ALWAYS)

    def file(args: Namespace, **parts: str) -> str | None:
        return fit(args, **parts)[1].file

    shares = arguments(tmp_path)
    assert file(whole, experts="some") != file(shares, experts="some")
    assert file(whole) == file(shares)


def test_a_damaged_file_is_not_used_and_one_line_says_so(tmp_path: Path) -> None:
    args, said = arguments(tmp_path), list[str]()
    file = fit(args)[1].file
    assert file is not None
    Path(file).write_text("{")
    model, settings = fit(args, said=said)
    assert (model, settings.seconds) == (MODEL, FIT_SECONDS)
    assert len(said) == 1
    assert "are not used" in said[0]
    assert "\n" not in said[0]


def test_a_user_without_a_home_directory_can_start_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such users are frequent in containers."""

    def homeless(path: Path) -> Path:
        if path.parts[0] == "~":
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", homeless)
    parser = argparse.ArgumentParser()
    add_fit_options(parser.add_argument_group(), {})
    default, said = Path(parser.parse_args([]).fit_dir), list[str]()
    assert default == Path("~/.cache/shoal")
    assert fit(arguments(default), said=said) == (MODEL, FitSettings(FIT_SECONDS))
    assert said == [
        "  step times are not kept: there is no home directory (--fit-dir names another)"
    ]
    assert fit(arguments(tmp_path))[1].file is not None


def test_a_negative_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--fit-seconds -1"):
        check_fit_options(arguments(tmp_path, fit_seconds=-1.0))
    check_fit_options(arguments(tmp_path))
