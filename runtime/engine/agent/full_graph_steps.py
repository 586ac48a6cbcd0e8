"""Which steps with prompts replay a full CUDA graph, where a unit has such graphs.

The scheduler and all runners of a unit judge each step alike.
"""

from typing import Any

MOST_REQUESTS = 512
"""Requests of the largest step with such a graph, as many as vLLM's own graphs have."""
LONGEST_CONTEXT = 8192
"""Tokens of the longest context of a request in a step with such a graph. One block of threads
reads all of it. In TP2 such a step is faster than one in pieces up to about 9,000 tokens, and in DP
up to about 6,000, or more where the host is slow (docs/benchmarks/host.md)."""


def has_full_graph(scheduler_output: Any, largest: int) -> bool:
    """Return whether a step computes prompts, and fits such graphs.

    Args:
        scheduler_output: vLLM's ``SchedulerOutput``.
        largest: tokens of the largest one; 0: there are none.
    """
    requests = len(scheduler_output.num_scheduled_tokens)
    tokens: int = scheduler_output.total_num_scheduled_tokens
    if not (requests < tokens <= largest and requests <= MOST_REQUESTS):
        return False
    computed = [request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs]
    contexts = (*computed, *scheduler_output.scheduled_cached_reqs.num_computed_tokens)
    return max(contexts, default=0) <= LONGEST_CONTEXT
