"""The options of the shift between TP and SP, of ``shoal serve`` and ``shoal simulate``."""

from argparse import ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Collection
from typing import Any

from shoal.policies.shift import (
    DEFAULT_THRESHOLD,
    SHIFT,
    ShiftThreshold,
    ShiftThresholdError,
    parse_threshold,
)
from shoal.policies.values.layouts import layouts_up_to
from shoal.server.errors import UserError

AUTO = "auto"
"""``--max-sp``: left to ``automatic_max_sp``."""
BY_SEQUENCE = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures that steps by sequence are tested on, token by token: others have to be asked for.
What keeps a model's attention from being exchanged is told by engines, when they have loaded it."""


def add_shift_options(group: _ActionsContainer, *, automatic: bool) -> None:
    """Add ``--max-sp`` and ``--shift-threshold``.

    Args:
        group: to add them to.
        automatic: whether ``--max-sp auto`` is known, and the default.
    """
    rule = f"; {AUTO}: on GPUs the largest group, for the models it is tested on, else 1"
    group.add_argument(
        "--max-sp",
        type=_max_sp if automatic else int,
        default=AUTO if automatic else 1,
        metavar=f"N|{AUTO}" if automatic else "N",
        help="largest sequence-parallel degree of a group's steps; 1: none is run in SP"
        f"{rule if automatic else ''} (default: %(default)s)",
    )
    group.add_argument(
        "--shift-threshold",
        type=_threshold,
        default=DEFAULT_THRESHOLD,
        metavar="TOKENS|auto|off",
        help="steps that batch more tokens are run in SP; auto: by the cost model "
        "(default: %(default)s)",
    )


def _max_sp(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def automatic_max_sp(model: Any, max_group: int, *, on_gpus: bool) -> int:
    """Return the largest degree of SP of a node that was told none.

    On CPUs it gains nothing: there is no host to wait for, nor links to save.

    Args:
        model: vLLM's ``ModelConfig``.
        max_group: largest group of the node.
        on_gpus: whether real engines run on GPUs.
    """
    known = model.architecture in BY_SEQUENCE and model.get_head_size() % 8 == 0
    tokens = not (model.enable_prompt_embeds or model.uses_mrope)
    return max_group if on_gpus and known and tokens else 1


def _threshold(text: str) -> ShiftThreshold:
    try:
        return parse_threshold(text)
    except ShiftThresholdError as error:
        raise ArgumentTypeError(str(error)) from None


def check_shift(args: Namespace, policies: Collection[str], max_group: int) -> None:
    """Refuse what no group of the node can do.

    Nothing is refused while ``--max-sp`` is still to be chosen.

    Args:
        args: the parsed arguments.
        policies: names of those that are to decide.
        max_group: largest group of the node.

    Raises:
        UserError: ``--max-sp`` is no degree of the node's groups, or lacking.
    """
    if args.max_sp == AUTO:
        return
    sizes = [layout.world_size for layout in layouts_up_to(max_group)]
    if args.max_sp not in sizes:
        allowed = ", ".join(map(str, sizes))
        raise UserError(f"--max-sp {args.max_sp}: with groups of up to {max_group} it is {allowed}")
    if args.max_sp == 1 and args.shift_threshold != DEFAULT_THRESHOLD:
        raise UserError("--shift-threshold needs --max-sp")
    if args.max_sp == 1 and SHIFT.name in policies:
        raise UserError(f"--policy {SHIFT.name} needs --max-sp")
