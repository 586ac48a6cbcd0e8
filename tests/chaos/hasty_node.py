"""A ``shoal`` command whose batch worker is back soon, however often it dies."""

from shoal.runtime.node import helpers
from tests.server.node import shoal

BACKOFF_SECONDS = 0.01
"""Before a helper's first restart; engines have an option for theirs."""


def hasty_shoal(arguments: list[str]) -> int:
    """Be the command; ``tests.server.node`` runs it in a process with vLLM imported."""
    helpers.BACKOFF_SECONDS = BACKOFF_SECONDS
    return shoal(arguments)
