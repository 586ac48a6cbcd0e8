"""How engines work, as far as the environment says it: for operators who measure."""

import os
from collections.abc import Mapping

EXCHANGE = "SHOAL_SP_EXCHANGE"
GRAPHS = "SHOAL_SP_GRAPHS"
AWAKE = "SHOAL_AWAKE_SECONDS"
MOST_AWAKE = 60.0


class SettingError(ValueError):
    """A variable that says nothing that can be done; the message names it and the reason."""


def exchange_setting(environment: Mapping[str, str] = os.environ) -> str:
    """Return by what members exchange heads: ``peer``, ``nccl``, or ``auto`` for the better.

    Raises:
        SettingError: the variable says anything else.
    """
    return _word(environment, EXCHANGE, ("auto", "peer", "nccl"))


def replays_graphs(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether steps by sequence replay CUDA graphs, where there are any.

    Raises:
        SettingError: the variable says neither 0 nor 1.
    """
    return _word(environment, GRAPHS, ("1", "0")) == "1"


def awake_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Return how long a runner asks for its next step, again and again, before it sleeps.

    A core that has slept is slow for the first milliseconds, which are all of a short prompt's
    step; one that is awake is busy. vLLM's workers of TP are for a second (``SpinCondition``).

    Raises:
        SettingError: the variable says no number of seconds.
    """
    word = environment.get(AWAKE, "0")
    try:
        seconds = float(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_AWAKE:
        raise SettingError(f"{AWAKE}={word}: it may be 0 to {MOST_AWAKE:g} seconds")
    return seconds


def _word(environment: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    """Return what a variable says, by default the first of the ``words`` that it may."""
    word = environment.get(name, words[0])
    if word not in words:
        raise SettingError(f"{name}={word}: it may be {', '.join(words[:-1])} or {words[-1]}")
    return word
