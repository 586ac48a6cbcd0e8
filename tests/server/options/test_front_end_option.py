"""The default number of front ends follows the engines and the cores."""

import pytest

from shoal.server.options.front_end_option import front_ends


@pytest.mark.parametrize(
    ("engines", "on_cpu", "cores", "expected"),
    [(4, False, 32, 8), (4, False, 31, 4), (1, False, 8, 2), (4, True, 64, 1)],
)
def test_an_engine_has_two_front_ends_where_there_are_cores_enough(
    engines: int, on_cpu: bool, cores: int, expected: int
) -> None:
    assert front_ends(engines, on_cpu=on_cpu, cores=cores) == expected
