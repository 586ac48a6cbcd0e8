"""LoRA adapters: the command line names them, and they stay the same while the node serves."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from shoal.runtime.config import Adapter
from shoal.server.errors import UserError

_CONFIG = "adapter_config.json"
"""What each adapter of PEFT has, and vLLM reads first (``PEFTHelper.from_local_dir``)."""


def adapters_of(args: Namespace) -> tuple[Adapter, ...]:
    """Return the adapters that ``--lora-modules`` names, in its order."""
    return tuple(Adapter(module.name, module.path) for module in args.lora_modules or ())


def check_adapters(args: Namespace) -> None:
    """Refuse adapters that requests could not name.

    Args:
        args: the parsed arguments, with the model's names.

    Raises:
        UserError: adapters are not enabled, or two models would have one name.
    """
    names = [adapter.name for adapter in adapters_of(args)]
    if names and not args.enable_lora:
        raise UserError("--lora-modules needs --enable-lora")
    taken = set(args.served_model_name or [args.model])
    for name in names:
        if name in taken:
            raise UserError(f"--lora-modules: two models would have the name {name}")
        taken.add(name)


def check_adapter_files(args: Namespace) -> None:
    """Refuse directories that are no adapters, before engines load the model.

    What is no directory may be the name of a repository of the Hugging Face hub.

    Raises:
        UserError: such a directory is named, or one that does not exist.
    """
    for adapter in adapters_of(args):
        path = Path(adapter.path).expanduser()
        is_local = path.is_absolute() or path.exists() or adapter.path.startswith(".")
        if is_local and not (path / _CONFIG).is_file():
            raise UserError(f"--lora-modules {adapter.name}={adapter.path}: it has no {_CONFIG}")


def has_prompt_logprobs(args: Namespace, device: str) -> bool:
    """Return whether engines can compute log probabilities of prompts.

    VLLM's operators for CPUs take a row of logits for each request of a step where there are
    adapters (``PunicaWrapperCPU.add_lora_logits``). For all tokens of a prompt they fail, which
    would end the engine.

    Args:
        args: the parsed arguments.
        device: vLLM's name of what engines run on.
    """
    return device != "cpu" or bool(args.fake_engine) or not args.enable_lora


def make_room(engine_args: Any, adapters: int, *, on_cpu: bool) -> None:
    """Let engines keep all adapters that the command line names.

    Args:
        engine_args: vLLM's arguments, changed in place.
        adapters: how many adapters there are.
        on_cpu: whether real engines run on CPUs. vLLM's operators for CPUs take "no adapter" (-1)
            for the last slot, so one slot more than there are adapters has to stay empty.
    """
    if not engine_args.enable_lora:
        return
    if on_cpu:
        engine_args.max_loras = max(engine_args.max_loras, adapters + 1)
    needed = max(engine_args.max_loras, adapters)
    if needed > (engine_args.max_cpu_loras or engine_args.max_loras):
        engine_args.max_cpu_loras = needed
