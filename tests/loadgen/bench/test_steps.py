"""The table of ``shoal bench steps``, and the shape it measures by default."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import shoal.server
from shoal.loadgen.bench import steps
from shoal.policies.values.batch import Batch
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.simulation.calibration import Sample
from shoal.runtime.simulation.shape_files import HardwareFile, read_shape
from shoal.server.errors import UserError


def test_measured_and_predicted_times_stand_side_by_side() -> None:
    hardware = HardwareFile(
        memory_bytes=1e9,
        memory_bytes_per_second=1e15,
        flops_per_second={"fp32": 1e18},
        link_bytes_per_second=1e15,
        allreduce_seconds=0.0,
        step_seconds=0.004,
        request_seconds=0.001,
        message_seconds=0.002,
    )
    decode = Sample(DP, (Batch(3, 30),), 0.005)
    prompt = Sample(Layout(tp=2), (Batch(prefill_tokens=64, prefill_context=32),), 0.010, 3)
    in_sp = replace(prompt, sp=2)
    samples = [decode, prompt, in_sp]
    rows = steps.table(read_shape("shoal-demo"), hardware, samples).splitlines()[1:]
    assert [" ".join(row.split()) for row in rows] == [
        "dp 3 30 0 5.00 7.00 +40.0%",
        "tp2 0 0 64 10.00 10.00 +0.0%",
        "sp2 0 0 64 10.00 10.00 +0.0%",
    ]


def test_the_demo_shape_is_that_of_the_demo_model() -> None:
    path = Path(shoal.server.__file__).parent / "demo" / "checkpoint" / "config.json"
    config = json.loads(path.read_text())
    shape = read_shape(steps.DEMO_SHAPE)
    assert (shape.layers, shape.hidden) == (config["num_hidden_layers"], config["hidden_size"])
    assert (shape.heads, shape.head_dim) == (config["num_attention_heads"], config["head_dim"])
    assert (shape.kv_heads, shape.vocab) == (config["num_key_value_heads"], config["vocab_size"])
    assert shape.intermediate == config["intermediate_size"]
    assert shape.max_model_len == config["max_position_embeddings"]


def test_a_shape_that_is_none_is_named() -> None:
    with pytest.raises(UserError, match="--model-shape: cannot read no-such"):
        steps.main(["--output", "unused", "--model-shape", "no-such"])
