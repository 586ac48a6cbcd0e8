"""Shards of tensors, by ranges of a layer's outputs and inputs."""

import pytest
import torch

from shoal.runtime.engine.weights.rules.shards import Axes, Shard, UnviewableWeights

BLOCK = 128


def test_ranges_are_taken_in_whole_blocks() -> None:
    scale = torch.arange(12).view(4, 3)
    axes = Axes(0, 1, BLOCK, BLOCK)
    assert axes.take_outputs(scale, 2 * BLOCK, BLOCK).tolist() == [[6, 7, 8]]
    assert axes.take_inputs(scale, BLOCK, 2 * BLOCK).tolist() == [[1, 2], [4, 5], [7, 8], [10, 11]]
    with pytest.raises(UnviewableWeights, match="blocks of 128"):
        axes.take_outputs(scale, 64, BLOCK)


def test_the_shards_of_a_layer_are_all_of_it_in_turn() -> None:
    ranges = [Shard(rank, 4).cut(20) for rank in range(4)]
    assert ranges == [(0, 5), (5, 5), (10, 5), (15, 5)]
