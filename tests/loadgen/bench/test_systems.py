"""What a system's command says of it."""

import pytest

from shoal.loadgen.bench.measures import Sizes
from shoal.loadgen.bench.modes import ways
from shoal.loadgen.bench.systems import SHOAL, Settings, System, all_systems, dp_layout
from shoal.policies.shift import DEFAULT_THRESHOLD


@pytest.mark.parametrize(
    ("options", "threshold"),
    [
        ((), DEFAULT_THRESHOLD),
        (("--shift-threshold", "512", "--max-sp", "2"), 512),
        (("--shift-threshold=off", "--shift-threshold=auto"), "auto"),
        (("--shift-threshold", "fish"), "fish"),
        (("--shift-thresholds", "1"), DEFAULT_THRESHOLD),
    ],
)
def test_the_threshold_as_served_is_read_from_the_command(
    options: tuple[str, ...], threshold: int | str
) -> None:
    system = System(SHOAL, ("serve", *options), (dp_layout(2, pinned=False),), switches=True)
    assert system.shift_threshold == threshold


@pytest.mark.parametrize(
    ("options", "max_sp"),
    [((), 1), (("--max-sp=1",), 1), (("--max-sp=4",), 4), (("--max-sp", "2", "--x"), 2)],
)
def test_the_degree_of_sp_as_served_is_read_from_the_command(
    options: tuple[str, ...], max_sp: int
) -> None:
    system = System(SHOAL, ("serve", *options), ())
    assert (system.max_sp, system.shifts) == (max_sp, max_sp > 1)


def settings(engines: int, *shoal_options: str, degrees: tuple[int, ...] = ()) -> Settings:
    return Settings(
        *("llama-3-8b", engines, "bfloat16", None, 4096, 64, 2048, 0.9, False, 1, ()),
        shoal_options=shoal_options,
        degrees=degrees,
    )


def test_degrees_between_are_replicas_of_stock_and_groups_of_shoal() -> None:
    systems = {s.name: s for s in all_systems(settings(8, degrees=(4,)), "model")}
    assert list(systems) == ["stock-dp", "stock-tp4", "stock-tp", "shoal"]
    replicas = systems["stock-tp4"]
    words = " ".join(replicas.command)
    assert "--tensor-parallel-size 4 --data-parallel-size 2" in words
    (layout,) = replicas.layouts
    assert (layout.name, layout.units) == ("tp4", ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert layout.pinned, "a request can be sent to a replica, as to an engine of stock DP"
    names = [layout.name for layout in systems["shoal"].layouts]
    assert names == ["dp", "tp4", "tp8"], "switches are between the first and the last"
    assert not any(layout.pinned for layout in systems["shoal"].layouts)


def test_experts_are_measured_in_ranges_beside_shares() -> None:
    systems = {s.name: s for s in all_systems(settings(2), "model", experts=True)}
    assert list(systems) == ["stock-dp", "stock-tp", "stock-ep", "shoal"]
    tp, ep = (systems[name] for name in ("stock-tp", "stock-ep"))
    added = [word for word in ep.command if word not in tp.command]
    assert added == ["--enable-expert-parallel"], "all else is alike"
    assert ep.layouts == tp.layouts
    dense = [system.name for system in all_systems(settings(2), "model")]
    assert "stock-ep" not in dense, "a dense model has nothing to divide so"


def test_every_degree_is_measured_by_sequence_too() -> None:
    def names(found: Settings) -> list[str]:
        return [way.name for way in ways(all_systems(found, "model")[-1], Sizes())]

    with_sp = settings(8, "--max-sp=8", degrees=(2, 4))
    assert names(with_sp) == ["dp", "tp2", "tp4", "tp8", "sp2", "sp4", "sp8", "shift"]
    assert names(settings(8, "--max-sp=1", degrees=(2,))) == ["dp", "tp2", "tp8"]
    (system,) = (s for s in all_systems(settings(4, "--max-group=2"), "model") if s.switches)
    assert system.max_sp == 2, "no more than groups have"
    assert names(settings(4)) == ["dp", "tp4", "sp4", "shift"], "as served by default"
