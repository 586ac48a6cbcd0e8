"""The option of steps that compute prompts while requests decode, of serving and simulating."""

from argparse import _ActionsContainer

from shoal.runtime.config import MIXED_STEP_TOKENS


def add_mixed_option(group: _ActionsContainer) -> None:
    """Add ``--mixed-step-tokens``."""
    group.add_argument(
        "--mixed-step-tokens",
        type=int,
        metavar="TOKENS",
        default=MIXED_STEP_TOKENS,
        help="most prompt tokens of a step in which requests decode, so that these do not wait "
        "long for their next tokens; groups of eight engines have twice as many; 0: as many as in "
        "other steps (default: %(default)s)",
    )
