"""LoRA adapters of tests with real engines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from shoal.runtime.config import Adapter
from tests.random_adapter import Shapes, write_adapter
from tests.random_checkpoint import CheckpointSpec
from tests.runtime.engine.real_node import RealNode, stock_tokens

Adapters = list[LoRARequest | None]


def write_adapters(
    directory: Path, spec: CheckpointSpec, *, ends: bool = False, shapes: Shapes | None = None
) -> Adapters:
    """Write two adapters below a directory, and return none and both as requests name them.

    Args:
        directory: where each gets a directory of its own.
        spec: see ``write_adapter``.
        ends: whether the second one adapts the embeddings and the LM head, too.
        shapes: see ``write_adapter``.
    """
    found: Adapters = [None]
    for number in (1, 2):
        path = directory / f"adapter-{number}"
        write_adapter(path, spec, seed=number, ends=ends and number == 2, shapes=shapes)
        found.append(LoRARequest(path.name, number, str(path)))
    return found


def named(adapters: Sequence[LoRARequest | None]) -> list[Adapter]:
    """Return the adapters as a node is told of them."""
    return [Adapter(each.lora_name, each.lora_path) for each in adapters if each is not None]


def submitted(
    node: RealNode, adapters: Adapters, prompts: Sequence[Sequence[int]], tokens: int
) -> list[str]:
    """Send each prompt with every adapter, dealt out to the units; return the requests' ids."""
    units = node.partition
    return [
        node.submit(units[number % len(units)], [prompt], tokens, adapter=adapter)[0]
        for number, prompt in enumerate(prompts)
        for adapter in adapters
    ]


def stock_tokens_of_each(
    model: Path,
    adapters: Adapters,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    vllm_args: Mapping[str, Any],
    **environment: str,
) -> list[list[int]]:
    """Return what stock vLLM generates greedily for what ``submitted`` sends."""
    each = [(prompt, adapter) for prompt in prompts for adapter in adapters]
    found = stock_tokens(
        model,
        [prompt for prompt, _ in each],
        tokens,
        vllm_args=vllm_args,
        adapters=[adapter for _, adapter in each],
        **environment,
    )
    assert len({tuple(tokens) for tokens in found}) == len(found), "adapters change every request"
    return found
