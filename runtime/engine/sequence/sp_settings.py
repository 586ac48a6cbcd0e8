"""How steps by sequence run, as far as the environment says it: for operators who measure."""

import os
from collections.abc import Mapping

EXCHANGE = "SHOAL_SP_EXCHANGE"
GRAPHS = "SHOAL_SP_GRAPHS"


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


def _word(environment: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    """Return what a variable says, by default the first of the ``words`` that it may."""
    word = environment.get(name, words[0])
    if word not in words:
        raise SettingError(f"{name}={word}: it may be {', '.join(words[:-1])} or {words[-1]}")
    return word
