"""Which LoRA adapters a command line may name, and what room they get."""

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.runtime.config import Adapter
from shoal.server.errors import UserError
from shoal.server.options.adapter_options import (
    adapters_of,
    check_adapter_files,
    check_adapters,
    has_prompt_logprobs,
    make_room,
)
from shoal.server.options.unsupported_models import check_adapted_model


def options(*names: str, **other: Any) -> Namespace:
    modules = [SimpleNamespace(name=name, path=f"/{name}") for name in names]
    fields = {"enable_lora": True, "served_model_name": None, "model": "base"}
    return Namespace(**{**fields, "lora_modules": modules or None, **other})


@pytest.mark.parametrize(
    ("device", "options", "has"),
    [
        ("cpu", {"enable_lora": True, "fake_engine": False}, False),
        ("cpu", {"enable_lora": True, "fake_engine": True}, True),
        ("cpu", {"enable_lora": False, "fake_engine": False}, True),
        ("cuda", {"enable_lora": True, "fake_engine": False}, True),
    ],
)
def test_on_cpus_adapters_leave_no_log_probabilities_of_prompts(
    device: str, options: dict[str, bool], has: bool
) -> None:
    assert has_prompt_logprobs(Namespace(**options), device) is has


def test_adapters_are_in_the_order_of_the_command_line() -> None:
    check_adapters(options("poet", "clerk"))
    assert adapters_of(options("poet", "clerk")) == (
        Adapter("poet", "/poet"),
        Adapter("clerk", "/clerk"),
    )
    check_adapters(options(enable_lora=False))
    assert adapters_of(options()) == ()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (options("poet", enable_lora=False), "--lora-modules needs --enable-lora"),
        (options("poet", "poet"), "--lora-modules: two models would have the name poet"),
        (options("base"), "--lora-modules: two models would have the name base"),
        (
            options("poet", served_model_name=["a", "poet"]),
            "--lora-modules: two models would have the name poet",
        ),
    ],
)
def test_adapters_that_requests_could_not_name_are_refused(args: Namespace, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_adapters(args)
    assert str(caught.value) == said


def test_a_directory_that_is_no_adapter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("poet").mkdir()
    for path in ("poet", "./poet", str(tmp_path / "poet"), "/nowhere", "./nowhere"):
        args = options()
        args.lora_modules = [SimpleNamespace(name="p", path=path)]
        said = f"--lora-modules p={path}: it has no adapter_config.json"
        with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
            check_adapter_files(args)
    Path("poet/adapter_config.json").touch()
    for path in ("poet", "./poet", str(tmp_path / "poet"), "someone/poet"):
        args.lora_modules = [SimpleNamespace(name="p", path=path)]
        check_adapter_files(args)


@pytest.mark.parametrize(
    ("given", "on_cpu", "slots", "kept"),
    [
        ((1, None), False, 1, 3),
        ((4, None), False, 4, None),
        ((2, 8), False, 2, 8),
        ((2, 2), False, 2, 3),
        ((1, None), True, 4, None),
        ((1, 3), True, 4, 4),
        ((8, None), True, 8, None),
    ],
)
def test_engines_keep_all_adapters_and_cpus_an_empty_slot(
    given: tuple[int, int | None], on_cpu: bool, slots: int, kept: int | None
) -> None:
    """vLLM keeps as many as there are slots, unless it is told otherwise."""
    args = SimpleNamespace(enable_lora=True, max_loras=given[0], max_cpu_loras=given[1])
    make_room(args, 3, on_cpu=on_cpu)
    assert (args.max_loras, args.max_cpu_loras) == (slots, kept)


def test_without_adapters_vllms_arguments_stay() -> None:
    args = SimpleNamespace(enable_lora=False, max_loras=1, max_cpu_loras=None)
    make_room(args, 0, on_cpu=True)
    assert (args.max_loras, args.max_cpu_loras) == (1, None)


def test_models_without_latent_attention_may_have_adapters() -> None:
    check_adapted_model(adapted())
    check_adapted_model(adapted(use_mla=True, lora=None))
    with pytest.raises(UserError) as caught:
        check_adapted_model(adapted(use_mla=True))
    reason = "it has latent attention (MLA)"
    assert str(caught.value) == f"--enable-lora: not supported for m: {reason}"


def adapted(*, use_mla: bool = False, lora: object = SimpleNamespace()) -> Any:
    """Return vLLM's configuration of a model with adapters."""
    model = SimpleNamespace(model="m", use_mla=use_mla)
    return SimpleNamespace(lora_config=lora, model_config=model)
