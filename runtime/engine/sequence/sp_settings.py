"""By what members exchange heads in a step by sequence, as far as the environment says it."""

import os
from collections.abc import Mapping

EXCHANGE = "SHOAL_SP_EXCHANGE"
_WORDS = ("auto", "peer", "nccl")


class SettingError(ValueError):
    """A variable that says nothing that can be done; the message names it and the reason."""


def exchange_setting(environment: Mapping[str, str] = os.environ) -> str:
    """Return by what members exchange heads: ``peer``, ``nccl``, or ``auto`` for the better.

    Raises:
        SettingError: the variable says anything else.
    """
    word = environment.get(EXCHANGE, "auto")
    if word not in _WORDS:
        raise SettingError(f"{EXCHANGE}={word}: it may be auto, peer or nccl")
    return word
