"""How many prompt tokens a step has in which other requests decode."""

from shoal.policies.values.layouts import Layout


def mixed_limit(layout: Layout, asked: int) -> int:
    """Return the most prompt tokens of a unit's step in which requests decode; 0: any number.

    Each member of a wide group computes at least a quarter of what is asked for. With less, the
    host and the reading of the weights would take longer than the computing.

    Args:
        layout: the unit's layout.
        asked: see ``NodeConfig.mixed_step_tokens``.
    """
    return max(asked, asked * layout.tp // 4)
