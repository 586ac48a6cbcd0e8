"""The bound on what changing layouts between prompts and outputs could win."""

from dataclasses import replace

import pytest

from shoal.loadgen.bench.offline_layouts import (
    WHOLE_PROMPTS,
    cycle,
    held,
    layouts,
    main,
    requests,
    seconds,
)
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.simulation.data_sheets import hardware_named
from shoal.runtime.simulation.node_settings import Node
from shoal.runtime.simulation.shape_files import read_shape

NODE = Node(
    read_shape("llama-3-8b-bf16"),
    hardware_named("l40s"),
    engines=2,
    max_group=2,
    prefix_caching=False,
)


def test_all_static_layouts_are_compared() -> None:
    assert [one.name for one in layouts(2)] == ["dp", "pp2", "tp2"]
    assert {one.world_size for one in layouts(4)} == {1, 2, 4}


def test_a_cycle_takes_the_prompts_in_dp_and_the_outputs_in_the_other_layout() -> None:
    same = cycle(NODE, DP, 1000, 20, 8)
    assert same == pytest.approx(8 / seconds(NODE, DP, WHOLE_PROMPTS, requests(8, 1000, 20)))
    # Prompts take longer in TP on slow links, and the outputs of few requests do not.
    tp = Layout(tp=2)
    assert cycle(NODE, tp, 1000, 20, 8) > 8 / seconds(
        NODE, tp, WHOLE_PROMPTS, requests(8, 1000, 20)
    )


def test_room_for_kv_twice_holds_half() -> None:
    assert held(NODE, 8000, 2) == held(NODE, 8000, 1) // 2 > 0
    assert held(replace(NODE, max_num_seqs=3), 8000, 1) == 6


def test_the_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt-tokens", "20000", "--output-tokens", "3", "--requests", "2"]
    main(["--hardware", "l40s", "--engines", "2", "--chunks", "8192", *lengths])
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        *("static dp", "static pp2", "static tp2"),
        *("cycle to dp, in place", "cycle to tp2, in place"),
        *("cycle to dp, KV twice", "cycle to tp2, KV twice"),
    ]
