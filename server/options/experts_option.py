"""The option of how a group divides a model's experts."""

from argparse import ArgumentTypeError, _ActionsContainer

from shoal.runtime.whole_experts import WholeExperts, parse

AUTO = "auto"
"""The default; on CPUs it is the same as ``never``."""


def add_experts_option(group: _ActionsContainer) -> None:
    """Add ``--whole-experts``."""
    group.add_argument(
        "--whole-experts",
        type=_spelled,
        default=AUTO,
        metavar="auto|never|FROM[-TO]",
        help="steps of so many tokens in which each engine of a group computes some of a model's "
        "experts whole (EP), instead of a share of each (TP); 0: all steps; auto: on GPUs those "
        "with 4 to 64 tokens for an expert on average, else none (default: %(default)s)",
    )


def _spelled(text: str) -> str:
    try:
        parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def whole_experts(spelled: str, *, on_gpus: bool) -> WholeExperts | None:
    """Return the steps in which engines compute whole experts; None: there are none."""
    return None if spelled == AUTO and not on_gpus else parse(spelled)
