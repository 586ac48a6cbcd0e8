"""What a step computes, in the terms of which engines tell."""

from collections.abc import Iterable

from shoal.runtime.protocol.messages import Work


def work_of_step(shares: Iterable[tuple[int, int]]) -> Work:
    """Return what one step computes. A prompt's last token alone costs, and counts as, a decode.

    Args:
        shares: for each request, its tokens computed before the step, and those in the step.
    """
    decodes = context = prefill = pairs = 0
    for before, tokens in shares:
        if tokens == 1 and before:
            decodes += 1
            context += before + 1
        else:
            prefill += tokens
            pairs += tokens * (2 * before + tokens + 1) // 2
    return Work(1, 0.0, decodes, context, prefill, pairs)
