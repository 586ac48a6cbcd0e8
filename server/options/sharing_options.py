"""The option of how many engines share weights, of ``shoal serve`` and ``shoal simulate``."""

from argparse import _ActionsContainer
from typing import Any

from shoal.runtime.config import ENGINE_COUNTS
from shoal.server.errors import UserError

LOADED_BY_NAME = ("auto", "hf", "safetensors", "pt", "mistral", "dummy")
"""vLLM's load formats that hand out a checkpoint's tensors one by one, by the names of layers."""


def add_sharing_option(group: _ActionsContainer) -> None:
    """Add ``--share-weights``."""
    group.add_argument(
        "--share-weights",
        type=int,
        default=1,
        choices=ENGINE_COUNTS,
        help="how many engines share the weights of the MLPs: each keeps one part of so many, and "
        "reads the others' parts while it computes (default: %(default)s: each keeps all)",
    )


def check_share(share: int, engines: int) -> None:
    """Refuse more sharing than there are engines.

    Args:
        share: ``--share-weights``.
        engines: of the node.

    Raises:
        UserError: there are not so many engines.
    """
    if share > engines:
        raise UserError(f"--share-weights {share}: there are only {engines} engines")


def check_shared_model(share: int, config: Any, groups: int) -> None:
    """Refuse models whose weights engines cannot share.

    Engines check the rest when they load, such as which activation an MLP has.

    Args:
        share: ``--share-weights``.
        config: vLLM's ``VllmConfig``.
        groups: ``NodeConfig.weight_groups``.

    Raises:
        UserError: the message says why.
    """
    if share == 1:
        return
    model, load_format = config.model_config, config.load_config.load_format
    size = getattr(model.hf_text_config, "intermediate_size", 0)
    problems = {
        f"{model.model} has experts": model.is_moe,
        f"{model.model} has latent attention (MLA)": model.use_mla,
        f"{model.model} is quantised ({model.quantization})": model.quantization is not None,
        f"{model.model} names no size of its MLPs": not isinstance(size, int) or not size,
        f"the MLPs of {model.model} have {size} inner units, which make no {groups} equal parts": (
            isinstance(size, int) and size % groups != 0
        ),
        f"--load-format {load_format} is not supported": load_format not in LOADED_BY_NAME,
    }
    for problem, holds in problems.items():
        if holds:
            raise UserError(f"--share-weights {share}: {problem}")
