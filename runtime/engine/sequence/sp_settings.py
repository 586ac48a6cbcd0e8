"""How members exchange heads in a step by sequence, as the environment says."""

import os
from collections.abc import Mapping

EXCHANGE = "SHOAL_SP_EXCHANGE"
_WORDS = ("auto", "peer", "nccl")


class SettingError(ValueError):
    """A variable asks for something impossible; the message names it and the reason."""


def exchange_setting(environment: Mapping[str, str] = os.environ) -> str:
    """Return how members exchange heads: ``peer``, ``nccl``, or ``auto`` for the better way.

    Raises:
        SettingError: the variable says anything else.
    """
    word = environment.get(EXCHANGE, "auto")
    if word not in _WORDS:
        raise SettingError(f"{EXCHANGE}={word}: it may be auto, peer or nccl")
    return word
