"""LoRA adapters of tests with real engines."""

from collections.abc import Sequence
from pathlib import Path

from vllm.lora.request import LoRARequest

from shoal.runtime.config import Adapter
from tests.random_adapter import Shapes, write_adapter
from tests.random_checkpoint import CheckpointSpec

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
