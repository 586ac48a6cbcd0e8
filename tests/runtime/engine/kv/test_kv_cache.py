"""The way from virtual to physical block ids."""

import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from shoal.runtime.engine.kv.kv_cache import NULL_BLOCK, BlockMap, SharedKVBuffer


def test_a_buffer_that_is_not_allocated_has_no_size() -> None:
    with pytest.raises(RuntimeError, match="allocated by the first layout"):
        _ = SharedKVBuffer("kv").num_bytes


def scheduler_output() -> SchedulerOutput:
    """Return a step in which every field that can name a block names some."""
    new = NewRequestData(
        req_id="new",
        prompt_token_ids=[5, 6],
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=([1, 2],),
        num_computed_tokens=0,
        lora_request=None,
    )
    cached = CachedRequestData(
        req_ids=["grows", "same", "resumed"],
        resumed_req_ids={"resumed"},
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([3],), None, ([4, 1, NULL_BLOCK],)],
        num_computed_tokens=[32, 33, 0],
        num_output_tokens=[1, 2, 3],
    )
    return SchedulerOutput(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"new": 2, "grows": 1, "same": 1, "resumed": 3},
        total_num_scheduled_tokens=7,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[0],
        finished_req_ids={"done"},
        free_encoder_mm_hashes=[],
        new_block_ids_to_zero=[2, 4],
        kv_cache_block_copies=[KVCacheBlockCopy(1, 3)],
    )


@pytest.fixture
def block_map() -> BlockMap:
    table = BlockMap()
    table.extend([1, 2, 3, 4], [11, 12, 13, 14])
    return table


def test_every_field_that_names_blocks_becomes_physical(block_map: BlockMap) -> None:
    mapped = block_map.apply(scheduler_output())
    assert mapped.scheduled_new_reqs[0].block_ids == ([11, 12],)
    assert mapped.scheduled_cached_reqs.new_block_ids == [([13],), None, ([14, 11, NULL_BLOCK],)]
    assert mapped.new_block_ids_to_zero == [12, 14]
    assert mapped.kv_cache_block_copies == [KVCacheBlockCopy(11, 13)]


def test_every_other_field_stays(block_map: BlockMap) -> None:
    before, mapped = scheduler_output(), block_map.apply(scheduler_output())
    named = {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "new_block_ids_to_zero",
        "kv_cache_block_copies",
    }
    for name in SchedulerOutput.__dataclass_fields__:
        if name not in named:
            assert getattr(mapped, name) == getattr(before, name), name
    assert mapped.scheduled_cached_reqs.req_ids == before.scheduled_cached_reqs.req_ids
    assert mapped.scheduled_new_reqs[0].prompt_token_ids == [5, 6]


def test_no_field_of_a_step_that_could_name_blocks_is_overlooked() -> None:
    """A field of this name that vLLM adds must be mapped, or known not to hold ids."""
    fields = {
        *SchedulerOutput.__dataclass_fields__,
        *NewRequestData.__dataclass_fields__,
        *CachedRequestData.__dataclass_fields__,
    }
    mapped = {"block_ids", "new_block_ids", "new_block_ids_to_zero", "kv_cache_block_copies"}
    counts = {"num_common_prefix_blocks"}
    # Of KV connectors, which Shoal has none of.
    connector = {"kv_connector_block_state"}
    assert {name for name in fields if "block" in name} == mapped | counts | connector


def test_the_leaders_own_copy_stays_virtual(block_map: BlockMap) -> None:
    output = scheduler_output()
    block_map.apply(output)
    assert output.scheduled_new_reqs[0].block_ids == ([1, 2],)
    assert output.scheduled_cached_reqs.new_block_ids == [([3],), None, ([4, 1, NULL_BLOCK],)]
    assert output.new_block_ids_to_zero == [2, 4]
    assert output.kv_cache_block_copies == [KVCacheBlockCopy(1, 3)]


def test_a_reopened_virtual_block_gets_its_new_physical_block(block_map: BlockMap) -> None:
    block_map.extend([2], [99])
    assert block_map.apply(scheduler_output()).scheduled_new_reqs[0].block_ids == ([11, 99],)


def test_a_virtual_block_that_was_never_opened_is_an_error() -> None:
    table = BlockMap()
    table.extend([1], [11])
    with pytest.raises(KeyError):
        table.apply(scheduler_output())


def test_a_step_that_names_no_blocks_stays_as_it_is(block_map: BlockMap) -> None:
    output = scheduler_output()
    output.scheduled_new_reqs = []
    output.scheduled_cached_reqs.new_block_ids = [None, None, None]
    output.new_block_ids_to_zero = output.kv_cache_block_copies = None
    assert block_map.apply(output) == output


def test_steps_without_copies_or_zeroing_stay_without(block_map: BlockMap) -> None:
    output = SchedulerOutput.make_empty()
    mapped = block_map.apply(output)
    assert mapped.new_block_ids_to_zero == output.new_block_ids_to_zero
    assert mapped.kv_cache_block_copies == output.kv_cache_block_copies
