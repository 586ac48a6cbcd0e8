"""What the fake engine says about the probabilities of tokens, in vLLM's wire format.

They are made up, but have the shape that vLLM's front end reads: for every token its own logprob,
and those of as many others as were asked for (vLLM's ``Sampler.gather_logprobs``).
"""

from array import array
from collections.abc import Sequence

from shoal.runtime.protocol import wire

_LIKELY = -0.5
"""Logprob of every token of a request; the logprobs of other tokens are lower by one."""


def of_outputs(tokens: Sequence[int], sampling: wire.Sampling) -> wire.Logprobs | None:
    """Return the ``LogprobsLists`` of output tokens; None if they were not asked for."""
    if sampling.logprobs is not None:
        rows = [_row(token, sampling.logprobs) for token in tokens]
    elif sampling.logprob_token_ids:
        rows = [[token, *sampling.logprob_token_ids] for token in tokens]
    else:
        return None
    return _table(rows, integers="<i4", reals="<f4")


def of_prompt(prompt: Sequence[int], sampling: wire.Sampling) -> wire.Logprobs | None:
    """Return the ``LogprobsTensors`` of a prompt's tokens but the first; None as above."""
    if sampling.prompt_logprobs is None or len(prompt) < 2:
        return None
    rows = [_row(token, sampling.prompt_logprobs) for token in prompt[1:]]
    return _table(rows, integers="int32", reals="float32")


def _row(token: int, likeliest: int) -> list[int]:
    """Return the ids of a row: the token, then the likeliest tokens, beginning with itself."""
    return [token, *[token, *range(likeliest)][:likeliest]]


def _table(rows: Sequence[Sequence[int]], *, integers: str, reals: str) -> wire.Logprobs:
    ids = array("i", (id_ for row in rows for id_ in row))
    values = array("f", (_LIKELY - (id_ != row[0]) for row in rows for id_ in row))
    shape = (len(rows), len(rows[0]))
    return (
        wire.packed(integers, shape, ids.tobytes()),
        wire.packed(reals, shape, values.tobytes()),
        wire.packed(integers, shape[:1], array("i", [1] * len(rows)).tobytes()),
        None,
    )
