"""Which steps with prompts replay a full CUDA graph, where a unit has such graphs.

The scheduler and all runners of a unit judge each step alike.
"""

from typing import Any

LONGEST_CONTEXT = 4096
"""Tokens of the longest context of a request in a step with such a graph."""


def longest_context(scheduler_output: Any) -> int:
    """Return the tokens of the longest context that a step reads (vLLM's ``SchedulerOutput``)."""
    computed = [request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs]
    return max((*computed, *scheduler_output.scheduled_cached_reqs.num_computed_tokens), default=0)
