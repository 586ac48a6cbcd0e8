"""The fake engine's prefix cache finds what vLLM's would, and nothing else."""

from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.policies.values.layouts import DP
from shoal.runtime.clock import ManualClock
from shoal.runtime.config import FakeSettings, NodeConfig
from shoal.runtime.engine.fake.fake_backend import FakeBackend
from shoal.runtime.engine.fake.fake_blocks import FakeBlocks
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.fake_scheduler import FakeScheduler
from shoal.runtime.engine.fake.fake_tokens import expected_tokens
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import LayoutLimits
from tests.runtime.loopback_node import problems, request_payload
from tests.units import tp

LIMITS = LayoutLimits(DP, block_tokens=4, max_num_seqs=4, max_model_len=80)
names = map(str, count())


class Core:
    """A scheduler of ten blocks of four tokens, and what its steps compute."""

    def __init__(self, blocks: int = 10, *, caching: bool = True, budget: int = 1 << 20) -> None:
        settings = FakeSettings(prefix_caching=caching, max_num_batched_tokens=budget)
        self.blocks = FakeBlocks(range(blocks))
        self.scheduler = FakeScheduler(LIMITS, settings, self.blocks, ManualClock())

    def add(
        self, prompt: list[int], output: int = 1, *, salt: str | None = None, **sampling: int
    ) -> FakeRequest:
        """Queue a request."""
        (frame,) = request_payload(next(names), prompt, output, **sampling)
        fields = msgspec.msgpack.decode(frame)
        fields[wire.RequestView.__struct_fields__.index("cache_salt")] = salt
        view = wire.decode_request([msgspec.msgpack.encode(fields)])
        request = FakeRequest(view, prompt, output)
        self.scheduler.add(request)
        return request

    def step(self) -> int:
        """Do a step; return how many tokens it computed."""
        batch, _ = self.scheduler.schedule()
        for request, share in batch:
            request.computed += share
            if request.computed == request.tokens:
                request.generate()
        self.scheduler.drop_ended()
        return sum(share for _, share in batch)

    def serve(self, prompt: list[int], **options: str | int | None) -> int:
        """Serve a request of one token; return how many tokens were computed for it."""
        self.add(prompt, **options)  # type: ignore[arg-type]
        computed = self.step()
        assert not self.scheduler.requests
        assert self.blocks.misheld([]) == []
        return computed


@pytest.mark.parametrize(
    ("prompt", "computed"),
    [
        (range(12), 4),  # of its three full blocks one is left: a token must be computed
        (range(13), 1),
        (range(11), 3),
        (range(20), 8),
        ([*range(4), 99, *range(5, 12)], 8),
        ([99, *range(1, 12)], 12),
    ],
)
def test_full_blocks_of_the_same_beginning_are_not_computed_again(
    prompt: list[int], computed: int
) -> None:
    core = Core()
    assert core.serve(list(range(12))) == 12
    assert core.serve(list(prompt)) == computed


def test_nothing_is_found_where_nothing_is_cached() -> None:
    core = Core(caching=False)
    assert [core.serve(list(range(12))) for _ in range(2)] == [12, 12]


def test_what_else_is_in_vllms_hashes_keeps_requests_apart() -> None:
    core, prompt = Core(), list(range(12))
    computed = [core.serve(prompt, salt=salt) for salt in (None, "a", "b", "a", None)]
    assert computed == [12, 12, 12, 4, 4]


def test_a_request_may_refuse_to_read_what_is_cached() -> None:
    core, prompt = Core(), list(range(12))
    assert core.serve(prompt) == 12
    assert core.serve(prompt, prompt_logprobs=1) == 12
    assert core.serve(prompt, skip_reading_prefix_cache=True) == 12
    assert core.serve(prompt, prompt_logprobs=1, skip_reading_prefix_cache=False) == 4


def test_the_longest_unused_block_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    core = Core(7)
    old, new = list(range(12)), list(range(50, 62))
    assert [core.serve(old), core.serve(new)] == [12, 12]
    assert core.serve([99]) == 1  # takes the one that caches nothing
    assert core.serve(list(range(70, 75))) == 5  # takes the end of the old prompt
    assert [core.serve([*new, 1]), core.serve([*old, 1])] == [1, 5]


def test_who_finds_a_prefix_keeps_it_from_others() -> None:
    core = Core(5)
    assert core.serve(list(range(12))) == 12
    keeps = core.add(list(range(9)), 8)
    assert core.step() == 1
    waits = core.add(list(range(20, 32)))
    assert core.step() == 1
    assert (len(keeps.blocks), waits.blocks) == (3, [])
    while keeps in core.scheduler.requests:
        core.step()
    assert core.step() == 12


def test_two_with_the_same_beginning_need_it_once() -> None:
    core = Core()
    first, second = core.add(list(range(13)), 3), core.add(list(range(13)), 3)
    assert core.step() == 14
    assert first.blocks[:3] == second.blocks[:3]
    assert core.blocks.misheld([*first.blocks, *second.blocks]) == []
    assert core.blocks.misheld(first.blocks) == first.blocks[:3]
    core.scheduler.remove([first.id])
    assert len(core.blocks) == 6
    core.scheduler.remove([second.id])
    assert len(core.blocks) == 10


def test_outputs_are_cached_as_far_as_they_are_computed() -> None:
    core = Core()
    request = core.add(list(range(6)), 7)
    while core.scheduler.requests:
        core.step()
    # Of the last token there is no KV.
    told = [*range(6), *request.generated]
    assert core.serve(told) == 1


def test_a_preempted_request_finds_its_own_blocks() -> None:
    core = Core()
    one = core.add(list(range(10)), 5)
    core.step()
    core.scheduler.preempt_until(9)
    assert (one.computed, one.hits) == (0, 0)
    assert core.step() == 3
    assert one.hits == 0, "it is no hit of a prompt"


def test_a_prompt_in_chunks_is_cached_chunk_by_chunk() -> None:
    core = Core(budget=6)
    core.add(list(range(12)))
    assert [core.step(), core.step()] == [6, 6]
    assert core.serve(list(range(13))) == 1


def test_lent_blocks_and_a_reset_forget_what_they_cached() -> None:
    backend = FakeBackend(
        NodeConfig(2, 2, "manual", "", {}, fake=FakeSettings(num_blocks=6, block_tokens=4)),
        0,
        clock=(clock := ManualClock()),
    )

    def cached(unit: int | tuple[int, int]) -> int:
        core = backend.own if isinstance(unit, int) else backend.groups[tp(*unit)]
        core.add(request_payload(next(names), list(range(17)), 1))
        assert core.dispatch()
        clock.advance(1.0)
        collected = core.collect()
        assert collected is not None
        (frame,) = collected.outputs[0].frames
        (output,) = msgspec.msgpack.decode(frame, type=wire.Outputs).outputs
        assert output.new_token_ids == expected_tokens(list(range(17)), 1)
        assert output.prefill_stats is not None
        assert problems(backend) == []
        return output.prefill_stats.num_cached_tokens

    assert [cached(0), cached(0)] == [0, 16]
    lent = backend.own.lend(3)
    group = backend.groups[tp(0, 1)]
    group.bind(1, {0: lent, 1: [4, 5, 6]}, 0)
    assert [cached((0, 1)), cached((0, 1))] == [0, 16]
    group.release(1)
    backend.own.take_back(group.shrink(3)[0])
    assert cached(0) == 12, "the oldest block went, which was the end of the prompt"
    backend.own.take_back(backend.own.lend(6))
    assert [cached(0), cached(0)] == [0, 16]
    backend.utility([msgspec.msgpack.encode([0, 1, "reset_prefix_cache", []])])
    assert cached(0) == 0


@given(st.data())
def test_the_free_blocks_that_cache_nothing_are_counted(data: st.DataObject) -> None:
    blocks = FakeBlocks(range(12))
    held: list[int] = []
    cached: dict[int, bytes] = {}
    for step in range(40):
        match data.draw(st.sampled_from(("take", "give", "cache", "hold", "take out", "forget"))):
            case "take":
                held += (taken := blocks.take(data.draw(st.integers(1, 4))))
                cached = {block: cached[block] for block in cached if block not in taken}
            case "give" if held:
                given_back = data.draw(st.lists(st.sampled_from(held), unique=True))
                blocks.give(given_back)
                held = [block for block in held if block not in given_back]
            case "cache" if held and held[-1] not in cached:
                blocks.cache(held[-1], cached.setdefault(held[-1], str(step).encode()))
            case "hold":
                found = blocks.find(prefix for block, prefix in cached.items() if block not in held)
                blocks.hold(found)
                held += found
            case "take out" if blocks.ids:
                held += (taken := blocks.take_out(blocks.ids[-2:]))
                cached = {block: cached[block] for block in cached if block not in taken}
            case "forget":
                blocks.forget()
                cached = {}
        plain = sum(block not in cached for block in blocks.ids)
        assert blocks.uncached(100) == plain
        assert blocks.uncached(2) == min(2, plain)
