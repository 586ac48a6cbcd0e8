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
"""With this value of ``--max-sp``, ``automatic_max_sp`` chooses."""
BY_SEQUENCE = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures with which steps by sequence are tested, token by token. For others, the user must
ask for SP. Engines report what keeps a model's attention from being exchanged once they have loaded
it."""


def add_shift_options(group: _ActionsContainer) -> None:
    """Add ``--max-sp`` and ``--shift-threshold``."""
    group.add_argument(
        "--max-sp",
        type=_max_sp,
        default=AUTO,
        metavar=f"N|{AUTO}",
        help="largest sequence-parallel degree of a group's steps; 1: none is run in SP; "
        f"{AUTO}: on GPUs the largest group, for the models it is tested on, else 1 "
        "(default: %(default)s)",
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
    """Return the largest degree of SP of a node whose user has not chosen one.

    On CPUs it is 1, because SP gains nothing there: there is no host to wait for, and no link to
    spare.

    Args:
        model: vLLM's ``ModelConfig``.
        max_group: largest group of the node.
        on_gpus: whether real engines run on GPUs.
    """
    known = model.architecture in BY_SEQUENCE and model.get_head_size() % 8 == 0
    others = model.enable_prompt_embeds or model.supports_multimodal_inputs
    tokens = not (others or model.uses_mrope)
    return max_group if on_gpus and known and tokens else 1


def choose_max_sp(args: Namespace, model: Any, max_group: int, *, on_gpus: bool) -> None:
    """Choose the largest degree of SP if the user has not.

    Args:
        args: the parsed arguments, changed in place.
        model: vLLM's ``ModelConfig``.
        max_group: largest group of the node.
        on_gpus: whether real engines run on GPUs.

    Raises:
        UserError: other options do not go with the choice (``check_shift``).
    """
    if args.max_sp == AUTO:
        args.max_sp = automatic_max_sp(model, max_group, on_gpus=on_gpus)
        check_shift(args, [args.policy], max_group)


def _threshold(text: str) -> ShiftThreshold:
    try:
        return parse_threshold(text)
    except ShiftThresholdError as error:
        raise ArgumentTypeError(str(error)) from None


def check_shift(args: Namespace, policies: Collection[str], max_group: int) -> None:
    """Refuse options that no group of the node can follow.

    Nothing is refused while ``--max-sp`` is still to be chosen.

    Args:
        args: the parsed arguments.
        policies: names of the policies that will decide.
        max_group: largest group of the node.

    Raises:
        UserError: ``--max-sp`` is not a degree of the node's groups, or is needed and not given.
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
