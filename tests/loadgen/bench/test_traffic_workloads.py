"""Workloads are named by their options, and no two traces have a prompt in common."""

import json
from pathlib import Path

import pytest

from shoal.loadgen.bench.traffic_workloads import TraceWriter, read_traffic
from shoal.loadgen.workload import Arrival, Block, Workload
from shoal.server.errors import UserError


def lines(path: Path) -> list[dict[str, list[int]]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_name_says_what_was_asked_for() -> None:
    one = read_traffic("--trace poisson --rate 2 --requests 3", 5)
    assert one.name == "poisson --rate 2 --requests 3 (seed 5)"
    assert len(one.workload.arrivals) == 3
    assert one.workload != read_traffic("poisson --rate 2 --requests 3", 6).workload


def test_a_trace_is_named_without_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"at": 0, "prompt_tokens": 5, "output_tokens": 2}\n')
    assert read_traffic(str(path), 0).name == "t (seed 0)"
    path.write_text('{"at": 0, "prompt_tokens": 5, "output_tokens": 2, "priority": -1}\n')
    with pytest.raises(UserError, match="no priorities"):
        read_traffic(str(path), 0)
    with pytest.raises(UserError, match="waits for no answers"):
        read_traffic("chats --requests 2", 0)


def test_prompts_keep_what_they_share_and_share_nothing_with_other_traces(tmp_path: Path) -> None:
    common = (Block("a", 512), Block("b", 1024), Block("c", 100))
    workload = Workload(
        "w", (Arrival(0.0, 5000, 1, prefix=common), Arrival(1.5, 1200, 2, prefix=common))
    )
    writer = TraceWriter(tmp_path)
    first, second = lines(writer.write(workload)), lines(writer.write(workload))
    assert [len(line["hash_ids"]) for line in first] == [10, 3], "a token for each of the prompt"
    assert first[0]["hash_ids"][:3] == first[1]["hash_ids"]
    assert len(set(first[0]["hash_ids"])) == 10
    used = [{n for line in trace for n in line["hash_ids"]} for trace in (first, second)]
    assert not used[0] & used[1]
    assert [(line["timestamp"], line["output_length"]) for line in first] == [(0.0, 1), (1500.0, 2)]


def test_small_blocks_are_put_together(tmp_path: Path) -> None:
    """32 blocks of 16 tokens are one of Mooncake's; what is left over is shared with nobody."""
    common = [Block(f"c{n}", 16) for n in range(32)]
    first, second, other = (
        Arrival(0.0, 16 * 70, 1, prefix=tuple(blocks))
        for blocks in (
            [*common, *(Block(f"a{n}", 16) for n in range(38))],
            [*common, *(Block(f"b{n}", 16) for n in range(38))],
            [*common[1:], *(Block(f"a{n}", 16) for n in range(39))],
        )
    )
    path = TraceWriter(tmp_path).write(Workload("w", (first, second, other)))
    found = [line["hash_ids"] for line in lines(path)]
    assert [len(ids) for ids in found] == [3, 3, 3]
    assert found[0][0] == found[1][0]
    assert len({*found[0], *found[1], *found[2]}) == 8, "all others are their own"
