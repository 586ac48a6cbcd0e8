"""The option of how a group divides a model's experts."""

from argparse import ArgumentTypeError, _ActionsContainer

from shoal.runtime.whole_experts import ALWAYS, WholeExperts, parse
from shoal.server.errors import UserError


def add_experts_option(group: _ActionsContainer) -> None:
    """Add ``--whole-experts``."""
    group.add_argument(
        "--whole-experts",
        type=_steps,
        default="auto",
        metavar="auto|never|FROM[-TO]",
        help="steps of so many tokens in which each engine of a group computes some of a model's "
        "experts whole (EP), instead of a share of each (TP); 0: all steps; auto: in groups of two "
        "with small experts in 16 bits, those with 4 to 32 tokens for an expert on average "
        "(default: auto on GPUs, never on CPUs)",
    )


def _steps(text: str) -> WholeExperts | None:
    try:
        return parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def settled_experts(asked: WholeExperts | None, share: int) -> WholeExperts | None:
    """Return in which steps members of a group compute whole experts.

    Engines that share weights keep whole experts, so their groups have no shares of each.

    Args:
        asked: ``--whole-experts``.
        share: how many engines share weights.

    Raises:
        UserError: only some steps were to have whole experts.
    """
    if share == 1:
        return asked
    if asked is not None and not asked.automatic and not asked.always:
        raise UserError(
            f"--whole-experts: with --share-weights {share} engines keep whole experts, and have "
            "no shares of each for other steps"
        )
    return ALWAYS
