"""The bound on what a buffer for KV in the host's memory could win."""

from collections import deque
from dataclasses import replace

import pytest

from shoal.loadgen.bench.host_tier import (
    WHOLE_PROMPTS,
    Decoding,
    HostTier,
    Parked,
    cycles,
    divided,
    drawn,
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
TP = Layout(tp=2)
TOKEN = NODE.shape.model_shape().kv_bytes_per_token
FAST = HostTier(1e12, 1e15, switch_seconds=0.0)


def parked(count: int, tokens: int, left: int) -> deque[Parked]:
    return deque(Parked(tokens, left) for _ in range(count))


def test_all_static_layouts_are_compared() -> None:
    assert [one.name for one in layouts(2)] == ["dp", "pp2", "tp2"]
    assert {one.world_size for one in layouts(4)} == {1, 2, 4}


@pytest.mark.parametrize("layout", [DP, TP])
def test_outputs_take_as_long_as_in_the_simulator(layout: Layout) -> None:
    asked = [requests(8, 1000, 100), requests(8, 1000, 1)]
    whole, prompts = (seconds(NODE, layout, WHOLE_PROMPTS, each) for each in asked)
    took, left = Decoding(NODE, layout, FAST).run(parked(8, 1001, 99), to_the_end=True)
    assert took == pytest.approx(whole - prompts, rel=0.03)
    assert left == []


def test_a_request_is_read_when_its_unit_has_room_for_all_of_it() -> None:
    one = replace(NODE, engines=1, max_group=1, max_num_seqs=1)
    alone, _ = Decoding(one, DP, FAST).run(parked(1, 1000, 50), to_the_end=True)
    turns, left = Decoding(one, DP, FAST).run(parked(3, 1000, 50), to_the_end=True)
    assert turns == pytest.approx(3 * alone)
    assert left == []
    _, left = Decoding(one, DP, FAST).run(parked(3, 1000, 50), to_the_end=False)
    assert [each.left for each in left] == [50]


def test_nobody_decodes_before_it_is_read() -> None:
    slow = replace(FAST, bytes_per_second=1000 * TOKEN)
    took, _ = Decoding(NODE, TP, slow).run(parked(2, 1000, 1), to_the_end=True)
    # Both members read half of each request, one after the other.
    assert 1.0 < took < 1.2


def test_a_small_buffer_takes_several_cycles_and_longer() -> None:
    node, outputs = replace(NODE, max_num_seqs=2), drawn(12, 20, 200)
    large, one = cycles(node, TP, FAST, 2000, outputs)
    small = replace(FAST, size=6 * 2300 * TOKEN)
    longer, several = cycles(node, TP, small, 2000, outputs)
    assert one == 1 < several
    assert longer > large


def test_slow_writes_hold_up_prompts() -> None:
    fast, _ = cycles(NODE, DP, FAST, 2000, [1] * 4)
    slow, _ = cycles(NODE, DP, replace(FAST, bytes_per_second=1000 * TOKEN), 2000, [1] * 4)
    assert fast < 3.9 < slow == pytest.approx(4.0)


def test_a_buffer_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for one more prompt"):
        cycles(NODE, TP, replace(FAST, size=100 * TOKEN), 2000, [5])


def test_a_layout_that_divides_the_weights_has_more_room_for_kv() -> None:
    whole, one, two = (
        node.hardware.num_blocks(NODE.shape)
        for node in (NODE, divided(NODE, DP), divided(NODE, TP))
    )
    assert one == whole
    assert (two - one) * 16 * TOKEN == pytest.approx(NODE.shape.weight_bytes / 2, rel=1e-3)


def test_options_change_what_static_layouts_serve(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt-tokens", "1000", "--outputs", "50", "50", "--requests", "30"]
    node = ["--hardware", "l40s", "--engines", "2", "--gpu-memory-utilization", "0.49"]

    def rates(*options: str) -> dict[str, str]:
        main([*node, *lengths, *options])
        lines = capsys.readouterr().out.splitlines()
        return dict(line.split(": ") for line in lines if line.startswith("static"))

    alike, divides = rates(), rates("--divide-weights")
    ample = rates("--gpu-memory-utilization", "0.9")
    assert divides["static dp"] == alike["static dp"] != ample["static dp"]
    assert divides["static tp2"] != alike["static tp2"]


LENGTHS = ["--prompt-tokens", "2000", "--outputs", "2", "5", "--requests", "2"]
A10 = ["--hardware", "a10", "--weight-dtype", "fp8", "--arithmetic", "bf16", "--engines", "2"]


def test_the_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main([*A10, *LENGTHS])
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        *("static dp", "static pp2", "static tp2"),
        *("policy batch", "policy batch"),  # without a tier, and with one
        *("cycle to dp, 80 GiB for each GPU", "cycle to tp2, 80 GiB for each GPU"),
    ]


def test_the_policy_can_have_nodes_that_share_weights(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--static", "pp2", "--host-gib", "--share-weights", "2", "--max-pp", "2"]
    main([*A10, *LENGTHS, *chosen, "--requests", "40"])
    static, alone, shared = capsys.readouterr().out.splitlines()
    assert static.startswith("static pp2: ")
    assert "weights shared" not in alone
    assert shared.endswith("weights shared by 2, in chunks of 512")
    assert " by 2 x dp" in shared
