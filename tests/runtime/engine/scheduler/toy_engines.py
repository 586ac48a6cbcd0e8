"""Two engines whose schedulers are vLLM's and whose model is a few lines.

The model's KV of a token, for each of two heads, is a digest of the prefix up to that token, and
the next token is a digest of the KV that the block table names. So a request goes on with other
tokens if one block of its KV is not the right one. A block has the same size in each layout: DP
keeps both heads of ``TOKENS`` tokens in it, each member of the group one head of twice as many.
There may be several KV groups. Each has KV of its own, which depends on the number of the group.

The runners do what they are told as soon as it is sent, in vLLM's terms of either model runner. If
the configuration speculates, they propose what a request will go on with, as far as it is known,
and now and then something else. What they compute of wrong drafts stays in the blocks.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.config import LayoutConfigs
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.layouts.introductions import Introductions
from shoal.runtime.engine.layouts.seats import Seats
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.scheduler import vllm_core
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from shoal.runtime.engine.scheduler.vllm_group_core import VllmGroupCore
from shoal.runtime.engine.scheduler.vllm_own_core import VllmOwnCore
from shoal.runtime.layout_configs import take
from shoal.runtime.protocol.messages import CarriedRequest, Work
from tests.units import tp

TOKENS = 4
"""Of a block in DP."""
BLOCKS = 160
"""Of an engine, the null block not counted."""
HEADS = (0, 1)
VOCABULARY = 1000
GROUP = tp(0, 1)
Windows = Sequence[int | None]
ALL_TOKENS: Windows = (None,)
Foreseen = Mapping[tuple[int, ...], list[int]]
"""By prompt, the outputs of a request."""


def digest(*values: object) -> int:
    """Return a number that depends on every value."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:6], "big")


def heads_of(unit: Unit, engine: int) -> tuple[int, ...]:
    """Return the heads whose KV a member keeps."""
    return HEADS if unit.layout.tp == 1 else (unit.engines.index(engine),)


def block_tokens(unit: Unit) -> int:
    """Return how many tokens of a unit fit into a block."""
    return TOKENS * unit.layout.tp


@dataclass
class Memory:
    """The KV of an engine: by block, the layout that wrote it, and what it wrote where."""

    blocks: dict[int, tuple[int, dict[tuple[int, int], int]]] = field(default_factory=dict)

    def write(self, unit: Unit, blocks: Sequence[int], head: int, at: int, value: int) -> None:
        degree, size = unit.layout.tp, block_tokens(unit)
        block = blocks[at // size]
        assert block, "the null block is nobody's"
        if self.blocks.get(block, (0, {}))[0] != degree:
            self.blocks[block] = (degree, {})
        self.blocks[block][1][at % size, head] = value

    def read(self, unit: Unit, blocks: Sequence[int], head: int, at: int) -> int:
        degree, size = unit.layout.tp, block_tokens(unit)
        wrote, values = self.blocks.get(blocks[at // size], (0, {}))
        return values.get((at % size, head), -1) if wrote == degree else -1


@dataclass
class Known:
    """What a runner knows of a request."""

    prompt: list[int]
    outputs: list[int]
    blocks: list[list[int]]
    """For each KV group."""
    images: Sequence[MultiModalFeatureSpec] = ()
    computed: int = 0
    """Tokens whose KV is there. Only V2 model runners know that by themselves."""
    drafts: list[int] = field(default_factory=list)
    """What V2 model runners have proposed."""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


class ToySeats:
    """Stands in for ``Seats``: what a toy runner knows of requests is no tables."""

    def __init__(self, runners: "Runners") -> None:
        self._runners = runners

    def take(self, request: NewRequestData) -> None:
        self._runners._known[request.req_id] = known_of(request)

    def begin(self, seated: instructions.Seated, *, writes: bool) -> None:
        self._runners.seated += len(seated.request_ids)
        tokens = iter(seated.tokens)
        each = zip(seated.request_ids, seated.counts, seated.computed, strict=True)
        for request_id, count, computed in each:
            known = self._runners._known[request_id]
            known.outputs += itertools.islice(tokens, count)
            known.computed = computed

    def leave(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._runners._known.pop(request_id, None)


def known_of(new: NewRequestData) -> Known:
    """Return what a V2 model runner knows of a request that begins."""
    assert new.prompt_token_ids is not None
    assert new.prefill_token_ids is not None
    prompt, outputs = new.prompt_token_ids, new.prefill_token_ids[len(new.prompt_token_ids) :]
    blocks = [list(group) for group in new.block_ids]
    computed = new.num_computed_tokens
    return Known(list(prompt), list(outputs), blocks, new.mm_features, computed)


class Runners:
    """The runners of a unit's members, which all know the same. Stands in for its channel."""

    def __init__(self, unit: Unit, memories: dict[int, Memory]) -> None:
        self.unit = unit
        self.v2 = self.asynchronous = False
        self.windows: Windows = ALL_TOKENS
        self.drafts = 0
        """Tokens that are proposed for each request; 0: the unit does not speculate."""
        self.foreseen: Foreseen = {}
        self.accepted = self.rejected = 0
        """Drafts."""
        self.sent: list[Any] = []
        self.computed = 0
        """Tokens computed since the start."""
        self.read = 0
        """Tokens of which members have read KV."""
        self.moved = 0
        """Tokens of blocks whose KV was moved to other blocks."""
        self.read_ahead = 0
        """The same beside steps, for each member that has."""
        self._foretold: dict[Unit, tuple[int, list[instructions.Arrival]]] = {}
        self.foretold_copies = 0
        """Copies of which the runners knew before the requests came."""
        self.copy_later = False
        """Keep the answers to ``Carry`` and ``CopyAhead`` back."""
        self.late: list[tuple[Future[Any], Any]] = []
        self._memories = memories
        self._futures: dict[int, Future[Any]] = {}
        self.encoded: dict[str, float] = {}
        """What the encoder made of images, by their identifiers, as long as it is kept."""
        self.encoder_runs = 0
        self.introductions = Introductions()
        self.introductions._seats = cast("Seats", ToySeats(self))
        self.seated = 0
        """Requests that had a row when their first step came."""
        self._known: dict[str, Known] = {}
        self._batch: set[str] = set()
        self._backing: dict[int, dict[int, int]] = {engine: {0: 0} for engine in unit.engines}

    def expect(self, answers: int) -> tuple[int, "Future[Any]"]:
        seq, future = len(self._futures), Future[Any]()
        self._futures[seq] = future
        return seq, future

    def send(self, instruction: Any) -> None:
        if isinstance(instruction, instructions.Carry) and instruction.foreseen:
            instruction = self._as_foretold(instruction)
        self.sent.append(instruction)
        match instruction:
            case instructions.Bind() | instructions.Extend():
                for engine, blocks in instruction.physical.items():
                    self._backing[engine] |= zip(instruction.virtual, blocks, strict=True)
            case instructions.Foresee(number, source, requests):
                self._foretold[source] = number, requests
            case instructions.Carry():
                self._carry(instruction)
            case instructions.CopyAhead():
                self._copy_ahead(instruction)
            case instructions.Move():
                self._move(instruction)
            case instructions.Introduce():
                self.introductions.add(instruction.request)
            case instructions.Seat():
                self.introductions.seat(instruction.requests, None)
            case _:
                pass

    def _as_foretold(self, carry: instructions.Carry) -> instructions.Carry:
        """Return what is to be read with the requests that were told before."""
        number, requests = self._foretold.pop(carry.source)
        assert (number, carry.requests) == (carry.foreseen, [])
        self.foretold_copies += 1
        return dataclasses.replace(carry, requests=requests)

    def _carry(self, carry: instructions.Carry) -> None:
        size, engine = block_tokens(self.unit), self.unit.leader
        filled = [
            block
            for one in carry.requests
            if one.source and one.begin < one.computed
            for group in one.target[engine]
            for block in group[(one.begin - one.since) // size :]
            if block
        ]
        assert len(set(filled)) == len(filled), "requests are read in any order"
        for one in carry.requests:
            if not self.v2:
                self._known[one.request_id] = Known(
                    list(one.prompt), list(one.tokens), [[] for _ in self.windows], one.features
                )
                self._batch.discard(one.request_id)
            if one.source:
                self.read += max(0, one.computed - one.begin)
                for engine in self.unit.engines:
                    self._pull(carry.source, self.unit, one, engine)
        self._answer(carry.seq, [instructions.Copied(8, 0.25) for _ in self.unit.engines])

    def _copy_ahead(self, ahead: instructions.CopyAhead) -> None:
        readers = [engine for engine in self.unit.engines if engine in ahead.target.engines]
        for one in ahead.requests:
            for engine in readers:
                self.read_ahead += one.computed - one.begin
                self._pull(ahead.source, ahead.target, one, engine)
        copied = [instructions.Copied(8 * (e in readers), 0.25) for e in self.unit.engines]
        self._answer(ahead.seq, copied)

    def _move(self, move: instructions.Move) -> None:
        for one in move.requests:
            self.moved += one.computed
            for engine in self.unit.engines:
                self._pull(self.unit, self.unit, one, engine)
        self._answer(move.seq, [instructions.Copied(8, 0.25) for _ in self.unit.engines])

    def _answer(self, seq: int, copied: list[instructions.Copied]) -> None:
        answer = copied[0] if len(copied) == 1 else copied
        if self.copy_later:
            self.late.append((self._futures[seq], answer))
        else:
            self._futures[seq].set_result(answer)

    def _pull(self, source: Unit, target: Unit, one: instructions.Arrival, engine: int) -> None:
        for head in heads_of(target, engine):
            owner = next(e for e in source.engines if head in heads_of(source, e))
            for having, wanting in zip(one.source[owner], one.target[engine], strict=True):
                for at in range(one.begin, one.computed):
                    at -= one.since
                    if having[at // block_tokens(source)] and wanting[at // block_tokens(target)]:
                        value = self._memories[owner].read(source, having, head, at)
                        self._memories[engine].write(target, wanting, head, at, value)

    def finish_copies(self, problem: str = "") -> None:
        """Answer what was kept back; the last member could not read if there is a problem."""
        for future, answer in self.late:
            answers = answer if isinstance(answer, list) else [answer]
            answers[-1] = dataclasses.replace(answers[-1], problem=problem)
            future.set_result(answers if isinstance(answer, list) else answers[0])
        self.late.clear()

    # --- steps ---

    def run_step(
        self, scheduled: SchedulerOutput, *_: Any, begun: instructions.Begun, **__: Any
    ) -> "tuple[int, Future[Any]]":
        seq, future = self.expect(1)
        scheduled = self.introductions.complete(scheduled, begun)
        self._learn(scheduled)
        self._encode(scheduled)
        sampled: dict[str, list[int]] = {}
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            known = self._known[request_id]
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            begin = computed[request_id]
            if self.v2:
                # With steps in flight, the scheduler counts drafts that may be wrong.
                begin, drafts = known.computed, (known.drafts + drafts)[: len(drafts)]
            found = self._compute(known, begin, count - len(drafts))
            sampled[request_id] = found + self._judge(known, drafts)
            known.computed = begin + count - len(drafts) + max(0, len(sampled[request_id]) - 1)
        order = list(sampled)
        indices = {request_id: index for index, request_id in enumerate(order)}
        output = ModelRunnerOutput(order, indices, [sampled[r] for r in order])
        if self.drafts and sampled:
            output = self._drafted(output, sampled)
        future.set_result(output)
        return seq, future

    def _drafted(self, output: ModelRunnerOutput, sampled: dict[str, list[int]]) -> Any:
        proposed = {r: self._propose(self._known[r]) if sampled[r] else [] for r in sampled}
        if not self.v2:
            return instructions.Drafted(output, DraftTokenIds([*proposed], [*proposed.values()]))
        for request_id, drafts in proposed.items():
            self._known[request_id].drafts = (drafts + [VOCABULARY] * self.drafts)[: self.drafts]
        if self.asynchronous:
            return output
        placeholders = [[-1] * self.drafts for _ in sampled]
        return instructions.Drafted(output, DraftTokenIds([*sampled], placeholders))

    def _judge(self, known: Known, drafts: list[int]) -> list[int]:
        """Compute drafts; return the tokens that follow those which are right."""
        right, begin = 0, len(known.tokens) - 1
        while right < len(drafts) and drafts[right] == known.outputs[-1]:
            self._compute(known, begin + right, 1)
            right += 1
        for at in range(begin + right, begin + len(drafts)):
            self._write(known, at, "wrong")
        self.accepted += right
        self.rejected += len(drafts) - right
        return known.outputs[len(known.outputs) - right :] if right else []

    def _propose(self, known: Known) -> list[int]:
        begin = len(known.outputs)
        drafts = self.foreseen.get(tuple(known.prompt), [])[begin : begin + self.drafts]
        if begin % 3 == 0:
            drafts[-1:] = [VOCABULARY]
        return drafts

    def _write(self, known: Known, at: int, token: object) -> None:
        for head, group in itertools.product(HEADS, range(len(self.windows))):
            before = self._kv(known, group, head, at - 1) if at else 0
            value = digest(group, head, at, token, before)
            for engine in self.unit.engines:
                if head in heads_of(self.unit, engine):
                    blocks = self._physical(engine, known.blocks[group])
                    self._memories[engine].write(self.unit, blocks, head, at, value)

    def _learn(self, scheduled: SchedulerOutput) -> None:
        # As ``GPUModelRunner.finish_requests``: V2 model runners forget what was preempted, too.
        preempted = scheduled.preempted_req_ids or set[str]()
        for request_id in scheduled.finished_req_ids | (preempted if self.v2 else set()):
            self._known.pop(request_id, None)
            self._batch.discard(request_id)
        for new in scheduled.scheduled_new_reqs:
            if self.v2:
                self._known[new.req_id] = known_of(new)
                continue
            assert new.prompt_token_ids is not None
            blocks = [list(group) for group in new.block_ids]
            self._known[new.req_id] = Known(
                list(new.prompt_token_ids), [], blocks, new.mm_features, new.num_computed_tokens
            )
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            known, blocks = self._known[request_id], cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                known.blocks = [list(group) for group in blocks]
            elif blocks is not None:
                for group, more in zip(known.blocks, blocks, strict=True):
                    group += more
            outputs = cached.num_output_tokens[index]
            if (
                not self.v2
                and outputs
                and (request_id not in self._batch or request_id in cached.resumed_req_ids)
            ):
                known.outputs = cached.all_token_ids[request_id][-outputs:]
        self._batch = set(scheduled.num_scheduled_tokens)

    def _encode(self, scheduled: SchedulerOutput) -> None:
        """Make of each image a number, as vLLM's runners make embeddings of it."""
        for identifier in scheduled.free_encoder_mm_hashes:
            self.encoded.pop(identifier, None)
        for request_id, inputs in scheduled.scheduled_encoder_inputs.items():
            for image in (self._known[request_id].images[index] for index in inputs):
                assert image.data is not None, "the runner lacks what the encoder reads"
                self.encoded[image.identifier] = float(image.data["pixels"].data.sum())
                self.encoder_runs += 1

    def _seen(self, known: Known, at: int) -> tuple[float] | None:
        """Return what stands in place of a token, if it is one of an image."""
        for image in known.images:
            begin = image.mm_position.offset
            if begin <= at < begin + image.mm_position.length:
                return (self.encoded[image.identifier],)
        return None

    def _compute(self, known: Known, begin: int, count: int) -> list[int]:
        self.computed += count
        tokens = known.tokens
        for at in range(begin, begin + count):
            self._write(known, at, self._seen(known, at) or tokens[at])
        if begin + count < len(tokens):
            return []
        read = [
            self._kv(known, group, head, at)
            for group, window in enumerate(self.windows)
            for head in HEADS
            for at in range(max(0, len(tokens) - (window or len(tokens))), len(tokens))
        ]
        known.outputs.append(3 + digest(read, known.outputs) % VOCABULARY)
        return known.outputs[-1:]

    def _kv(self, known: Known, group: int, head: int, at: int) -> int:
        engine = next(e for e in self.unit.engines if head in heads_of(self.unit, e))
        blocks = self._physical(engine, known.blocks[group])
        return self._memories[engine].read(self.unit, blocks, head, at)

    def _physical(self, engine: int, blocks: Sequence[int]) -> list[int]:
        if self.unit.layout.tp == 1:
            return list(blocks)
        return [self._backing[engine][block] for block in blocks]


class ToyEngineCore(EngineCore):  # type: ignore[misc]
    """vLLM's, without workers. ``runners`` is set on the class before one is made."""

    runners: Runners
    windows: Windows = ALL_TOKENS

    def __init__(self, config: VllmConfig, _executor: type, log_stats: bool) -> None:
        self.vllm_config, self.log_stats = config, log_stats
        cache = config.cache_config
        layer = {
            "block_size": cache.block_size,
            "num_kv_heads": 2,
            "head_size": 8,
            "dtype": torch.float32,
        }
        specs = [
            SlidingWindowSpec(**layer, sliding_window=window)
            if window
            else FullAttentionSpec(**layer)
            for window in self.windows
        ]
        groups = [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs)]
        kv_cache = KVCacheConfig(BLOCKS + 1, [], groups)
        cache.num_gpu_blocks = kv_cache.num_blocks
        self.structured_output_manager = SimpleNamespace(
            backend=None,
            accept_tokens=lambda *_: True,
            validate_tokens=lambda _, tokens: tokens,
            clear_backend=lambda: None,
        )
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=self.structured_output_manager,
            block_size=cache.block_size,
            log_stats=log_stats,
        )
        self.runners.v2 = self.scheduler.use_v2_model_runner
        self.model_executor = SimpleNamespace(
            channel=self.runners, run_step=self.runners.run_step, collective_rpc=lambda _: [0]
        )
        self.batch_queue_size = config.max_concurrent_batches
        self.mm_receiver_cache = None
        self.request_block_hasher = None
        if cache.enable_prefix_caching:
            init_none_hash(hash_of)
            self.request_block_hasher = get_request_block_hasher(cache.block_size, hash_of)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_dummy_batch(self) -> None:
        pass


def hash_of(value: object) -> bytes:
    """Hash blocks of tokens for the prefix cache."""
    return hashlib.sha256(repr(value).encode()).digest()


class ToyEngines:
    """Two engines and the core of their group; the test is controller and front end.

    Args:
        configs: of a model, for layouts up to two engines.
        asynchronous: whether steps are scheduled before the outcome of the last is known.
        v2: whether the model runners are of the second kind.
        windows: of the attention of each KV group, in tokens; None: it sees all.
        caching: whether prefixes are cached.
        foreseen: where the configurations speculate, what drafts are made of.
    """

    def __init__(
        self,
        configs: LayoutConfigs,
        *,
        asynchronous: bool = True,
        v2: bool = False,
        windows: Windows = ALL_TOKENS,
        caching: bool = True,
        foreseen: "Foreseen | None" = None,
    ) -> None:
        self._foreseen = foreseen or {}
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self.memories = {0: Memory(), 1: Memory()}
        self.runners: dict[Unit, Runners] = {}
        self.cores: dict[Unit, VllmCore] = {}
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self._prompts: dict[str, int] = {}
        self.frames: dict[str, list[bytes]] = {}
        self.work = Work()
        """What all steps have computed."""
        for unit in (alone(0), alone(1), GROUP):
            config = take(configs, unit.layout)
            config.cache_config.block_size = block_tokens(unit)
            config.cache_config.enable_prefix_caching = caching
            config.scheduler_config.async_scheduling = asynchronous
            self._start(unit, config, v2, windows)
        self.group = self.cores[GROUP]
        assert isinstance(self.group, VllmGroupCore)
        self.own = [self._own(engine) for engine in (0, 1)]
        self._epoch = 0

    def _own(self, engine: int) -> VllmOwnCore:
        core = self.cores[alone(engine)]
        assert isinstance(core, VllmOwnCore)
        return core

    def _start(self, unit: Unit, config: VllmConfig, v2: bool, windows: Windows) -> None:
        self.runners[unit] = Runners(unit, self.memories)
        self.runners[unit].windows = windows
        self.runners[unit].drafts = config.num_speculative_tokens
        self.runners[unit].asynchronous = config.scheduler_config.async_scheduling
        self.runners[unit].foreseen = self._foreseen
        made = type("Made", (ToyEngineCore,), {"runners": self.runners[unit], "windows": windows})
        kind = VllmGroupCore if unit.is_group else VllmOwnCore
        with (
            patch.object(vllm_core, "EngineCore", made),
            patch.object(VllmConfig, "use_v2_model_runner", property(lambda _: v2)),
        ):
            self.cores[unit] = kind(unit, config, log_stats=True, max_sp=1)

    # --- requests ---

    def frames_of(
        self,
        request_id: str,
        prompt: Sequence[int],
        salt: str | None = None,
        images: list[MultiModalFeatureSpec] | None = None,
        **sampling: Any,
    ) -> list[bytes]:
        """Return what a front end sends for a request. Each arrives later than the one before."""
        params = SamplingParams(
            **{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | sampling
        )
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            mm_features=images,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(len(self.tokens)),
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self.tokens[request_id], self.outputs[request_id] = [], []
        self.frames[request_id] = [bytes(frame) for frame in self._encoder.encode(request)]
        return self.frames[request_id]

    def submit(
        self, core: VllmCore, request_id: str, prompt: Sequence[int], **sampling: Any
    ) -> str:
        core.add(self.frames_of(request_id, prompt, **sampling))
        return request_id

    def step(self, core: VllmCore, times: int = 1) -> None:
        """Run so many steps to their end, if there are so many."""
        for _ in range(times):
            while core.dispatch():
                pass
            self._collect(core)
        while core.in_flight:
            self._collect(core)

    def _collect(self, core: VllmCore) -> None:
        core.copied()
        collected = core.collect()
        for ended in collected.steps if collected else ():
            self.work += ended.work
        for message in collected.outputs if collected else ():
            for output in self._decoder.decode(message.frames).outputs:
                self.tokens[output.request_id] += output.new_token_ids
                self.outputs[output.request_id].append(output)

    def finish(self, core: VllmCore) -> None:
        """Run steps until no request is left that can go on."""
        while any(self._counts(core)):
            before = self._progress()
            self.step(core)
            assert self._progress() > before, "the core hangs"

    def _counts(self, core: VllmCore) -> tuple[int, int]:
        return core.load.running, core.load.waiting

    def _progress(self) -> int:
        return sum(runners.computed for runners in self.runners.values())

    # --- switches ---

    def bind(self, blocks: int) -> None:
        """Lend the group so many blocks of each engine."""
        self._epoch += 1
        self.group.bind(self._epoch, {e: self.own[e].lend(blocks) for e in (0, 1)}, seed=0)

    def release(self) -> None:
        self.group.release(self._epoch)
        self.shrink()

    def shrink(self) -> None:
        self._return(self.group.shrink(self.group.lease_blocks))

    def _return(self, lease: Any) -> None:
        for engine, blocks in lease.items():
            self.own[engine].take_back(blocks)

    def carry(
        self,
        source: VllmCore,
        target: VllmCore,
        request_ids: Sequence[str],
        *,
        expected: bool = False,
        foretold: bool = False,
    ) -> tuple[list[CarriedRequest], list[Copied]]:
        """Take requests from core to core, which has room for all; return what was said of them.

        Args:
            source: the first core.
            target: the second.
            request_ids: the requests.
            expected: whether the second core was told to expect them.
            foretold: whether they get their blocks while their last steps are in flight.
        """
        for request_id in () if expected else request_ids:
            target.expect(request_id, self.frames[request_id])
        announced = self.foretell(source, target, request_ids) if foretold else {}
        exported = [request.whole(announced) for request in source.export(request_ids)]
        for request in exported:
            assert target.adopt(source.unit, request, with_kv=True) is not None
        target.copy()
        copied = target.copied()
        source.abort(request_ids)
        return exported, copied

    def foretell(
        self, source: VllmCore, target: VllmCore, request_ids: Sequence[str]
    ) -> dict[str, CarriedRequest]:
        """Give requests blocks in the second core while steps of the first are in flight."""
        while source.dispatch():
            pass
        announced = {each.request_id: each for each in source.announce(request_ids)}
        served = [request for request in announced.values() if target.allot(request)]
        has_all = len(served) == len(announced)
        target.tell_allotted([(source.unit, [*announced])] if has_all else [])
        while source.in_flight:
            self._collect(source)
        return announced

    def audit(self) -> list[str]:
        """Return what is wrong with any core's books."""
        return [problem for core in self.cores.values() for problem in core.check_integrity()]


Make = Callable[..., ToyEngines]
"""Makes toy engines of one kind of model runner; takes the other options of ``ToyEngines``."""


def undisturbed(make: Make, prompt: Sequence[int], **sampling: Any) -> list[int]:
    """Return the tokens of a request that stays where it is."""
    engines = make()
    engines.submit(engines.own[0], "r", prompt, **sampling)
    engines.finish(engines.own[0])
    return engines.tokens["r"]
