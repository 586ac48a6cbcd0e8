"""What n-grams propose on vLLM's V2 model runner, written down once more for tests.

The proposals of a request follow from its tokens alone. So how many of them are accepted is known
beforehand, wherever the request runs.
"""

from collections.abc import Sequence

ON_DEVICE = "ngram_gpu"
"""The method with which vLLM schedules steps ahead."""


def proposed(tokens: Sequence[int], drafts: int, shortest: int, longest: int) -> list[int]:
    """Return what follows the last tokens where as many as possible of them stood before.

    Of several such places it is the last one. Where nothing follows, or nothing was found, the last
    token is proposed (``vllm.v1.worker.gpu.spec_decode.ngram.speculator``).
    """
    end = len(tokens)
    for size in range(longest, shortest - 1, -1):
        for at in range(end - size - 1, -1, -1):
            if tokens[at : at + size] == tokens[end - size :]:
                found = list(tokens[at + size : at + size + drafts])
                return found + [tokens[-1]] * (drafts - len(found))
    return [tokens[-1]] * drafts


def judged(
    prompt: list[int], outputs: list[int], count: int, drafts: int, shortest: int, longest: int
) -> tuple[int, int]:
    """Return how many drafts are accepted and rejected while a request generates greedily.

    Args:
        prompt: its prompt, of which nothing is cached.
        outputs: what it generates, with ``drafts`` more tokens than it is to generate.
        count: tokens that it is to generate.
        drafts: proposed for each step.
        shortest: of the sequences of tokens that are looked for.
        longest: of these.
    """
    known, accepted, rejected = 1, 0, 0
    while known < count:
        right = 0
        for draft in proposed(prompt + outputs[:known], drafts, shortest, longest):
            if draft != outputs[known + right]:
                break
            right += 1
        accepted, rejected = accepted + right, rejected + drafts - right
        known += right + 1
    return accepted, rejected
