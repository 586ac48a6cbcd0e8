"""Shape and hardware files, and what the built-in ones predict."""

from pathlib import Path

import msgspec
import pytest

from shoal.policies.shift import ShiftRule, tokens_for
from shoal.policies.values.batch import Batch, Mode
from shoal.policies.values.layouts import DP, Layout
from shoal.runtime.simulation.shape_files import (
    FileError,
    built_in,
    cost_model,
    read_hardware,
    read_shape,
    step_times,
)
from shoal.runtime.vocabulary_sharing import head_pieces

SHAPE = read_shape("llama-3-8b-bf16")
H200 = read_hardware("h200")


def test_parameters_are_those_of_the_model() -> None:
    embedding = SHAPE.hidden * SHAPE.vocab
    # 8.03 and 70.6 billion, but for the norms.
    assert SHAPE.parameters + embedding == pytest.approx(8.03e9, rel=0.001)
    large = read_shape("llama-3-70b-fp8")
    assert large.parameters + large.hidden * large.vocab == pytest.approx(70.55e9, rel=0.001)
    assert large.weight_bytes == pytest.approx(large.parameters + 2 * large.hidden * large.vocab)


def test_the_cpu_file_keeps_the_order_of_what_was_measured() -> None:
    """On two shared cores, a group of two is the slower one for a single request."""
    seconds = step_times(read_shape("shoal-demo"), read_hardware("cpu-2core"))
    assert 0.003 < seconds(DP, Batch(1, 100)) < 0.012 < seconds(Layout(tp=2), Batch(1, 100)) < 0.05


@pytest.mark.parametrize(
    ("name", "degree", "threshold", "with_host"),
    [
        ("llama-3-8b-bf16", 2, 288, 1042),
        ("llama-3-8b-bf16", 4, 432, 1553),
        ("llama-3-8b-bf16", 8, 565, 2058),
        ("llama-3-70b-fp8", 8, 520, 1027),
    ],
)
def test_h200_says_from_how_many_tokens_on_sp_is_faster(
    name: str, degree: int, threshold: int, with_host: int
) -> None:
    """As docs/policies.md has it; not from where simulated steps, which wait for a host in SP, are.

    On four H200s, of 600 and 1,024 tokens, SP was the faster one (llama-3-8b-4xh200-c.md).
    """
    layout = Layout(tp=degree)
    model = cost_model(read_shape(name), H200, degree)
    assert tokens_for(ShiftRule.AUTO, model, [layout]) == {layout: threshold}
    seconds = step_times(read_shape(name), H200, degree)
    for tokens, faster in ((threshold + 1, False), (with_host, False), (with_host + 1, True)):
        tp, sp = (seconds(layout, Batch(prefill_tokens=tokens), mode) for mode in Mode)
        assert (sp < tp) is faster


def test_a_short_step_in_sp_takes_what_the_file_says_of_the_host() -> None:
    seconds = step_times(SHAPE, H200, 2)
    host = SHAPE.layers * H200.sp_layer_host_seconds + H200.step_seconds
    assert 0.011 < SHAPE.layers * H200.sp_layer_host_seconds < 0.015, "as measured, 32 layers"
    for tokens in (600, 1000):
        assert seconds(Layout(tp=2), Batch(prefill_tokens=tokens), Mode.SP) == pytest.approx(host)
    assert seconds(Layout(tp=2), Batch(prefill_tokens=600)) < host


def test_a_short_prompt_in_tp_takes_a_group_what_the_file_says_of_the_host() -> None:
    """On two H200s, 10 to 11 ms for 150 to 400 prompt tokens beside 14 requests that decode."""
    seconds = step_times(SHAPE, H200, captured_tokens=512)
    for tokens in (150, 400):
        step = Batch(14, 14 * 300, tokens, tokens // 2)
        assert 0.0095 < seconds(Layout(tp=2), step) < 0.0115
    assert seconds(Layout(), Batch(14, 14 * 300, 150, 75)) < 0.007, "one engine was not slower"


def test_a_group_s_step_in_tp_waits_for_its_host_above_the_largest_graph() -> None:
    seconds = step_times(SHAPE, H200, captured_tokens=512)
    graphs = step_times(SHAPE, H200)
    host = SHAPE.layers * H200.sp_layer_host_seconds + H200.step_seconds
    tp2 = Layout(tp=2)
    short, above, long = (Batch(prefill_tokens=tokens) for tokens in (512, 520, 4096))
    assert seconds(tp2, short) == graphs(tp2, short) < host
    assert graphs(tp2, above) < seconds(tp2, above) == pytest.approx(host)
    assert seconds(tp2, long) == graphs(tp2, long) > host
    assert seconds(Layout(), above) == graphs(Layout(), above), "one engine was not slower"


def test_a_file_need_not_say_what_sp_takes_of_the_host() -> None:
    assert read_hardware("cpu-2core").sp_layer_host_seconds == 0.0


def test_memory_is_what_weights_and_reserve_leave() -> None:
    tokens = H200.num_blocks(SHAPE) * 16
    used = SHAPE.weight_bytes + H200.reserved_bytes + tokens * 131072
    assert used == pytest.approx(0.92 * H200.memory_bytes, rel=0.001)
    small = msgspec.structs.replace(H200, memory_bytes=16e9)
    with pytest.raises(FileError, match="do not fit"):
        small.num_blocks(SHAPE)


def test_a_model_with_experts_has_more_parameters_than_a_token_passes_through() -> None:
    shape = read_shape("qwen3-30b-a3b-bf16")
    embeddings = shape.hidden * shape.vocab
    assert shape.weight_bytes / 2 == pytest.approx(30.5e9, rel=0.01)
    assert shape.parameters + embeddings == pytest.approx(3.3e9, rel=0.02)
    model = shape.model_shape()
    every = model.shared_parameters + model.expert_parameters
    assert every == pytest.approx(shape.weight_bytes / 2 - embeddings)


def test_experts_may_have_another_type_than_all_other_weights() -> None:
    """As of GPT-OSS-20B, whose checkpoint has 13.76 GB."""
    shape = read_shape("gpt-oss-20b-mxfp4")
    assert shape.weight_bytes == pytest.approx(13.76e9, rel=0.005)
    assert shape.model_shape().expert_bytes == 17 / 32
    plain = msgspec.structs.replace(shape, expert_dtype="")
    less = shape.expert_parameters * (2 - 17 / 32)
    assert plain.weight_bytes - shape.weight_bytes == pytest.approx(less)


def test_layers_without_experts_and_shared_experts_count_as_they_are() -> None:
    experts = {"experts": 4, "experts_per_token": 1, "expert_intermediate": 100}
    routed = msgspec.structs.replace(SHAPE, **experts)
    shared = msgspec.structs.replace(routed, shared_intermediate=10)
    mixed = msgspec.structs.replace(shared, dense_layers=2)
    one_mlp = 3 * SHAPE.hidden
    assert routed.expert_parameters == SHAPE.layers * 4 * 100 * one_mlp
    assert shared.parameters - routed.parameters == SHAPE.layers * 10 * one_mlp
    assert mixed.parameters - shared.parameters == 2 * one_mlp * (SHAPE.intermediate - 110)


def test_a_file_may_lie_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    path.write_bytes(msgspec.json.encode(SHAPE))
    assert read_shape(str(path)) == SHAPE
    assert "llama-3-8b-bf16" in built_in("shapes")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file.*built-in ones: .*h200"),
        ("{", "truncated"),
        ("{}", "missing required field"),
        ('{"colour": 1}', "unknown field"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FileError, match=rf"bad\.json.*{message}"):
        read_hardware(str(path))


def test_a_dtype_without_a_rate_is_an_error() -> None:
    shape = msgspec.structs.replace(SHAPE, weight_dtype="fp32")
    with pytest.raises(FileError, match="no flops_per_second of fp32"):
        step_times(shape, H200)


HEADS = 2 * SHAPE.hidden * SHAPE.head_dim * (SHAPE.heads + SHAPE.kv_heads)
MLP = 3 * SHAPE.hidden * SHAPE.intermediate
VOCABULARY = SHAPE.hidden * SHAPE.vocab
PIECES = head_pieces(SHAPE.vocab // 2, 2 * SHAPE.hidden, 2)


@pytest.mark.parametrize(
    ("widest", "max_sp", "heads", "vocabulary"),
    [(2, 1, HEADS, VOCABULARY), (4, 2, HEADS, 0), (4, 4, 0, 0)],
)
def test_what_sharing_saves_of_weights_holds_kv(
    widest: int, max_sp: int, heads: int, vocabulary: int
) -> None:
    saved = SHAPE.weight_bytes - SHAPE.kept_bytes(2, widest, max_sp)
    in_slots = (MLP + heads) / 2 * 2 + 2 * vocabulary / 2 / PIECES
    shared = SHAPE.layers * (MLP + heads) + 2 * vocabulary
    assert saved == pytest.approx((shared / 2 - in_slots) * 2), "two halves of layers are slots"
    blocks = H200.num_blocks(SHAPE, 2, widest, max_sp) - H200.num_blocks(SHAPE)
    token = SHAPE.model_shape().kv_bytes_per_token
    assert blocks * 16 == pytest.approx(saved / token, abs=16)
    assert SHAPE.kept_bytes(1, widest, max_sp) == SHAPE.weight_bytes


def test_more_than_two_engines_have_slots_for_whole_layers() -> None:
    saved = SHAPE.weight_bytes - SHAPE.kept_bytes(4, 4, 2)
    pieces = head_pieces(SHAPE.vocab // 4, 2 * SHAPE.hidden, 4)
    in_slots = 2 * (MLP + HEADS) + 2 * VOCABULARY / pieces
    shared = SHAPE.layers * (MLP + HEADS) + 2 * VOCABULARY
    assert saved == pytest.approx((shared * 3 / 4 - in_slots) * 2)


def test_whole_stages_are_kept_beside_the_part() -> None:
    last = SHAPE.kept_bytes(4, 4, 2, stages=2) - SHAPE.kept_bytes(4, 4, 2)
    assert last == pytest.approx((SHAPE.layers / 2 * (MLP + HEADS) + VOCABULARY) * 2)
    two = SHAPE.kept_bytes(2, 2, stages=2) - SHAPE.kept_bytes(2, 2)
    assert two == pytest.approx(last / 2), "two engines use their own part where it is"
    fewer = H200.num_blocks(SHAPE, 4, 4, 2) - H200.num_blocks(SHAPE, 4, 4, 2, 2)
    assert fewer * 16 == pytest.approx(last / SHAPE.model_shape().kv_bytes_per_token, abs=16)


def test_a_head_that_is_the_embeddings_counts_once_and_stays_whole() -> None:
    tied = msgspec.structs.replace(SHAPE, tied=True)
    assert SHAPE.weight_bytes - tied.weight_bytes == 2 * VOCABULARY
    saved = tied.weight_bytes - tied.kept_bytes(2, 2)
    assert saved == pytest.approx((SHAPE.layers / 2 - 1) * (MLP + HEADS) * 2)
    assert tied.sharable_bytes(2, 2) == SHAPE.layers * (MLP + HEADS) * 2


def test_engines_share_experts() -> None:
    shape = read_shape("qwen3-30b-a3b-bf16")
    shared = shape.sharable_bytes(2, 4)
    experts = 2 * shape.expert_parameters
    assert shared == experts, "a group of four divides heads in another order"
    saved = shape.weight_bytes - shape.kept_bytes(2, 4)
    assert saved == pytest.approx((shared - 2 * shared / shape.layers) / 2), "two are in slots"
    mixed = msgspec.structs.replace(shape, dense_layers=8)
    less = 3 * shape.hidden * (shape.experts * shape.expert_intermediate - shape.intermediate)
    assert shared - mixed.sharable_bytes(2, 4) == 8 * less * 2


def test_experts_in_mxfp4_are_shared_by_their_own_bytes() -> None:
    """The vocabulary of GPT-OSS stays whole, also where that of others is shared."""
    shape = read_shape("gpt-oss-20b-mxfp4")
    experts = shape.expert_parameters * 17 / 32
    heads = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    shared = experts + shape.layers * heads * 2
    assert shape.sharable_bytes(2, 2) == pytest.approx(shared)
    saved = shape.weight_bytes - shape.kept_bytes(2, 2)
    assert saved == pytest.approx((shared - 2 * shared / shape.layers) / 2)
    rate = H200.fetch_bytes_per_second
    assert rate is not None
    model = cost_model(shape, H200, 1, 2, 2)
    assert model.fetch_seconds(DP) == pytest.approx(shared / 2 / rate)


def test_steps_fetch_what_engines_share() -> None:
    narrow, wide = (cost_model(SHAPE, H200, 4, 2, widest) for widest in (2, 4))
    rate = H200.fetch_bytes_per_second
    assert rate is not None
    more = narrow.fetch_seconds(DP) - wide.fetch_seconds(DP)
    fewer = HEADS * SHAPE.layers + VOCABULARY
    assert more == pytest.approx(fewer / 2 * 2 / rate), "attention, and the LM head, too"
    fp8 = read_shape("llama-3-70b-fp8")
    assert fp8.sharable_bytes(2, 2) == fp8.common_parameters, "as in 16 bits"
