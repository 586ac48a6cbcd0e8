"""The runner process: owns one GPU, holds every layout, and does what the queues say, in order.

``step_queues.py`` says which queue is next. Reading a group's queue is what makes it a member:
there is no state to agree on beyond the order of messages.
"""

import os
import queue
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import zmq
from numpy.random import mtrand
from vllm.envs import enable_envs_cache
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.outputs import AsyncModelRunnerOutput

from shoal.policies.values.layouts import DP, Layout, Unit, unit_of
from shoal.runtime.config import Addresses, NodeConfig
from shoal.runtime.engine.layouts.adapters import load_adapters
from shoal.runtime.engine.layouts.layout_worker import LayoutWorker
from shoal.runtime.engine.link import instructions
from shoal.runtime.engine.link.executor import push_socket
from shoal.runtime.engine.link.seams import check_seams
from shoal.runtime.engine.link.step_queues import PREPARING, StepQueues
from shoal.runtime.engine.runner.drafts import with_drafts
from shoal.runtime.engine.runner.interludes import (
    POLL_SECONDS,
    Interludes,
    after_cuts,
    before_passes,
    outside,
)
from shoal.runtime.engine.runner.loading import LayoutLoader
from shoal.runtime.engine.runner.memory_moves import MemoryMoves
from shoal.runtime.engine.runner.taking_up import TakingUp
from shoal.runtime.node.runtime_dir import remove_former
from shoal.runtime.protocol.compilations import CompilationNotes, note_file
from shoal.runtime.protocol.transport import LONGEST_WAIT_SECONDS


class Responder:
    """Sends answers from a thread of its own, so that a copy off the device never holds the runner.

    An asynchronous output is resolved here, in the order the steps ran; so is an answer that is a
    function, which may wait for the device.
    """

    def __init__(self, context: zmq.Context[Any], addresses: Addresses, engine: int) -> None:
        self._context = context
        self._addresses = addresses
        self._engine = engine
        self._queue: queue.SimpleQueue[tuple[Unit, int, Any] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="responder", daemon=True)
        self._thread.start()

    def answer(self, unit: Unit, seq: int, value: Any) -> None:
        """Queue the answer to instruction ``seq`` of a unit for the unit's leader."""
        self._queue.put((unit, seq, value))

    def settle(self) -> None:
        """Wait until what is queued has been sent: then this thread calls nothing of the device."""
        settled = threading.Event()
        self._queue.put(settled)
        settled.wait()

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join()
        for socket in self._sockets.values():
            socket.close(linger=1000)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            unit, seq, value = item
            try:
                if isinstance(value, AsyncModelRunnerOutput):
                    value = value.get_output()
                elif callable(value):
                    value = value()
                result = instructions.Result(unit.name, seq, self._engine, value)
                message = instructions.dumps(result)
            except Exception as error:  # noqa: BLE001 - reported to the scheduler, which ends
                message = instructions.dumps(instructions.Failure(self._engine, one_line(error)))
            self._socket(unit.leader).send(message)

    def _socket(self, leader: int) -> "zmq.Socket[bytes]":
        if leader not in self._sockets:
            self._sockets[leader] = push_socket(self._context, self._addresses.responses(leader))
        return self._sockets[leader]


class RandomStates:
    """The random number generators that vLLM's samplers draw from: a state for each layout.

    The members of a group sample alike only if nothing else draws from the group's generators;
    alone, they have to sample differently.
    """

    def __init__(self) -> None:
        self._left: dict[Layout, tuple[Any, ...]] = {}
        """State of every layout that was left. numpy's state takes long to copy, so it is not here:
        each layout has a numpy generator of its own."""
        self._numpys: dict[Layout, Any] = {}

    def switch(self, before: Layout, after: Layout) -> None:
        """Leave one layout's state for another's; a layout without one is about to be reseeded."""
        device = torch.cuda.get_rng_state() if current_platform.is_cuda() else None
        self._left[before] = (torch.get_rng_state(), device, random.getstate())
        self._numpys[before] = mtrand.get_bit_generator()
        if after in self._left:
            self._go_to(*self._left.pop(after))
        if after not in self._numpys:
            self._numpys[after] = numpy.random.MT19937()
        mtrand.set_bit_generator(self._numpys[after])

    def forget(self, layout: Layout) -> None:
        """Forget the state of a layout that was left for good."""
        self._left.pop(layout, None)

    @staticmethod
    def _go_to(cpu: Any, device: Any, pythons: Any) -> None:
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)
        random.setstate(pythons)


class Runner:
    """The queues of one engine, and its layouts' workers.

    Args:
        node: the node's configuration.
        engine: this runner's engine.
        loader: has loaded the layouts.
        context: ZMQ context of the process.
    """

    def __init__(
        self,
        node: NodeConfig,
        engine: int,
        loader: LayoutLoader,
        context: zmq.Context[Any],
    ) -> None:
        self._node = node
        self._loader = loader
        self._engine = engine
        self._context = context
        self._addresses = Addresses(node.runtime_dir)
        self._responder = Responder(context, self._addresses, engine)
        # Answers of what goes on beside steps: answers of these do not wait for them.
        self._beside = Responder(context, self._addresses, engine)
        self._random = RandomStates()
        queues = {layout: self._queue(worker.unit) for layout, worker in loader.workers.items()}
        self._queues = StepQueues(queues, self._prepare)
        self._layout = DP
        """The layout of the latest instruction."""
        self._interludes = Interludes(self)
        self._stream: Any = None
        """The ``torch.cuda.Stream`` that steps run on, from the first forming on."""
        self._carrying: TakingUp
        self._memory: MemoryMoves
        """Both exist once the cores have started."""

    def _queue(self, unit: Unit, generation: int = 0) -> "zmq.Socket[bytes]":
        queue: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        queue.set_hwm(0)
        address = self._addresses.queue(unit, self._engine, generation)
        queue.bind(address)
        if generation:
            remove_former(Path(address.removeprefix("ipc://")))
        return queue

    @property
    def _workers(self) -> dict[Layout, LayoutWorker]:
        return self._loader.workers

    def serve(self) -> None:
        """Start the cores, narrow layouts first, then do what the queues say, for ever."""
        for layout in self._workers:
            self._queues.read(layout)
            with self._loader.memory.phase(instructions.core_phase(layout)):
                while self._turn() != instructions.Detach(instructions.STARTUP_EPOCH):
                    pass
        # Every worker's start uses one seed, but engines alone should not sample alike.
        seed = self._workers[DP].config.model_config.seed
        set_random_seed(seed + self._engine)
        # As vLLM's own processes do: without this, every step looks settings up at each use.
        enable_envs_cache()
        self._carrying = TakingUp(self._node, self._engine, self._loader)
        self._memory = MemoryMoves(self._engine, self._loader, self._node.share_weights)
        self._note_compilations()
        while True:
            self._turn()

    def _note_compilations(self) -> None:
        """Let the engines' agents know when a step takes long because it compiles a kernel."""
        notes = CompilationNotes(note_file(self._node.runtime_dir, self._engine))
        if current_platform.is_cuda():
            from triton import knobs  # only GPUs have kernels of Triton's

            notes.follow(knobs.runtime)

    def _turn(self) -> instructions.Instruction:
        layout, instruction = self._queues.receive()
        self._do(layout, instruction)
        return instruction

    def _do(self, layout: Layout, instruction: instructions.Instruction) -> None:
        self._enter(layout)
        handler: Callable[[Any], None] = getattr(self, f"_on_{type(instruction).__name__.lower()}")
        handler(instruction)

    def _enter(self, layout: Layout) -> None:
        if layout != self._layout:
            if self._layout in self._workers:  # not while it is made anew
                self._worker.introductions.ahead.leave()
            self._random.switch(self._layout, layout)
            self._layout = layout

    @property
    def _worker(self) -> LayoutWorker:
        return self._workers[self._layout]

    def _on_call(self, call: instructions.Call) -> None:
        if call.method == instructions.STARTUP_PHASES:
            value: Any = self._loader.phases
        elif call.method == instructions.STARTUP_BYTES:
            value = self._loader.memory.taken
        elif call.method == instructions.SP_EXCHANGES:
            value = self._loader.by_sequence.exchanges
        elif call.method == instructions.WEIGHT_BYTES:
            value = self._loader.store.resident_bytes
        elif call.method == instructions.SHARES:
            value = self._memory.shares
        elif call.method == instructions.SHARES_KV:
            value = self._carrying.problem()
        elif call.method == instructions.TIER_BLOCKS:
            value = self._carrying.tier_blocks()
        else:
            value = self._worker.call(call.method, call.args, call.kwargs)
        self._responder.answer(self._worker.unit, call.seq, value)

    def _prepare(self, layout: Layout, instruction: PREPARING) -> None:
        """Follow an instruction that may come before the layout is entered."""
        worker = self._workers[layout]
        match instruction:
            case instructions.Introduce(request):
                worker.introductions.add(request)
            case instructions.Seat(requests, is_last):
                ahead = is_last and layout != self._layout
                worker.introductions.seat(requests, worker.model_runner, ahead=ahead)
            case instructions.Extend(virtual, physical):
                # A lease may grow for KV that is copied ahead of the group's first bind.
                worker.map_blocks(virtual, physical[self._engine])
            case instructions.Foresee():
                self._carrying.foresee(worker.unit, instruction)
                coming = {each.request_id: each.computed for each in instruction.requests}
                worker.introductions.foresee(coming)

    def _on_introduce(self, preparing: PREPARING) -> None:
        self._prepare(self._layout, preparing)

    _on_seat = _on_extend = _on_foresee = _on_introduce

    def _on_step(self, step: instructions.Step) -> None:
        output = self._worker.execute(step.scheduler_output, step.mode, step.begun)
        if output is not None:
            self._answer_step(step.seq, output)
        elif step.sample:
            self._sample(step.seq, step.grammar_output)

    def _on_sample(self, sample: instructions.Sample) -> None:
        self._sample(sample.seq, sample.grammar_output)

    def _sample(self, seq: int, grammar_output: Any) -> None:
        output = self._worker.sample(grammar_output)
        if output is None:
            return
        if self._worker.speculates:
            output = with_drafts(output, self._worker)
        self._answer_step(seq, output)

    def _answer_step(self, seq: int, output: Any) -> None:
        if self._worker.answers:
            self._responder.answer(self._worker.unit, seq, output)

    def _on_bind(self, bind: instructions.Bind) -> None:
        # Members sample independently, and agree only if their generators are equal. After unequal
        # work alone they would pick different tokens, with no error.
        set_random_seed(bind.seed)
        self._worker.map_blocks(bind.virtual, bind.physical[self._engine])

    def _on_carry(self, carry: instructions.Carry) -> None:
        copied = self._carrying.carry(self._worker, carry)
        self._responder.answer(self._worker.unit, carry.seq, copied)

    def _on_copyahead(self, ahead: instructions.CopyAhead) -> None:
        copied = self._carrying.copy_ahead(ahead)
        self._beside.answer(self._worker.unit, ahead.seq, copied)

    def _on_move(self, move: instructions.Move) -> None:
        copied = self._carrying.move(self._worker.unit, move.requests, beside=move.beside)
        responder = self._beside if move.beside else self._responder
        responder.answer(self._worker.unit, move.seq, copied)

    # --- groups that are formed anew ---

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See ``interludes.OwnSteps``."""
        layout = self._layout
        self._enter(DP)
        try:
            with outside(self._stream):
                yield
                # Its thread may wait for the device, which CUDA forbids while a graph is captured.
                self._responder.settle()
        finally:
            self._enter(layout)

    def step(self, seconds: float) -> bool:
        """See ``interludes.OwnSteps``."""
        instruction = self._queues.receive_own(seconds)
        if instruction is None:
            return False
        self._do(DP, instruction)
        while self._queues.awaits_sample:  # nothing comes between a step and its sampling
            sample = self._queues.receive_own(LONGEST_WAIT_SECONDS)
            if sample is not None:
                self._do(DP, sample)
        return True

    def _on_form(self, form: instructions.Form) -> None:
        """Make a layout's worker anew; if that fails, the engine goes on without it."""
        layout, error = form.layout, ""
        self._stream = torch.cuda.current_stream() if current_platform.is_cuda() else None
        self._enter(layout)  # a worker that starts seeds the generators
        try:
            self._loader.remake(layout, form.generation, self._interludes)
            queue = self._queue(unit_of(self._engine, layout), form.generation)
            self._queues.replace(layout, queue)
        except Exception as problem:  # noqa: BLE001 - told to the controller: the group is refused
            error = one_line(problem)
        self._enter(DP)
        self._random.forget(layout)
        self._responder.answer(self._worker.unit, form.seq, error)

    def _on_start(self, start: instructions.Start) -> None:
        """Start a layout's core with the other members; own steps go on in interludes."""
        layout = start.layout
        interludes, instruction = self._interludes, None
        interludes.be_patient()
        with (
            before_passes(self._workers[layout].model, interludes.hold_pass),
            after_cuts(interludes.hold),
        ):
            while instruction != instructions.Detach(instructions.STARTUP_EPOCH):
                # Its scheduler also has something to do between two calls.
                instruction = self._queues.receive_of(layout, 0.0)
                if isinstance(instruction, instructions.Call):
                    interludes.enter(instruction.method)
                    self._do(layout, instruction)
                    interludes.hold_end()
                elif instruction is not None:
                    self._do(layout, instruction)
                else:
                    self._enter(DP)
                    self.step(POLL_SECONDS)
        self._responder.answer(self._worker.unit, start.seq, None)

    def _on_fillweights(self, fill: instructions.FillWeights) -> None:
        copied = self._memory.fill(fill.blocks, fill.level)
        self._beside.answer(self._worker.unit, fill.seq, copied)

    def _on_useweights(self, use: instructions.UseWeights) -> None:
        weight_bytes = self._memory.use(use.level)
        self._responder.answer(self._worker.unit, use.seq, weight_bytes)

    def _on_detach(self, detach: instructions.Detach) -> None:
        layout = self._layout
        if detach.epoch == instructions.STARTUP_EPOCH:
            load_adapters(self._node, self._worker)
        self._enter(DP)
        self._random.forget(layout)


def one_line(error: BaseException) -> str:
    """Return an error as one line: its type and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextmanager
def _failures_reported(node: NodeConfig, engine: int, context: zmq.Context[Any]) -> Iterator[None]:
    """Tell every scheduler process that may wait for this runner that it will not answer."""
    try:
        yield
    except Exception as error:
        addresses = Addresses(node.runtime_dir)
        message = instructions.dumps(instructions.Failure(engine, one_line(error)))
        leaders = {unit_of(engine, layout).leader for layout in node.layouts}
        for leader in leaders:
            socket = push_socket(context, addresses.responses(leader))
            socket.send(message)
            socket.close(linger=1000)
        raise


def run_runner(
    node: NodeConfig, engine: int, incarnation: int = 0, kind: type[Runner] | None = None
) -> None:
    """Process entry: load everything and serve until the process is ended by a signal.

    An engine that comes back (``incarnation``) loads its own layout alone: the others come with
    ``Form``. The runner is a ``Runner``, or of another ``kind`` if one is given.

    The process has nothing to clean up: the supervisor removes the node's sockets and shared
    memory, and the driver frees the GPU.
    """
    # vLLM 0.32 calls what torch 2.13 deprecates; nothing a user of Shoal could do about it.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed")
    # vLLM sends what a stage's tensors are like to the next stage from bytes that it only reads.
    warnings.filterwarnings("ignore", category=UserWarning, message="The given buffer is not writ")
    # Sockets that vLLM makes for itself are removed with the node's directory.
    os.environ["VLLM_RPC_BASE_PATH"] = node.runtime_dir
    check_seams()
    context: zmq.Context[Any] = zmq.Context()
    context.linger = 0  # an answer to a scheduler that has ended must not hold this process
    with _failures_reported(node, engine, context):
        loader = LayoutLoader(node, engine)
        loader.load(node.layouts if incarnation == 0 else (DP,))
        (kind or Runner)(node, engine, loader, context).serve()
