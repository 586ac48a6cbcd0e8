"""Lets a V2 model runner write the tokens of requests that begin as they are sent: in arrays.

vLLM gathers what a step writes to its table of tokens in a list of numbers, and makes an array of
it afterwards (``StagedWriteTensor``). See ``beginnings.py``.
"""

from array import array
from typing import Any


class _Contents(array):  # type: ignore[type-arg]
    """Numbers that are to be written. Takes lists, too."""

    def clear(self) -> None:
        del self[:]


def take_arrays(model_runner: Any) -> None:
    """Make a model runner take arrays of tokens without unpacking them.

    A table in the device's own memory, which speculation by n-grams has, stays as it is: what is
    written to it becomes a tensor in another way.

    Args:
        model_runner: a layout's, of either kind; V1 model runners are left as they are.
    """
    states = getattr(model_runner, "req_states", None)
    if states is not None and states.all_token_ids.write_contents is not None:
        states.all_token_ids._staged_write_contents = _Contents("i")
