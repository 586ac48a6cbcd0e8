"""A runner that answers questions of the test about its inside, and functions to ask it.

A probe is one more instruction in the queue that the runner reads: never in the middle of a step.
"""

import dataclasses
import hashlib
import os
import pickle
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import zmq
from msgspec.structs import replace
from vllm.forward_context import BatchDescriptor
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.outputs import AsyncModelRunnerOutput

from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import DP, Layout, Unit
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.engine.groups.head_order import head_shard
from shoal.runtime.engine.kv import carry_plan
from shoal.runtime.engine.kv.carry_plan import Strip
from shoal.runtime.engine.kv.kv_reader import KvReader
from shoal.runtime.engine.kv.staging_server import StagingServer
from shoal.runtime.engine.layouts.told_tokens import ToldTokens
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.step_queues import PREPARING
from shoal.runtime.engine.runner import loading, recorder, taking_up
from shoal.runtime.engine.runner import runner as runner_module
from shoal.runtime.engine.runner.runner import Runner, run_runner
from shoal.runtime.engine.sequence.piecewise_graphs import CapturedStep
from shoal.runtime.engine.sequence.step_adapters import StepAdapters
from shoal.runtime.engine.weights.rules.dense import LinearRule
from shoal.runtime.engine.weights.rules.expert_ranges import ExpertRange
from shoal.runtime.engine.weights.rules.formats import owns_weights
from shoal.runtime.engine.weights.rules.rule_registry import rule_of
from shoal.runtime.engine.weights.rules.shard_rule import FullLayer
from shoal.runtime.engine.weights.rules.shards import Shard
from shoal.runtime.engine.weights.sharing import filling
from shoal.runtime.engine.weights.sharing.filling import Filled, Filling
from shoal.runtime.engine.weights.sharing.nested_order import nested_shard
from shoal.runtime.engine.weights.sharing.shared_weight import DOWN, GATE_UP, HEAD
from shoal.runtime.engine.weights.sharing.slots import SLOTS, Copier, Copy, copy_all
from shoal.runtime.engine.weights.store import ResidentWeights, layers_of
from shoal.runtime.protocol.messages import Mode
from tests.runtime.engine.owned_bytes import owned_bytes as bytes_owned
from tests.runtime.engine.pace import Pace


def address(config: NodeConfig) -> str:
    """Return where runners answer probes."""
    return f"ipc://{Path(config.runtime_dir) / 'probes'}"


@dataclass(frozen=True)
class Probe:
    """Run ``function(runner, *args)`` in a runner's process and answer with what it returns."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


def send(
    context: zmq.Context[Any],
    config: NodeConfig,
    unit: Unit,
    engine: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Put a probe into the queue that a member of ``unit`` reads."""
    addresses = Addresses(config.runtime_dir)
    socket = context.socket(zmq.PUSH)
    socket.connect(addresses.queue(unit, engine))
    socket.send(pickle.dumps(Probe(function, args)))
    socket.close(linger=10_000)


LATE_TOKENS = 32
"""Tokens of an engine's block: see ``read_a_block_late``."""


def answer(data: bytes) -> Any:
    """Read the answer to a probe."""
    return pickle.loads(data)


class PacedRunner(Runner):
    """Does not go ahead of the test."""

    def __init__(self, node: NodeConfig, *args: Any) -> None:
        super().__init__(node, *args)
        self._pace = Pace(node, self._engine)

    def _on_step(self, step: instructions.Step) -> None:
        if self._worker.unit.leader == self._engine:  # the others wait for it
            self._pace.keep()
        super()._on_step(step)


class PacedRecorder(PacedRunner, recorder.RecordingRunner):
    """Records, and answers no probes."""


class ProbedRunner(PacedRunner):
    """Answers probes, and remembers what it was told to compute and what it sampled."""

    def __init__(self, node: NodeConfig, *args: Any) -> None:
        super().__init__(node, *args)
        self.max_sp = node.max_sp
        self.largest_step = 0
        """Most tokens of one step."""
        self.modes: Counter[Mode] = Counter()
        """Steps that computed something, by how they ran."""
        self.scheduled: Counter[str] = Counter()
        """Tokens computed, by request."""
        self.steps: list[set[str]] = []
        """The requests of each step that computed something."""
        self.led: Counter[str] = Counter()
        """The same, of the units that this engine leads."""
        self.blocks: dict[str, list[int]] = {}
        """Block ids (virtual in a group) of every request's table, as the scheduler said."""
        self._seats: dict[tuple[Layout, str], list[int]] = {}
        """The same of requests that got a row before their first step in a layout."""
        self.sampled: dict[str, list[int]] = {}
        """Tokens that this member sampled itself, by request, asynchronous steps left out."""
        self.fills: list[tuple[int, int]] = []
        """See ``note_fills``."""
        self.streamed = Counter[int]()
        """See ``take_streamed``."""
        self.seated = 0
        """Requests that got a row before their first step."""
        self.deferred_samples = 0
        """Steps whose sampling came as a message of its own."""
        self.late: list[Callable[[], object]] = []
        """Reads that begin after the next step: see ``read_a_block_late``."""
        self._forms: type[instructions.Instruction] | None = None
        """What the runner does to form a group."""
        self.beside: Counter[type[instructions.Instruction]] = Counter()
        """Steps that computed something in the middle of each part of a group's forming."""
        self.skips_reseed = False
        self.proposed: dict[str, dict[int, list[int]]] = {}
        """See ``keep_proposals``."""
        context: zmq.Context[Any] = zmq.Context()
        self._probes: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._probes.connect(address(node))

    def _on_probe(self, probe: Probe) -> None:
        self._probes.send(pickle.dumps(probe.function(self, *probe.args)))

    def _prepare(self, layout: Layout, instruction: PREPARING) -> None:
        # Also of a layout that is not bound yet, while the request may run in this one.
        if isinstance(instruction, instructions.Seat):
            for rest in instruction.requests:
                self._seats[layout, rest.request_id] = list(rest.blocks[0])
            self.seated += len(instruction.requests)
        super()._prepare(layout, instruction)

    def _on_step(self, step: instructions.Step) -> None:
        output = step.scheduler_output
        self.scheduled.update(output.num_scheduled_tokens)
        if output.num_scheduled_tokens:
            self.steps.append(set(output.num_scheduled_tokens))
            if self._forms is not None:
                self.beside[self._forms] += 1
        if self._worker.unit.leader == self._engine:
            self.led.update(output.num_scheduled_tokens)
        self.largest_step = max(self.largest_step, output.total_num_scheduled_tokens)
        self.modes[step.mode] += output.total_num_scheduled_tokens > 0
        for request in output.scheduled_new_reqs:
            self.blocks[request.req_id] = list(request.block_ids[0])
        for rest in step.begun.requests:
            self.blocks[rest.request_id] = list(rest.blocks[0])
        for request_id in step.begun.seated.request_ids if step.begun.seated else ():
            self.blocks[request_id] = self._seats.pop((self._layout, request_id))
        cached = output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.blocks[request_id] = []
            self.blocks[request_id] += new[0] if new else []
        super()._on_step(step)
        while self.late:
            self.late.pop()()

    def _on_form(self, form: instructions.Form) -> None:
        with self._forming(form):
            super()._on_form(form)

    def _on_start(self, start: instructions.Start) -> None:
        with self._forming(start):
            super()._on_start(start)

    @contextmanager
    def _forming(self, part: instructions.Instruction) -> Iterator[None]:
        self._forms = type(part)
        try:
            yield
        finally:
            self._forms = None

    def _on_sample(self, sample: instructions.Sample) -> None:
        self.deferred_samples += 1
        super()._on_sample(sample)

    def _answer_step(self, seq: int, output: Any) -> None:
        made = output.output if isinstance(output, instructions.Drafted) else output
        if not isinstance(made, AsyncModelRunnerOutput) and not callable(made):
            for request_id, tokens in zip(made.req_ids, made.sampled_token_ids, strict=True):
                self.sampled.setdefault(request_id, []).extend(tokens)
        super()._answer_step(seq, output)

    def _on_bind(self, bind: instructions.Bind) -> None:
        if not self.skips_reseed:
            super()._on_bind(bind)
            return
        with _without_reseed():
            super()._on_bind(bind)


@contextmanager
def _without_reseed() -> Iterator[None]:
    reseed = runner_module.set_random_seed
    runner_module.set_random_seed = lambda _seed: None
    try:
        yield
    finally:
        runner_module.set_random_seed = reseed


def run_probed_runner(node: NodeConfig, engine: int, incarnation: int = 0) -> None:
    """Process entry: ``run_runner`` with a ``ProbedRunner``."""
    run_runner(node, engine, incarnation, ProbedRunner)


def run_paced_recorder(node: NodeConfig, engine: int, incarnation: int = 0) -> None:
    """Process entry: ``run_recording_runner`` with a ``PacedRecorder``."""
    recorder.RecordingRunner = PacedRecorder
    recorder.run_recording_runner(node, engine, incarnation)


# --- what to ask ----------------------------------------------------------------------------------


def scheduled(runner: ProbedRunner) -> dict[str, int]:
    return dict(runner.scheduled)


def led(runner: ProbedRunner) -> dict[str, int]:
    """Return the tokens computed by units that this engine leads, by request."""
    return dict(runner.led)


def largest_step(runner: ProbedRunner) -> int:
    return runner.largest_step


def take_steps(runner: ProbedRunner) -> list[set[str]]:
    """Return the requests of each step since the last call."""
    taken, runner.steps = runner.steps, []
    return taken


def take_steps_beside(runner: ProbedRunner) -> Counter[type[instructions.Instruction]]:
    """Return the steps in the middle of each part of a group's forming since the last call."""
    taken, runner.beside = runner.beside, Counter()
    return taken


def hold_no_interludes(runner: ProbedRunner, without: bool) -> None:
    """Let no own step run while the runner forms a group."""
    if without:
        runner.step = lambda _: False  # type: ignore[method-assign]
    else:
        del runner.step


def wait_for_members(runner: ProbedRunner, seconds: float) -> None:
    """Let this member of a group that is formed again wait for the others for so long."""
    loading.REJOIN_SECONDS = seconds


def take_modes(runner: ProbedRunner) -> dict[Mode, int]:
    """Return the steps by mode since this was last asked."""
    modes, runner.modes = dict(runner.modes), Counter()
    return modes


def seated(runner: ProbedRunner) -> int:
    """Return how many requests have got a row before their first step."""
    return runner.seated


def sampled(runner: ProbedRunner) -> dict[str, list[int]]:
    return runner.sampled


def draw(runner: ProbedRunner) -> None:
    """Draw from the generator that the V2 model runner takes each request's seed from."""
    numpy.random.randint(2)


def sequences(runner: ProbedRunner) -> list[list[int]]:
    """Return what the V2 model runner keeps: prompts and outputs, padded, ended requests' too."""
    kept: list[list[int]] = runner._worker.model_runner.req_states.all_token_ids.gpu.tolist()
    return kept


def deferred_samples(runner: ProbedRunner) -> int:
    return runner.deferred_samples


def blocks(runner: ProbedRunner, request_id: str) -> list[int]:
    return runner.blocks[request_id]


def physical_blocks(runner: ProbedRunner, request_ids: Sequence[str]) -> list[list[int]]:
    """Return the engine's own ids of requests' blocks in the unit that it works in now."""
    block_map = runner._worker.block_map
    held = [runner.blocks[request_id] for request_id in request_ids]
    if block_map is None:
        return held
    return [[block_map._physical[block] for block in blocks] for blocks in held]


def skip_reseed(runner: ProbedRunner, skip: bool) -> None:
    runner.skips_reseed = skip


def owned_bytes(runner: ProbedRunner) -> dict[str, int]:
    """Return the parameter bytes that each layout does not share with the DP model.

    What is kept of shared MLPs counts as the DP model's.
    """
    dp, shared = runner._workers[DP].model, runner._loader.shared
    kept = [] if shared is None else [weight.kept for weight in shared._weights.values()]
    return {of.name: bytes_owned(worker.model, dp, kept) for of, worker in runner._workers.items()}


def expert_bytes(runner: ProbedRunner) -> tuple[int, int]:
    """Return the bytes of experts that the engine keeps for all, and of all experts."""
    shared = runner._loader.shared._weights.values()
    of_experts = [weight for weight in shared if weight.kind.startswith(("w13_", "w2_"))]
    return sum(w.kept.nbytes for w in of_experts), sum(w.whole_bytes for w in of_experts)


def order_heads_by_rank(runner: ProbedRunner, layout: Layout) -> None:
    """Let a TP layout compute the heads of its rank, whatever the KV cache holds."""
    _view_heads(runner, layout, _member(runner, layout))


def order_heads_by_base(runner: ProbedRunner, layout: Layout) -> None:
    """Let a TP layout compute the heads that steps by sequence write to its KV cache."""
    shard = head_shard(_member(runner, layout), layout.tp, runner.max_sp)
    _view_heads(runner, layout, shard)


def _member(runner: ProbedRunner, layout: Layout) -> int:
    return runner._workers[layout].unit.engines.index(runner._engine)


def _view_heads(runner: ProbedRunner, layout: Layout, shard: int) -> None:
    store = ResidentWeights(runner._workers[DP].model)
    for name, layer in runner._workers[layout].model.named_modules():
        if name.endswith((".qkv_proj", ".o_proj")):
            rule = rule_of(layer)
            assert isinstance(rule, LinearRule)
            full = FullLayer(name, store.model.get_submodule(name), store.tensor)
            rule.cut(layer, full, Shard(shard, layout.tp))


def kept_weights(runner: ProbedRunner) -> int:
    """Return the number of the file in which this engine keeps its part of shared MLPs."""
    return os.fstat(runner._loader.shared.kept.file).st_ino


def behind_weights(runner: ProbedRunner) -> int:
    """Return how many bytes of the KV buffer are at other addresses, too, as the kernel says."""
    first, found = runner._loader.buffer.raw.data_ptr(), dict[str, dict[int, int]]()
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, file = line.split()[:5]
        begin, end = (int(address, 16) for address in addresses.split("-"))
        found.setdefault(file, {})[begin] = end - begin
    (of_buffer,) = (ranges for ranges in found.values() if first in ranges)
    return sum(of_buffer.values()) - of_buffer[first]


def bytes_for_whole_weights(runner: ProbedRunner) -> int:
    """Return how many bytes more whole weights take than shared ones."""
    return sum(runner._loader.shared.whole.moving_bytes())


def streams(runner: ProbedRunner) -> bool:
    """Return whether layers are copied into slots."""
    slots = runner._loader.shared.slots
    return not slots.whole.issuperset(slots.copies[DP.tp])


def layers_in_slots(runner: ProbedRunner) -> set[int]:
    """Return the numbers of the layers that are in the slots, or on their way there."""
    return {some.layer for some in runner._loader.shared.slots._filled if some is not None}


def take_streamed(runner: ProbedRunner) -> dict[int, int]:
    """Return how often each layer was copied into its slot since the last look, which was not the
    first one."""
    slots = runner._loader.shared.slots
    if "_fill" not in vars(slots):
        fill = slots._fill

        def filling(tp: int, layer: int) -> Any:
            before = slots._filled[layer % SLOTS]
            found = fill(tp, layer)
            runner.streamed[layer] += found is not before
            return found

        slots._fill = filling
    found, runner.streamed = +runner.streamed, Counter()
    return dict(found)


def damage_stages(runner: ProbedRunner, damage: str) -> None:
    """Let whole layers have what they should not, and nobody compare it; "": as ever.

    Args:
        damage: ``exchanged``: two layers have each other's weights. ``early``: they are used before
            anything is copied.
    """
    shared = runner._loader.shared
    vars(shared.whole).pop("fill", None)
    if not damage:
        return
    fill = shared.whole.fill

    def damaging(*args: Any) -> Filling:
        copies: Filling = fill(*args)
        one, other, *_ = copies._layers.values()

        def exchange() -> None:
            for first, second in zip(one, other, strict=True):
                kept = first.target.clone()
                first.target.copy_(second.target)
                second.target.copy_(kept)

        copies._compare = exchange if damage == "exchanged" else lambda: None
        if damage == "early":
            copies._left.clear()
        return copies

    shared.whole.fill = damaging


def wait_for_layers(runner: ProbedRunner, seconds: float) -> None:
    """Let whole weights wait so long for layers that steps stream (``PATIENCE_SECONDS``)."""
    runner._loader.shared.whole.patience = seconds


def damage_copies(runner: ProbedRunner, damaged: bool) -> None:
    """Have something else than what engines keep in the copies."""
    shared = runner._loader.shared
    if not damaged:
        del shared.whole.fill
        return
    fill = shared.whole.fill

    def damaging(*args: Any) -> Filling:
        copies: Filling = fill(*args)
        compare = copies._compare

        def damage() -> None:
            for part in (part for parts in copies._layers.values() for part in parts):
                part.target.copy_(part.target.roll(4096))
            compare()

        copies._compare = damage
        return copies

    shared.whole.fill = damaging


def note_fills(runner: ProbedRunner) -> list[tuple[int, int]]:
    """Note from now on how copies are made; return what the former notes are.

    Returns:
        For each change, how many layers came as steps streamed them, and how many from engines.
    """
    noted, runner.fills = runner.fills, []
    shared = runner._loader.shared
    shared.__dict__.pop("fill_whole", None)
    fill = shared.fill_whole

    def noting(*args: Any) -> Callable[[], Filled]:
        copy = fill(*args)

        def copied() -> Filled:
            filled = copy()
            runner.fills.append(filled[:2])
            return filled

        return copied

    shared.fill_whole = noting
    return noted


def move_nothing(runner: ProbedRunner, damaged: bool) -> None:
    """Copy no KV from blocks that are given up to those that stand for them."""
    if damaged:
        nothing = partial(instructions.Copied, 0, 0.0)
        runner._carrying.move = lambda *_, **__: nothing  # type: ignore[method-assign]
    else:
        del runner._carrying.move


def compare_nothing(runner: ProbedRunner, damaged: bool) -> None:
    """Take all copies for right."""
    filling._differs = (lambda _: torch.tensor(False)) if damaged else _differs


_differs = filling._differs

Damage = Callable[[ProbedRunner, bool], None]
"""Damages something, or undoes that."""


class _LateCopier:
    """Fills a slot after the layer that it is for has been computed, and lets nothing wait."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self._late: list[Sequence[Copy]] = []

    def start(self, copies: Sequence[Copy]) -> None:
        self._late.append(copies)
        if len(self._late) > SLOTS:
            copy_all(self._late.pop(0))

    def wait(self, _: None) -> None:
        pass


def read_slots_early(runner: ProbedRunner, damaged: bool) -> None:
    """Let layers compute with whatever their slots held before."""
    slots = runner._loader.shared.slots
    slots.copier = _LateCopier(slots.copier) if damaged else slots.copier.copier
    slots._filled = [None] * SLOTS


def order_shards_by_rank(runner: ProbedRunner, damaged: bool) -> None:
    """Let TP4 compute the parts of MLPs that the order of ranks gives: not what is kept here."""
    shared, layout = runner._loader.shared, Layout(tp=4)
    for name, layer in runner._workers[layout].model.named_modules():
        if name in shared._weights and shared._weights[name].kind in (GATE_UP, DOWN):
            full = FullLayer(name, layer, runner._loader.store.tensor)
            kept, shard = shared.part(full, Shard(_member(runner, layout), layout.tp))
            wrong = Shard(_member(runner, layout) % shard.of, shard.of)
            rule = rule_of(layer)
            assert isinstance(rule, LinearRule)
            rule.cut(layer, kept, wrong if damaged else shard)


def order_experts_by_rank(runner: ProbedRunner, damaged: bool) -> None:
    """Let TP4 take what a member keeps for the experts that the order of ranks gives it."""
    layout = Layout(tp=4)
    member = _member(runner, layout)
    place = member if damaged else nested_shard(member, layout.tp)
    for layer in runner._workers[layout].model.modules():
        if isinstance(layer, RoutedExperts):
            size = layer.global_num_experts // layout.tp
            own = ExpertRange(place * size, size)
            layer._expert_map.copy_(own.numbers(layer.global_num_experts))


def leave_head_out(runner: ProbedRunner, damaged: bool) -> None:
    """Let DP compute logits with zeros in place of what is streamed of the LM head."""
    shared = runner._loader.shared
    shared.stream_in(runner._workers[DP].model, DP)  # which finds all copies anew
    for name, weight in shared._weights.items():
        if damaged and weight.kind == HEAD:
            shared.slots.copies[DP.tp][weight.layer] = []
            shared.whole.slot(name, 1 - weight.own).zero_()
    shared.slots._filled = [None] * SLOTS


def swap_embeddings(runner: ProbedRunner, damaged: bool) -> None:
    """Let DP take the parts of its embeddings for each other."""
    runner._loader.shared.stream_in(runner._workers[DP].model, DP)
    if damaged:
        for layer in runner._workers[DP].model.modules():
            if hasattr(layer, "rows_of"):
                layer.rows_of = layer.rows_of[::-1]


def confuse_experts(runner: ProbedRunner, layout: Layout) -> bool:
    """Let a member compute its shares of experts with another's ``w2``.

    If it has whole experts, its map has them in another order instead.

    Returns:
        Whether it has whole experts.
    """
    store = ResidentWeights(runner._workers[DP].model)
    by_expert = False
    for name, layer in runner._workers[layout].model.named_modules():
        if not name.endswith(".routed_experts"):
            continue
        if by_expert := layer._expert_map is not None:
            own = layer._expert_map >= 0
            layer._expert_map[own] = layer._expert_map[own].flip(0)
            continue
        w13 = layer.w13_weight
        full = FullLayer(name, store.model.get_submodule(name), store.tensor)
        member = _member(runner, layout)
        rule_of(layer).view(layer, full, Shard((member + 1) % layout.tp, layout.tp))
        layer.w13_weight = w13
    return by_expert


def confuse_whole_experts(runner: ProbedRunner, layout: Layout) -> None:
    """Let the whole experts that a member computes in some steps be in another order."""
    for name, layer in runner._workers[layout].model.named_modules():
        if name.endswith(".shoal_whole"):
            own = layer._expert_map >= 0
            layer._expert_map[own] = layer._expert_map[own].flip(0)


def absorbed_bytes(runner: ProbedRunner) -> tuple[int, int]:
    """Return the bytes of all absorbed matrices of DP, and those in the weights themselves."""
    attention = [
        layer for layer in runner._workers[DP].model.modules() if isinstance(layer, MLAAttention)
    ]
    sizes, shared = 0, 0
    for layer in attention:
        weights = layer.kv_b_proj.weight.untyped_storage().data_ptr()
        for matrix in (layer.W_UV, layer.W_UK_T):
            sizes += matrix.nbytes
            shared += matrix.nbytes * (matrix.untyped_storage().data_ptr() == weights)
    return sizes, shared


def absorb_other_heads(runner: ProbedRunner, layout: Layout) -> None:
    """Let a member's latent attention absorb the matrices of another member's heads."""
    full = dict(runner._workers[DP].model.named_modules())
    rank = (_member(runner, layout) + 1) % layout.tp
    for name, layer in runner._workers[layout].model.named_modules():
        if isinstance(layer, MLAAttention):
            for key in ("W_UV", "W_UK_T"):
                other = full[name]._parameters[key].data.chunk(layout.tp)[rank]
                setattr(layer, key, torch.nn.Parameter(other, requires_grad=False))


def swap_kv_heads(runner: ProbedRunner, layout: Layout) -> None:
    """Let a member of steps by sequence send every GQA group another's head; twice: its own."""
    exchange = runner._workers[layout].executions[Mode.SP].model._exchange
    replicate = exchange._replicate
    exchange._replicate = lambda tensors: replicate([tensor.flip(1) for tensor in tensors])


_strips = carry_plan.strips


def swap_carried_heads(runner: ProbedRunner, swap: bool) -> None:
    """Let a member read heads of another member from single engines that it reads from."""

    def swapped(
        source: Unit, target: Unit, engine: int, geometry: KvGeometry, max_sp: int
    ) -> list[Strip]:
        found = _strips(source, target, engine, geometry, max_sp)
        if source.is_group:
            return found
        heads = geometry.heads
        return [strip._replace(source=(strip.source + strip.heads) % heads) for strip in found]

    carry_plan.strips = swapped if swap else _strips


def read_nothing(runner: ProbedRunner, nothing: bool) -> None:
    """Let a member take up requests, and read none of their KV."""
    carry_plan.strips = (lambda *_: []) if nothing else _strips


_read_kv = KvReader.read


def read_a_block_late(runner: ProbedRunner, late: bool) -> None:
    """Let a member read the last ``LATE_TOKENS`` of each request's KV after its next step."""

    def read(
        reader: KvReader, source: Unit, target: Unit, requests: Sequence[Any], **how: bool
    ) -> Callable[[], instructions.Copied]:
        early = [replace(r, computed=max(r.begin, r.computed - LATE_TOKENS)) for r in requests]
        rest = [replace(r, begin=e.computed) for r, e in zip(requests, early, strict=True)]
        runner.late.append(partial(_read_kv, reader, source, target, rest, **how))
        return _read_kv(reader, source, target, early, **how)

    KvReader.read = read if late else _read_kv  # type: ignore[assignment]


def carry_layers_of_stage_0(runner: ProbedRunner, damage: bool) -> None:
    """Let a member of a pipeline read the first stage's layers, whatever its stage is."""

    def of_first(
        source: Unit, target: Unit, engine: int, geometry: KvGeometry, max_sp: int
    ) -> list[Strip]:
        found = _strips(source, target, engine, geometry, max_sp)
        if target.layout.pp == 1 or source.layout.pp > 1:
            return found
        each = geometry.layers // target.layout.pp
        return [strip._replace(layers=range(each)) for strip in found]

    carry_plan.strips = of_first if damage else _strips


_introduce = taking_up.introduce


def forget_adapters(runner: ProbedRunner, forget: bool) -> None:
    """Let a member take up requests as if they named no adapters."""

    def bare(model_runner: Any, arrival: instructions.Arrival) -> None:
        _introduce(model_runner, replace(arrival, adapter=None))

    taking_up.introduce = bare if forget else _introduce


def move_adapters(runner: ProbedRunner, layout: Layout, first: int | None) -> None:
    """Let a member's share of a step have the adapters of the tokens from ``first``; None: its own.

    Beyond the step's tokens there are no adapters.
    """
    adapters = runner._workers[layout].executions[Mode.SP].model.adapters

    def activate(own: range) -> None:
        start = own.start if first is None else first
        StepAdapters.activate(adapters, range(start, start + len(own)))

    adapters.activate = activate


def adapter_bytes(runner: ProbedRunner) -> dict[str, int]:
    """Return the bytes of each layout's slots for adapters."""
    return {of.name: _bytes_of_slots(worker.model) for of, worker in runner._workers.items()}


def _bytes_of_slots(model: Any) -> int:
    wrapped = (layer for layer in model.modules() if isinstance(layer, BaseLayerWithLoRA))
    return sum(
        tensor.nbytes
        for layer in wrapped
        for name in ("lora_a_stacked", "lora_b_stacked")
        for tensor in getattr(layer, name, ())
    )


def loaded_bytes(runner: ProbedRunner) -> dict[str, int]:
    """Return the bytes of the layers that each layout loaded for itself, DP among them."""
    return {of.name: worker.owned_bytes for of, worker in runner._workers.items()}


def damage_repacked(runner: ProbedRunner, layout: Layout) -> None:
    """Put the outputs' scales of a layout's own layers in another order."""
    for layer in filter(owns_weights, layers_of(runner._workers[layout].model).values()):
        scales = layer.scales if hasattr(layer, "scales") else layer.weight_scale
        scales.data.copy_(scales.data.flip(-1).clone())


def accept_all_drafts(runner: ProbedRunner, accept: bool) -> None:
    """Let the sampler of the current layout take each rejected draft for right."""
    sampler = runner._worker.model_runner.rejection_sampler
    sampler.__dict__.pop("forward", None)
    if not accept:
        return
    judge = sampler.forward

    def forward(metadata: Any, *args: Any) -> Any:
        output = judge(metadata, *args)
        for row, drafts in zip(
            output.sampled_token_ids,
            metadata.draft_token_ids.split(metadata.num_draft_tokens),
            strict=True,
        ):
            rejected = (row[: len(drafts)] < 0).to(row.dtype)
            row[: len(drafts)] += rejected * (drafts.clamp(min=0) + 1)
        return output

    sampler.forward = forward


def keep_proposals(runner: ProbedRunner) -> None:
    """Let the V2 model runner of each layout keep what it proposes from now on."""
    runner.proposed = {}
    for worker in runner._workers.values():
        _keep_proposals(runner.proposed, worker.model_runner)


def _keep_proposals(kept: dict[str, dict[int, list[int]]], model_runner: Any) -> None:
    propose, lengths = model_runner.speculator.propose, model_runner.req_states.total_len.gpu

    def keeping(batch: Any, *args: Any, **options: Any) -> Any:
        drafts = propose(batch, *args, **options)
        tokens = lengths[batch.idx_mapping].tolist()
        for request_id, known, found in zip(batch.req_ids, tokens, drafts.tolist(), strict=True):
            kept.setdefault(request_id, {})[known] = found
        return drafts

    model_runner.speculator.propose = keeping


def proposed(runner: ProbedRunner) -> dict[str, dict[int, list[int]]]:
    """Return what was proposed for each request, by how many tokens it had then."""
    return runner.proposed


def spoil_draft_kv(runner: ProbedRunner) -> None:
    """Put other values into the KV of the draft model, in all blocks of the engine."""
    model_runner = runner._workers[DP].model_runner
    layers = model_runner.compilation_config.static_forward_context
    for name in model_runner.speculator.draft_attn_layer_names:
        layers[name].kv_cache.neg_()


def confuse_layers(runner: ProbedRunner, wrong: bool) -> None:
    """Let steps by sequence confuse the layers whose hidden states a draft model reads."""
    model = runner._workers[Layout(tp=2)].executions[Mode.SP].model
    model._base = base = model.__dict__.pop("true_base", model._base)
    if not wrong:
        return

    def confused(**inputs: Any) -> Any:
        made = base(**inputs)
        return made if isinstance(made, torch.Tensor) else (made[0], made[1][::-1])

    model.true_base, model._base = base, confused


def propose_to_others(runner: ProbedRunner, wrong: bool) -> None:
    """Give each request of a step of the V2 model runner the next one's drafts."""
    speculator = runner._worker.model_runner.speculator
    speculator.__dict__.pop("propose", None)
    if wrong:
        propose = speculator.propose
        speculator.propose = lambda *args, **options: propose(*args, **options).roll(1, 0)


def judge_drafts_of_others(runner: ProbedRunner, wrong: bool) -> None:
    """Let the V2 model runner hold each request's output against the next one's drafts."""
    sampler = runner._worker.model_runner.rejection_sampler
    sampler.__dict__.pop("_verify", None)
    if not wrong:
        return
    verify = sampler._verify

    def verify_others(*args: Any) -> Any:
        *others, drafts = args
        return verify(*others, drafts.roll(drafts.shape[0] // max(1, len(args[6]))))

    sampler._verify = verify_others


_staged = StagingServer._copied
_tell = ToldTokens.tell


def stage_nothing(runner: ProbedRunner, nothing: bool) -> None:
    """Let an engine tell readers that KV is in its slot, which nobody has written to."""
    StagingServer._copied = (lambda *_: "") if nothing else _staged  # type: ignore[method-assign]


MANY_KINDS = 99
"""Of tokens that adapters make, more than any step has."""


def pretend_captures(runner: ProbedRunner, *sizes: int) -> None:
    """Let steps by sequence believe in CUDA graphs of so many tokens, of every layout."""
    for captures in runner._loader.by_sequence.captures.values():
        ids = torch.zeros(max(sizes), dtype=torch.int32)
        positions = torch.full((max(sizes),), -1)
        captures._sizes = {MANY_KINDS: sorted(sizes)}
        captures._steps[MANY_KINDS] = {
            size: CapturedStep(BatchDescriptor(size), ids[:size], positions[:size])
            for size in sizes
        }


def forget_captures(runner: ProbedRunner) -> int:
    """Undo that, and return how many layouts were run so."""
    used = 0
    for captures in runner._loader.by_sequence.captures.values():
        steps = captures._steps.pop(MANY_KINDS).values()
        used += any(step.positions[0] >= 0 for step in steps)
        captures._sizes.clear()
    return used


def threads(_runner: ProbedRunner) -> int:
    """Return with how many threads torch computes."""
    return torch.get_num_threads()


def parameters(runner: ProbedRunner) -> dict[str, tuple[int, set[str], set[int]]]:
    """Return bytes, devices and storages of each layout's parameters."""
    return {
        layout.name: (
            sum(p.numel() * p.element_size() for p in worker.model.parameters()),
            {p.device.type for p in worker.model.parameters()},
            {p.untyped_storage().data_ptr() for p in worker.model.parameters()},
        )
        for layout, worker in runner._workers.items()
    }


def kv_storages(runner: ProbedRunner) -> dict[str, set[tuple[int, int]]]:
    """Return address and size of the storages behind each layout's KV caches."""
    return {
        layout.name: {
            (cache.untyped_storage().data_ptr(), cache.untyped_storage().nbytes())
            for cache in worker.model_runner.kv_caches
        }
        for layout, worker in runner._workers.items()
    }


def _kv(runner: ProbedRunner, block: int) -> list[torch.Tensor]:
    """Return a physical block's KV, one tensor per layer."""
    return [cache[block] for cache in runner._workers[DP].model_runner.kv_caches]


def kv_digest(runner: ProbedRunner, block_ids: list[int]) -> str:
    """Return a digest of every byte in physical blocks, over all layers."""
    digest = hashlib.sha256()
    for block in block_ids:
        for cache in _kv(runner, block):
            digest.update(cache.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def add_kv_noise(runner: ProbedRunner, request_id: str) -> None:
    """Damage this member's KV of a running request."""
    block_map = runner._worker.block_map
    table = {} if block_map is None else block_map._physical
    for block in runner.blocks[request_id]:
        for cache in _kv(runner, table.get(block, block)):
            cache.add_(torch.randn(cache.shape))


def collapse_block_map(runner: ProbedRunner, request_id: str) -> None:
    """Damage this member's table: every virtual block is the one where the request begins."""
    block_map = runner._worker.block_map
    assert block_map is not None
    table = block_map._physical
    first = table[runner.blocks[request_id][0]]
    table.update((virtual, first) for virtual in table if virtual)


def takes_arrays(runner: ProbedRunner) -> bool:
    """Return whether the V2 model runners of all layouts take tokens as arrays."""
    tables = [w.model_runner.req_states.all_token_ids for w in runner._workers.values()]
    return all(isinstance(table._staged_write_contents, array) for table in tables)


def tell_wrong_tokens(runner: ProbedRunner, wrong: bool) -> None:
    """Let the stages of pipelines learn another token than the one that was sampled."""

    def tell(told: ToldTokens, cached: CachedRequestData, model_runner: Any) -> None:
        others = [[token + 1 for token in tokens] for tokens in cached.new_token_ids]
        _tell(told, dataclasses.replace(cached, new_token_ids=others), model_runner)

    ToldTokens.tell = tell if wrong else _tell  # type: ignore[method-assign]


def model_runner_module(runner: ProbedRunner) -> str:
    """Return where vLLM's model runner class is from: that tells V1 from V2."""
    (module,) = {
        next(
            base.__module__
            for base in type(worker.model_runner).__mro__
            if base.__name__ == "GPUModelRunner"
        )
        for worker in runner._workers.values()
    }
    return module
