"""The option of how a group divides a model's experts."""

from argparse import ArgumentTypeError, _ActionsContainer

from shoal.runtime.whole_experts import WholeExperts, parse


def add_experts_option(group: _ActionsContainer) -> None:
    """Add ``--whole-experts``."""
    group.add_argument(
        "--whole-experts",
        type=_steps,
        default="auto",
        metavar="auto|never|FROM[-TO]",
        help="steps of so many tokens in which each engine of a group computes some of a model's "
        "experts whole (EP), instead of a share of each (TP); 0: all steps; auto: in groups of two "
        "with small experts, those with 4 to 32 tokens for an expert on average "
        "(default: auto on GPUs, never on CPUs)",
    )


def _steps(text: str) -> WholeExperts | None:
    try:
        return parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
