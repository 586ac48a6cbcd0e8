"""The options of steps that compute prompts: of serving, and in part of simulating."""

from argparse import Namespace, _ActionsContainer
from typing import Any

from shoal.runtime.config import (
    EXPERTS_FULL_GRAPH_TOKENS,
    FULL_GRAPH_TOKENS,
    MIXED_STEP_TOKENS,
)


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


def add_full_graph_option(group: _ActionsContainer) -> None:
    """Add ``--full-graph-tokens``."""
    group.add_argument(
        "--full-graph-tokens",
        type=int,
        metavar="TOKENS",
        help="steps with prompts of up to so many tokens are launched at once, by a full CUDA "
        "graph, where vLLM launches them piece by piece; 0: none is (default: "
        f"{FULL_GRAPH_TOKENS}, {EXPERTS_FULL_GRAPH_TOKENS} for models with experts)",
    )


def settle_full_graphs(args: Namespace, *, has_experts: bool) -> None:
    """Choose for how many tokens steps with prompts get full graphs, if nobody has."""
    if args.full_graph_tokens is None:
        default = EXPERTS_FULL_GRAPH_TOKENS if has_experts else FULL_GRAPH_TOKENS
        args.full_graph_tokens = default


def step_settings(args: Namespace) -> dict[str, Any]:
    """Return the fields of ``NodeConfig`` that these options set."""
    return {
        "mixed_step_tokens": args.mixed_step_tokens,
        "full_graph_tokens": args.full_graph_tokens,
    }
