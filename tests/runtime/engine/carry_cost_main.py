"""What a carry costs the host, phase by phase, with vLLM's schedulers and V2 model runners' states.

Run as ``python -m tests.runtime.engine.carry_cost_main REQUESTS TOKENS ROUNDS``. Two engines are
bound and released so many times, with requests that were copied ahead. It prints the CPU time of
this thread in ms, in the median: for all requests of a bind, and for one engine's half of them in a
release. What is called ``before`` is done while the last steps run, and what is called ``after``
when the runners have the next one. Both are not in the sums. In a bind the requests of the second
engine come when those of the first are adopted. Nothing is computed or copied, and kernels are not
launched: what a device would wait for is not in it, nor what messages take on their way.
"""

import gc
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.runtime.engine import triton_interpreter  # isort: skip  # noqa: F401 - before vLLM
import torch
import vllm.v1.worker.cpu.buffer_utils as cpu_buffers
import vllm.v1.worker.gpu.buffer_utils as buffers
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from shoal.policies.values.kv_geometry import KvGeometry
from shoal.policies.values.layouts import DP, Unit
from shoal.runtime.engine.kv.carry_plan import pieces
from shoal.runtime.engine.kv.kv_cache import BlockMap
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.layouts.introductions import Introductions
from shoal.runtime.engine.layouts.token_table import take_arrays
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.runner.arrivals import introduce
from shoal.runtime.engine.scheduler.vllm_core import VllmCore
from shoal.runtime.layout_configs import take
from shoal.runtime.protocol import messages as m
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine.real_node import configs_of
from tests.runtime.engine.scheduler import toy_engines
from tests.runtime.engine.scheduler.toy_engines import Runners, ToyEngines

BLOCK_TOKENS, STEP_TOKENS, VOCABULARY, OUTPUTS = 16, 8192, 1000, 512
PAGES = KvPages(KvGeometry(2, 2, BLOCK_TOKENS), (0, 1 << 30), 1 << 12, 64, head_major=True)
OneCarry = tuple[VllmCore, VllmCore, list[str]]
"""Source, destination and requests."""
Carried = Sequence[OneCarry]


class NoKernel:
    """Stands in for vLLM's kernel that writes to tables."""

    def __getitem__(self, _grid: object) -> Any:
        return lambda *_, **__: None


class Serialising(Runners):
    """Keeps what is sent as bytes. A step makes a token of each request whose end it computes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.data: list[bytes] = []
        self._length: dict[str, int] = {}

    def send(self, instruction: Any) -> None:
        self.data.append(instructions.dumps(instruction))
        if isinstance(instruction, instructions.Introduce):
            request = instruction.request
            self._length[request.req_id] = len(request.prefill_token_ids)
        if isinstance(instruction, instructions.Carry):
            copied = [instructions.Copied(8, 0.25) for _ in self.unit.engines]
            self._answer(instruction.seq, copied)

    def run_step(
        self, scheduled: Any, grammar: Any = None, **how: Any
    ) -> "tuple[int, Future[Any]]":
        seq, future = self.expect(1)
        self.send(instructions.Step(seq, scheduled, grammar, **how))
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._length[new.req_id] = len(new.prefill_token_ids)
        for rest in how["begun"].requests:
            computed[rest.request_id] = rest.computed
            self._length[rest.request_id] += len(rest.tokens)
        made = {
            name: [7] if computed[name] + count >= self._length[name] else []
            for name, count in scheduled.num_scheduled_tokens.items()
        }
        order = {name: index for index, name in enumerate(made)}
        future.set_result(ModelRunnerOutput([*made], order, [*made.values()]))
        return seq, future


class KnowsRequests(SimpleNamespace):
    """What a V2 model runner does with the requests of a step."""

    add_requests = GPUModelRunner.add_requests
    finish_requests = GPUModelRunner.finish_requests
    _remove_request = GPUModelRunner._remove_request


class CarryCost:
    """Two engines and their group, whose runners are what vLLM keeps of requests."""

    def __init__(self, requests: int, tokens: int, directory: Path) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._spent: dict[str, float] = defaultdict(float)
        write_checkpoint(directory, CheckpointSpec(max_positions=tokens + OUTPUTS))
        seats = max(256, requests)
        configs = configs_of(
            str(directory),
            2,
            max_num_batched_tokens=STEP_TOKENS,
            async_scheduling=True,
            max_model_len=tokens + OUTPUTS,
            max_num_seqs=seats,
        )
        self._config = take(configs, DP)
        self.engines = ToyEngines(configs, v2=True)
        self._runners = {unit: self._runner(seats, tokens) for unit in self.engines.cores}
        self._map = BlockMap()
        self._introductions = {unit: Introductions() for unit in self._runners}
        self.names = [f"cmpl-{number:032x}" for number in range(requests)]
        draw, half = random.Random(0), requests // 2
        for number, name in enumerate(self.names):
            prompt = [draw.randrange(VOCABULARY) for _ in range(tokens)]
            own = self.engines.own[number >= half]
            self.engines.submit(own, name, prompt, max_tokens=OUTPUTS, temperature=0.7, top_p=0.9)
        for own in self.engines.own:
            while not all(self.engines.tokens[name] for name in own._scheduler.requests):
                self.engines.step(own)
        self.engines.bind(requests * (tokens // BLOCK_TOKENS // 2 + 20))

    def _runner(self, seats: int, tokens: int) -> Any:
        device, length = torch.device("cpu"), tokens + OUTPUTS
        states = RequestState(seats, length, STEP_TOKENS, 0, VOCABULARY, device)
        made = KnowsRequests(
            req_states=states,
            block_tables=BlockTables([BLOCK_TOKENS], seats, STEP_TOKENS, [length], device),
            sampler=Sampler(self._config, seats, VOCABULARY, device, states),
            prompt_logprobs_worker=PromptLogprobsWorker(seats, device),
            lora_state=LoraState(seats),
            model_state=SimpleNamespace(
                add_request=lambda *_: None,
                apply_staged_writes=lambda: None,
                remove_request=lambda _: None,
            ),
            **dict.fromkeys(("adaptive_verification", "pooling_runner", "encoder_cache")),
            pp_handler=None,
            is_last_pp_rank=True,
            device=device,
        )
        take_arrays(made)
        return made

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self._spent[phase] += time.thread_time() - began

    def carry(self, way: str, carried: Carried) -> None:
        """Carry requests, and note what each phase takes."""
        for number, (source, target, names) in enumerate(carried):
            for name in names:
                target.expect(name, self.engines.frames[name])
            target.reserve(number, source.unit, source.pin(number, names))
            for name in names:
                target.promise(number, name)
            while not target.settle(number, copied=True):
                pass
            while not source.unpin(number):
                pass
        sources = {source.unit: source for source, _, _ in carried}.values()
        for source in sources:
            self.engines.step(source, 3)
            while source.dispatch():
                pass
        self._forget_sent()
        gc.collect()
        gc.disable()
        announced = self._announce(carried)
        for source in sources:
            while source.in_flight:
                self.engines._collect(source)
        for unit in {target.unit: target for _, target, _ in carried}:
            self._foresee(unit)
        self._forget_steps()
        for target in {target.unit: target for _, target, _ in carried}.values():
            *others, last = (each for each in enumerate(carried) if each[1][1] is target)
            for number, each in others:
                self._adopt(each, self._cross(number, each, announced))
            self._begin(last[1], self._cross(*last, announced))
            self._read(target.unit)
        gc.enable()
        for source, target, names in carried:
            source.abort(names)
            self.engines.step(target, 2)
        # The engines of a release work side by side.
        beside = 2 if way == "release" else 1
        for phase, seconds in self._spent.items():
            alone = phase in ("export", "messages", "before: announce")
            self.seconds[f"{way}: {phase}"].append(seconds / (1 if alone else beside))
        self._spent.clear()

    def _announce(self, carried: Carried) -> dict[str, m.CarriedRequest]:
        """Do what is done while the last steps run."""
        announced = dict[str, m.CarriedRequest]()
        for source, target, names in carried:
            with self._timed("before: announce"):
                found = source.announce(names)
            with self._timed("before: allot"):
                for request in found:
                    assert target.allot(request)
                target.tell_allotted([(source.unit, names)])
            announced |= {request.request_id: request for request in found}
        return announced

    def _cross(
        self, number: int, carry: OneCarry, announced: dict[str, m.CarriedRequest]
    ) -> list[m.CarriedRequest]:
        """Return what the destination hears of the requests."""
        source, target, names = carry
        with self._timed("export"):
            exported = source.export(names)
        with self._timed("messages"):
            data = m.encode(m.Exported(number, 0, source.unit, exported))
            came = m.decode_to_controller(data)
            assert isinstance(came, m.Exported)
            data = m.encode(m.Import(number, target.unit, source.unit, came.requests))
            message = m.decode_to_engine(data)
            assert isinstance(message, m.Import)
            return [request.whole(announced) for request in message.requests]

    def _adopt(self, carry: OneCarry, requests: Sequence[m.CarriedRequest], when: str = "") -> None:
        source, target, _ = carry
        with self._timed(when + "adopt"):
            for request in requests:
                assert target.adopt(source.unit, request, with_kv=True)
        with self._timed(when + "tell the runners"):
            target.copy()

    def _begin(self, carry: OneCarry, requests: Sequence[m.CarriedRequest]) -> None:
        """Begin with the requests of a target, of which these are the last."""
        source, target, _ = carry
        with self._timed("send the first step"):
            sent = target.send_first([(source.unit, requests)])
        when = "after: " if sent else ""
        self._adopt(carry, requests, when)
        with self._timed(when + "schedule the step"):
            assert target.dispatch()

    def _read(self, unit: Unit) -> None:
        """Do what one member's runner does with what was sent, but for the device."""
        runner = self._runners[unit]
        for data in self._channel(unit).data:
            with self._timed("runner: read messages"):
                instruction = instructions.loads(data)
            if isinstance(instruction, instructions.Carry):
                with self._timed("runner: plan the copy"):
                    for arrival in instruction.requests:
                        introduce(runner, arrival)
                    self._plan(unit, instruction)
            elif isinstance(instruction, instructions.Step):
                with self._timed("runner: know the requests"):
                    output = instruction.scheduler_output
                    output = self._introductions[unit].complete(output, instruction.begun)
                    output = self._map.apply(output) if unit.is_group else output
                    runner.finish_requests(output)
                    runner.add_requests(output)
                    runner.block_tables.apply_staged_writes()
                with self._timed("after: runner: the next step"):
                    self._introductions[unit].complete(output, instructions.Begun())

    def _foresee(self, unit: Unit) -> None:
        """Do what a runner does while the last steps run: find out what it will read."""
        for data in self._channel(unit).data:
            instruction = instructions.loads(data)
            if isinstance(instruction, instructions.Foresee):
                with self._timed("before: runner: plan the copy"):
                    self._plan(unit, instruction)
                with self._timed("before: runner: write lengths"):
                    coming = {each.request_id: each.computed for each in instruction.requests}
                    self._introductions[unit].foresee(coming)

    @staticmethod
    def _plan(unit: Unit, told: instructions.Carry | instructions.Foresee) -> None:
        pieces(told.source, unit, unit.leader, told.requests, 0, PAGES, 1)

    def _channel(self, unit: Unit) -> Serialising:
        channel = self.engines.runners[unit]
        assert isinstance(channel, Serialising)
        return channel

    def _forget_steps(self) -> None:
        for unit in self.engines.cores:
            self._channel(unit).data.clear()

    def _forget_sent(self) -> None:
        """Take note of leases, and drop what else was sent."""
        for unit in self.engines.cores:
            for instruction in map(instructions.loads, self._channel(unit).data):
                match instruction:
                    case instructions.Introduce(request):
                        self._introductions[unit].add(request)
                    case instructions.Seat(requests, is_last):
                        introductions, runner = self._introductions[unit], self._runners[unit]
                        introductions.seat(requests, runner, ahead=is_last)
                    case instructions.Bind(virtual=virtual) | instructions.Extend(virtual=virtual):
                        self._map.extend(virtual, instruction.physical[unit.leader])
            self._channel(unit).data.clear()


def main(requests: int, tokens: int, rounds: int) -> None:
    """Print the table."""
    toy_engines.TOKENS = BLOCK_TOKENS
    toy_engines.BLOCKS = 2 * requests * (tokens // BLOCK_TOKENS + 40)
    toy_engines.hash_of = get_hash_fn_by_name("sha256_cbor")
    toy_engines.Runners = Serialising
    buffers.UvaBuffer = cpu_buffers.UvaBuffer
    buffers._apply_write_kernel = NoKernel()
    with tempfile.TemporaryDirectory() as directory:
        cost = CarryCost(requests, tokens, Path(directory) / "model")
    group, (one, other), half = cost.engines.group, cost.engines.own, requests // 2
    parts = (one, cost.names[:half]), (other, cost.names[half:])
    for _ in range(rounds):
        cost.carry("bind", [(own, group, names) for own, names in parts])
        cost.carry("release", [(group, own, names) for own, names in parts])
    totals: dict[str, float] = defaultdict(float)
    for phase, seconds in cost.seconds.items():
        median = statistics.median(seconds) * 1e3
        if "before" not in phase and "after" not in phase:
            totals[phase.split(":")[0]] += median
        print(f"{phase:<36}{median:8.3f}")
    for way, total in totals.items():
        print(f"{way + ': all':<36}{total:8.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
