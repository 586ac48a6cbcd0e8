"""The search for the largest rate finds a known one, and says what it tried."""

import pytest

from shoal.loadgen.max_rate import Window, find_max_rate, table, verdict_of

GOOD, BAD = Window(10, 0.95, 0.1, 0.01), Window(10, 0.5, 9.0, 0.01)


class Server:
    """Keeps its promises up to a rate, but for windows in which it does not."""

    def __init__(self, capacity: float, *, noisy: tuple[int, ...] = ()) -> None:
        self.capacity, self.noisy = capacity, noisy
        self.asked: list[tuple[float, int]] = []

    async def __call__(self, rate: float, number: int) -> Window:
        self.asked.append((rate, number))
        return GOOD if rate <= self.capacity and number not in self.noisy else BAD


@pytest.mark.parametrize("capacity", [1.01, 3.0, 7.7, 15.9])
async def test_it_finds_the_rate_within_its_precision(capacity: float) -> None:
    server = Server(capacity)
    found = await find_max_rate(server, (1.0, 16.0), precision=0.02)
    assert found.kept is not None
    assert found.broken is not None
    assert found.kept <= capacity < found.broken <= 1.02 * found.kept
    assert "largest rate that keeps the targets" in verdict_of(found)
    assert [number for _, number in server.asked] == list(range(len(server.asked)))
    assert [len(trial.windows) for trial in found.trials] == [
        3 if trial.kept else 1 for trial in found.trials
    ]


async def test_one_bad_window_breaks_a_rate() -> None:
    found = await find_max_rate(Server(99.0, noisy=(5,)), (1.0, 4.0), windows=3)
    assert [trial.kept for trial in found.trials[:2]] == [True, False]
    assert len(found.trials[1].windows) == 3
    once = await find_max_rate(Server(99.0, noisy=(5,)), (1.0, 4.0), windows=2)
    assert once.kept == 4.0, "the fifth window was not needed"


@pytest.mark.parametrize(
    ("capacity", "kept", "broken", "said"),
    [
        (0.5, None, 1.0, "Not even 1 requests"),
        (99.0, 16.0, None, "Even 16 requests"),
    ],
)
async def test_rates_outside_the_bounds_are_not_guessed(
    capacity: float, kept: float | None, broken: float | None, said: str
) -> None:
    found = await find_max_rate(Server(capacity), (1.0, 16.0))
    assert (found.kept, found.broken) == (kept, broken)
    assert verdict_of(found).startswith(said)


async def test_a_window_that_measured_the_client_ends_the_search() -> None:
    windows = iter([GOOD, BAD, GOOD, Window(10, 1.0, None, None, ("sending lagged",))])

    async def measure(_: float, __: int) -> Window:
        return next(windows)

    found = await find_max_rate(measure, (1.0, 16.0), windows=1)
    assert (found.kept, found.broken, found.problem) == (4.0, 16.0, "sending lagged")
    *_, last, verdict = table(found).splitlines()
    assert "sending lagged" in last
    assert verdict.startswith("The search ended early")


async def test_the_table_has_a_line_for_every_window() -> None:
    found = await find_max_rate(Server(3.0), (1.0, 16.0), windows=2, precision=1.0)
    head, *lines, _ = table(found).splitlines()
    assert "TTFT p90" in head
    assert len(lines) == sum(len(trial.windows) for trial in found.trials)
    assert sum("breaks the targets" in line for line in lines) == 2
    assert "100.0" in lines[0]


async def test_how_much_must_be_kept_is_said() -> None:
    strict = await find_max_rate(Server(99.0), (1.0, 2.0), attainment=0.99)
    assert (strict.kept, strict.broken) == (None, 1.0)
