"""A node of real engines on CPUs for tests: small models, the real controller, one front end.

The engines' schedulers and runners are processes that begin with vLLM imported.
The controller runs in the test's own thread, inside ``RealNode.turn``; the test is the front end.
Engines do not run away from a slow test: see ``pace``.
Requests say in their ids on which unit they want to run (see ``ADDRESSED``).
"""

import itertools
import math
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import zmq
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from shoal.policies.rebalance import Rebalance
from shoal.policies.registry import POLICIES
from shoal.policies.values.layouts import Unit, layouts_up_to
from shoal.policies.values.partition import Partition, singles
from shoal.policies.values.plan import Dispatch, Plan, Policy, Room
from shoal.policies.values.snapshot import Move, Snapshot
from shoal.runtime.config import (
    MAX_RETRIES,
    Adapter,
    Addresses,
    CarryPath,
    LayoutConfigs,
    NodeConfig,
)
from shoal.runtime.controller.loop import Controller
from shoal.runtime.engine.scheduler import vllm_backend
from shoal.runtime.layout_configs import dp_config, layout_configs, prepare
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages.views import MemoryView, SwitchView
from shoal.runtime.protocol.transport import SUPERVISOR, ZmqControllerTransport, front_identity
from shoal.runtime.whole_experts import WholeExperts
from shoal.server.frontend.interruptions import Interruptions
from shoal.server.frontend.ordering import InOrder
from tests import preloaded
from tests.random_checkpoint import SPECIAL_TOKENS
from tests.runtime.engine import probes
from tests.runtime.engine.pace import Turns
from tests.runtime.engine.scripted_shift import Script, run_scripted_scheduler, set_script

PATIENCE_SECONDS = 250.0
"""How long a test waits for anything before it fails: so long that it says nothing of speed."""

CHANGE_PAUSE_SECONDS = 0.05
"""How long the first pause of runners is while a change that needs no steps is under way."""

MODEL_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "seed": 0,
    "disable_log_stats": True,
}
"""What every engine of the tests is started with, stock ones included."""

NO_ARGS: Mapping[str, Any] = {}

EOS = SPECIAL_TOKENS.index("</s>")

NODE_ARGS: dict[str, Any] = {"kv_cache_memory_bytes": 16 << 20, "max_num_batched_tokens": 64}
"""What makes a node's life hard: prompts of more than 64 tokens are computed in chunks."""


# --- where requests run ---------------------------------------------------------------------------


def _addressed(snapshot: Snapshot) -> Plan:
    rooms = {unit.unit: Room(unit) for unit in snapshot.units}
    dispatches = []
    for request in snapshot.pool:
        named = unit_of(request.request_id)
        for room in rooms.values():
            if named in (None, room.unit.unit) and room.takes(request):
                room.take(request)
                dispatches.append(Dispatch(request.request_id, room.unit.unit))
                break
    return Plan(tuple(dispatches))


def unit_of(request_id: str) -> Unit | None:
    """Return the unit that a request's id names, if any: that of ``0-1:tp2/7`` is ``tp(0, 1)``."""
    named, _, layout = request_id.split("/")[0].partition(":")
    engines = tuple(int(engine) for engine in named.split("-") if engine)
    if not engines:
        return None
    size = len(engines)
    return next(Unit(engines, of) for of in layouts_up_to(size, size) if of.name == layout)


ADDRESSED = Policy("addressed", _addressed, decides_layout=False)
"""Sends every request to the unit that its id names, as soon as that exists and has room."""


# --- processes ------------------------------------------------------------------------------------


def run_logged(log: str, target: Callable[..., Any], args: Sequence[Any]) -> int:
    """Run a target in a process of its own, with its output in a file."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    target(*args)
    return 0


class Process:
    """One forked process, whose output goes to a file that a failure shows."""

    def __init__(
        self,
        name: str,
        directory: Path,
        target: Callable[..., Any],
        *args: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        self._process = preloaded.Process(
            f"{__name__}:{run_logged.__name__}",
            (str(self._log), target, args),
            {**os.environ, **(environment or {})},
        )
        self._process.stdout.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        """End the process as SIGKILL does, and wait for it."""
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def join(self) -> None:
        """Wait for an orderly end."""
        code = self._process.wait(PATIENCE_SECONDS)
        assert code == 0, f"{self.name} failed:\n{self.output[-4000:]}"


# --- configuration ---


def configs_of(
    model: str,
    max_group: int,
    max_pp: int = 1,
    whole: WholeExperts | None = None,
    **vllm_args: Any,
) -> LayoutConfigs:
    """Return what ``NodeConfig.vllm`` holds, of arguments over ``MODEL_ARGS``."""
    args = prepare(AsyncEngineArgs(model=model, **(MODEL_ARGS | vllm_args)), api_servers=1)
    return layout_configs(args, dp_config(args), layouts_up_to(max_group, max_pp), whole)


# --- stock vLLM -----------------------------------------------------------------------------------


def _stock(
    model: str,
    prompts: str,
    sampling: list[SamplingParams],
    vllm_args: dict[str, Any],
    adapters: list[LoRARequest | None] | None,
    answer: str,
) -> None:
    from vllm import LLM
    from vllm.v1.executor import multiproc_executor

    # On CPUs vLLM starts the workers of a TP group as new processes, which would import it again.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    llm = LLM(model, kv_cache_memory_bytes=16 << 20, **MODEL_ARGS | vllm_args)
    outputs = llm.generate(
        pickle.loads(Path(prompts).read_bytes()),
        sampling,
        use_tqdm=False,
        lora_request=adapters,
    )
    Path(answer).write_bytes(pickle.dumps(outputs))


def stock_outputs(
    model: Path,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    dtype: str = MODEL_ARGS["dtype"],
    vllm_args: Mapping[str, Any] = NO_ARGS,
    adapters: Sequence[LoRARequest | None] | None = None,
    images: Sequence[Sequence[Any]] | None = None,
    **environment: str,
) -> list[RequestOutput]:
    """Return what stock vLLM, tensor parallel size 1, makes of prompts, each with its sampling.

    With ``adapters``, each prompt has one of its own, or none; with ``images``, each has some.
    """
    given: list[dict[str, Any]] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    for prompt, pictures in zip(given, images or (), strict=False):
        prompt["multi_modal_data"] = {"image": list(pictures)}
    with tempfile.TemporaryDirectory() as directory:
        asked, answer = Path(directory) / "prompts", Path(directory) / "outputs"
        asked.write_bytes(pickle.dumps(given))  # images are too large for a message
        process = Process(
            "stock",
            Path(directory),
            _stock,
            str(model),
            str(asked),
            list(sampling),
            {"dtype": dtype, **vllm_args},
            None if adapters is None else list(adapters),
            str(answer),
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment},
        )
        try:
            process.join()
        finally:
            process.kill()
        outputs: list[RequestOutput] = pickle.loads(answer.read_bytes())
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return the tokens of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def stock_tokens(
    model: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 32,
    dtype: str = MODEL_ARGS["dtype"],
    vllm_args: Mapping[str, Any] = NO_ARGS,
    adapters: Sequence[LoRARequest | None] | None = None,
    images: Sequence[Sequence[Any]] | None = None,
    **environment: str,
) -> list[list[int]]:
    """Return what stock vLLM, tensor parallel size 1, generates greedily for each prompt."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sampling = [greedy] * len(prompts)
    outputs = stock_outputs(
        model, prompts, sampling, dtype, vllm_args, adapters, images, **environment
    )
    return tokens_of(outputs)


# --- the node -------------------------------------------------------------------------------------


class WatchedTransport(ZmqControllerTransport):
    """The controller's transport; the test can see, and act on, what goes to the engines."""

    def __init__(self, addresses: Addresses, front: "zmq.Socket[bytes]") -> None:
        super().__init__(addresses, api_servers=1)
        self.before_send: Callable[[int, m.Message], None] = lambda _engine, _message: None
        # A turn also ends when the front end got something.
        self._poller.register(front, zmq.POLLIN)

    def to_engine(self, engine: int, message: m.Message, frames: Sequence[bytes] = ()) -> None:
        self.before_send(engine, message)
        super().to_engine(engine, message, frames)


class SwitchFailed(AssertionError):
    """A switch, or another change, that the controller could not do; the message is its error."""


class RealNode:
    """See the module. Use as a context manager.

    Args:
        model: checkpoint directory.
        engines: number of engines, which is also the largest group.
        patience: seconds that the controller gives an engine to answer.
        max_retries: see ``NodeConfig.max_retries``.
        restart_limit: see ``NodeConfig.restart_limit``; the test restarts engines.
        precopy_tokens: see ``NodeConfig.precopy_tokens``.
        carry_path: see ``NodeConfig.carry_path``.
        max_pp: see ``NodeConfig.max_pp``.
        tier_bytes: see ``NodeConfig.tier_bytes``.
        max_sp: see ``NodeConfig.max_sp``; above 1 the node's ``script`` says how steps run.
        whole_experts: see ``NodeConfig.whole_experts``.
        share_weights: see ``NodeConfig.share_weights``.
        recording_dir: see ``NodeConfig.recording_dir``; runners that record answer no probes.
        adapters: see ``NodeConfig.adapters``.
        environment: variables of the engines' processes.
        vllm_args: further engine arguments, over ``MODEL_ARGS`` and ``NODE_ARGS``.
    """

    def __init__(
        self,
        model: Path,
        engines: int,
        *,
        patience: float = 200.0,
        max_retries: int = MAX_RETRIES,
        restart_limit: int = 0,
        precopy_tokens: int = 0,
        carry_path: CarryPath = CarryPath.AUTO,
        max_pp: int = 1,
        tier_bytes: int = 0,
        max_sp: int = 1,
        whole_experts: WholeExperts | None = None,
        share_weights: int = 1,
        recording_dir: Path | None = None,
        adapters: Sequence[Adapter] = (),
        environment: dict[str, str] | None = None,
        **vllm_args: Any,
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="shoal-test-"))
        self._environment = {"VLLM_USE_V2_MODEL_RUNNER": "0", **(environment or {})}
        with patch.dict(os.environ, self._environment):
            args = NODE_ARGS | vllm_args
            configs = configs_of(str(model), engines, max_pp, whole_experts, **args)
        self.config = NodeConfig(
            engines=engines,
            max_group=engines,
            policy=ADDRESSED.name,
            runtime_dir=str(self._directory),
            vllm=configs,
            prepare_timeout_seconds=patience,
            max_retries=max_retries,
            restart_limit=restart_limit,
            precopy_tokens=precopy_tokens,
            carry_path=carry_path,
            max_pp=max_pp,
            tier_bytes=tier_bytes,
            max_sp=max_sp,
            whole_experts=whole_experts,
            share_weights=share_weights,
            recording_dir=None if recording_dir is None else str(recording_dir),
            adapters=tuple(adapters),
        )
        self.script(Script.TP)
        self._turns = Turns(self.config)
        self._skipped = 0.0
        self.tokens: dict[str, list[int]] = {}
        """Tokens received, by request."""
        self.drafts: Counter[str] = Counter()
        """How many drafts were accepted and rejected, as vLLM's statistics say, where it makes
        some."""
        self.logprobs: dict[str, list[dict[int, float]]] = {}
        """Log probabilities by token, for each output token of requests that asked for some."""
        self.prompt_logprobs: dict[str, list[dict[int, float]]] = {}
        """The same for each token of the prompt but the first."""
        self.finished: dict[str, Any] = {}
        """Finish reason of every request that ended."""
        self._numbers = itertools.count(1)
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._replies: dict[int, m.FromController] = {}
        self._prompts: dict[str, int] = {}
        self._order = InOrder(self._standing)
        self._interruptions = Interruptions(
            0,
            self._order,
            self._tokens_of,
            send=lambda message: self._control.send(m.encode(message)),
            expect=lambda _: None,
            count_late=lambda _: None,
        )
        self.processes: dict[str, Process] = {}
        self.dead: set[int] = set()
        """Engines whose processes have ended and were not started again."""
        self._kills = False
        """Whether the test has killed an engine. Another one of its group may die of that."""
        self._incarnations = dict.fromkeys(range(engines), 0)

    # --- life ---

    def __enter__(self) -> "RealNode":
        addresses = Addresses(self.config.runtime_dir)
        self._context: zmq.Context[Any] = zmq.Context()
        self._input = self._socket(zmq.ROUTER, addresses.front_input(0))
        self._output = self._socket(zmq.PULL, addresses.front_output(0))
        self._probes = self._socket(zmq.PULL, probes.address(self.config))
        self._control = self._peer(front_identity(0))
        self._supervisor = self._peer(SUPERVISOR)
        self.transport = WatchedTransport(addresses, self._output)
        # The controller looks its policy up once; nobody else is to find this one in the registry.
        with patch.dict(POLICIES, {ADDRESSED.name: ADDRESSED}):
            self.controller = Controller(self.config, self.transport, clock=self._clock)
        for peer in (self._control, self._supervisor):
            peer.connect(addresses.control)
        try:
            for engine in range(self.config.engines):
                self._start(engine)
            self.until(
                lambda: self.controller.books.engines.started and self._input.poll(0), "start"
            )
            self._engine_identity, _ = self._input.recv_multipart()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _socket(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.bind(address)
        return socket

    def _peer(self, identity: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        return socket

    def _start(self, engine: int) -> None:
        scripted = self.config.max_sp > 1
        scheduler = run_scripted_scheduler if scripted else vllm_backend.run_scheduler
        records = self.config.recording_dir is not None
        runner = probes.run_paced_recorder if records else probes.run_probed_runner
        targets = {"scheduler": scheduler, "runner": runner}
        for role, target in targets.items():
            self.processes[f"{role}-{engine}"] = Process(
                f"{role}-{engine}",
                self._directory,
                target,
                self.config,
                engine,
                self._incarnations[engine],
                environment=self._environment,
            )

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        self.transport.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory)
        for segment in Path("/dev/shm").glob(f"*{self._directory.name}*"):
            segment.unlink()

    def kill(self, name: str) -> None:
        """Kill a process, and do what the supervisor does then."""
        self._kills = True
        self.processes[name].kill()
        self._lose(int(name.split("-")[1]), f"{name} was killed")

    def _lose(self, engine: int, reason: str) -> None:
        if engine in self.dead:
            return
        self.dead.add(engine)
        for role in ("scheduler", "runner"):
            self.processes[f"{role}-{engine}"].kill()
        incarnation, restarts = self._incarnations[engine], self.config.restart_limit > 0
        died = m.EngineDied(engine, reason, incarnation=incarnation, restarts=restarts)
        self._supervisor.send(m.encode(died))

    def restart(self, *engines: int) -> None:
        """Start dead engines again, as the supervisor does."""
        for engine in engines:
            self.dead.remove(engine)
            self._incarnations[engine] += 1
            starting = m.EngineStarting(engine, self._incarnations[engine])
            self._supervisor.send(m.encode(starting))
            self._start(engine)

    def bring_back(self, *groups: Unit) -> None:
        """Restart what is dead until all groups are formed again.

        A member whose peer is killed may die of that a moment later, when the peer's restart has
        begun: the supervisor would restart that member too.
        """
        known = self.controller.books.engines

        def formed() -> bool:
            self.restart(*sorted(self.dead))
            # The controller may not yet know of a death, nor of a restart.
            now = {engine.number: engine.incarnation for engine in known} == self._incarnations
            return now and all(known.serves(group) and known.is_formed(group) for group in groups)

        self.until(formed, f"{[group.name for group in groups]} again")

    # --- turns ---

    def _clock(self) -> float:
        return time.monotonic() + self._skipped

    def skip(self, seconds: float) -> None:
        """Have the controller's clock go on by so much at once."""
        self._skipped += seconds

    def turn(self, timeout: float = 0.2, held: Collection[int] = ()) -> None:
        """Let the controller work, and receive what came to the front end.

        The runners of engines in ``held`` have no turn.
        """
        self._turns.count(set(range(self.config.engines)).difference(held))
        self.controller.turn(timeout)
        while self._output.poll(0):
            message = self._decoder.decode(self._output.recv_multipart())
            self._count_drafts(message.scheduler_stats)
            unit = wire.sender_of(message.engine_index)
            admitted = self._interruptions.admit(unit, message.outputs)
            for output in self._order.take(unit, admitted):
                assert output.request_id not in self.finished, "a token after the end"
                self.tokens[output.request_id] += output.new_token_ids
                self._keep_logprobs(output)
                if output.finish_reason is not None:
                    self.finished[output.request_id] = output.finish_reason
            self._interruptions.settle()
        while self._control.poll(0):
            reply = m.decode_from_controller(self._control.recv())
            if isinstance(reply, m.Interrupted):
                self._interruptions.interrupted(reply)
            if not isinstance(reply, m.Note | m.CarriedOn | m.KillEngines):
                self._replies[reply.call] = reply
        while self._supervisor.poll(0):
            order = m.decode_from_controller(self._supervisor.recv())
            assert isinstance(order, m.KillEngines)
            for engine, incarnation in order.engines.items():
                if incarnation == self._incarnations[engine]:
                    self._lose(engine, order.reason)
        self._look_for_ended()

    def _count_drafts(self, statistics: Any) -> None:
        found = None if statistics is None else statistics.spec_decoding_stats
        if found is not None:
            self.drafts += Counter(
                accepted=found.num_accepted_tokens,
                rejected=found.num_draft_tokens - found.num_accepted_tokens,
            )

    def _keep_logprobs(self, output: EngineCoreOutput) -> None:
        for kept, new in (
            (self.logprobs, output.new_logprobs),
            (self.prompt_logprobs, output.new_prompt_logprobs_tensors),
        ):
            if new is not None:
                rows = zip(new.logprob_token_ids.tolist(), new.logprobs.tolist(), strict=True)
                by_token = [dict(zip(ids, values, strict=True)) for ids, values in rows]
                kept.setdefault(output.request_id, []).extend(by_token)

    def _look_for_ended(self) -> None:
        """Find processes that have ended by themselves; none may, unless the test kills engines."""
        for name, process in list(self.processes.items()):
            engine = int(name.split("-")[1])
            if not process.is_alive and engine not in self.dead:
                assert self._kills, f"{name} ended:\n{process.output[-4000:]}"
                self._lose(engine, f"{name} ended")

    def _tokens_of(self, request_id: str) -> list[int] | None:
        return None if request_id in self.finished else self.tokens.get(request_id)

    def _standing(self, request_id: str) -> tuple[int, int] | None:
        tokens = self._tokens_of(request_id)
        return None if tokens is None else (self._prompts[request_id], len(tokens))

    def until(
        self,
        holds: Callable[[], Any],
        what: str,
        held: Callable[[], Collection[int]] = tuple,
        pause: float = 1.0,
    ) -> None:
        """Take turns until ``holds``; fail if that takes for ever.

        Args:
            holds: what is waited for.
            what: what that is, for the failure.
            held: which engines' steps it does not need, so that these run no further than a few
                steps, however long it takes. Nothing depends on it that they do not: they go on
                after each pause.
            pause: seconds; each further pause is twice as long.
        """
        began = time.monotonic()
        next_turn = began + pause
        while not holds():
            now = time.monotonic()
            assert now < began + PATIENCE_SECONDS, f"waited for ever: {what}"
            if now >= next_turn:
                self.turn(0.0)
                pause *= 2
                next_turn = now + pause
            else:
                self.turn(min(0.2, next_turn - now), held())

    # --- requests ---

    def submit(
        self,
        unit: Unit | None,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 32,
        temperature: float = 0.0,
        adapter: LoRARequest | None = None,
        features: Sequence[Sequence[MultiModalFeatureSpec]] = (),
        **sampling: Any,
    ) -> list[str]:
        """Send prompts that want to run on ``unit``, and return their request ids.

        None is any unit, and no adapter. With ``features``, each prompt has images
        (``image_prompts``).
        """
        ids = []
        named = "" if unit is None else f"{'-'.join(map(str, unit.engines))}:{unit.name}"
        for prompt, images in itertools.zip_longest(prompts, features):
            request_id = f"{named}/{next(self._numbers)}"
            params = SamplingParams(
                temperature=temperature, max_tokens=max_tokens, **{"ignore_eos": True} | sampling
            )
            params.update_from_generation_config({}, EOS)  # as vLLM's front end does
            request = EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                mm_features=images,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=adapter,
                cache_salt=None,
                data_parallel_rank=None,
            )
            self.tokens[request_id] = []
            self._prompts[request_id] = len(prompt)
            self._to_controller(wire.RequestType.ADD, self._encoder.encode(request))
            ids.append(request_id)
        return ids

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; what comes of them until that is done is dropped."""
        self._to_controller(wire.RequestType.ABORT, self._encoder.encode(list(request_ids)))

    def _to_controller(self, kind: wire.RequestType, frames: Sequence[Any]) -> None:
        self._input.send_multipart([self._engine_identity, kind.value, *frames])

    def wait(self, request_ids: Sequence[str]) -> list[list[int]]:
        """Wait for requests to end by their length, and return their tokens."""
        self.until(lambda: self.finished.keys() >= set(request_ids), "requests")
        for request_id in request_ids:
            assert str(self.finished[request_id]) == "length", self.finished[request_id]
        return [self.tokens[request_id] for request_id in request_ids]

    def wait_for_tokens(self, request_ids: Sequence[str], count: int) -> None:
        """Wait until each of the requests has at least ``count`` tokens.

        Engines whose requests have so many wait for the others.
        """

        def lacking(requests: Iterable[str]) -> bool:
            return any(len(self.tokens[request]) < count for request in requests)

        def held() -> list[int]:
            awaited: dict[int, set[str]] = {}
            for unit, core in self.controller.books.requests.cores.items():
                awaited.setdefault(unit.leader, set()).update(core.requests.keys() & request_ids)
            return [engine for engine, of in awaited.items() if of and not lacking(of)]

        self.until(lambda: not lacking(request_ids), "tokens", held)

    def generate(
        self,
        unit: Unit | None,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 32,
        **sampling: Any,
    ) -> list[list[int]]:
        """Return what a unit generates for each prompt."""
        return self.wait(self.submit(unit, prompts, max_tokens, **sampling))

    def generate_spread(
        self, units: Sequence[Unit], prompts: Sequence[Sequence[int]], max_tokens: int = 32
    ) -> list[list[int]]:
        """Return what prompts give that are dealt out to several units, all at once."""
        ids = [
            self.submit(units[index % len(units)], [prompt], max_tokens)[0]
            for index, prompt in enumerate(prompts)
        ]
        return self.wait(ids)

    def script(self, script: Script) -> None:
        """Say how the leaders choose the mode of the steps that follow."""
        set_script(self.config, script)

    # --- switches ---

    @property
    def partition(self) -> Partition:
        return self.controller.books.units.partition

    def ask(self, units: Sequence[Unit], treatment: m.Treatment = m.Treatment.HARD) -> int:
        """Ask for a partition without waiting; returns the call for ``switched``."""
        call = next(self._numbers)
        message = m.SetLayout(
            call,
            [list(unit.engines) for unit in units],
            treatment,
            PATIENCE_SECONDS,
            layouts=[unit.name for unit in units],
        )
        self._control.send(m.encode(message))
        return call

    def switched(self, call: int, *, needs_steps: bool = True) -> SwitchView:
        """Wait for a switch to be over.

        Args:
            call: as ``ask`` has returned it.
            needs_steps: whether requests are to run on meanwhile, for as long as it takes.

        Raises:
            SwitchFailed: the controller could not do it.
        """
        self._until_answered(call, "switch", needs_steps)
        reply = self._replies.pop(call)
        if isinstance(reply, m.CallFailed):
            raise SwitchFailed(reply.error)
        assert isinstance(reply, m.SwitchDone)
        return reply.switch

    def _until_answered(self, call: int, what: str, needs_steps: bool) -> None:
        held = () if needs_steps else range(self.config.engines)
        self.until(lambda: call in self._replies, what, lambda: held, CHANGE_PAUSE_SECONDS)

    def switch(self, *units: Unit, treatment: m.Treatment = m.Treatment.HARD) -> SwitchView:
        """Switch to a partition; engines that are not named stay or become single."""
        named = {engine for unit in units for engine in unit.engines}
        rest = [unit for unit in singles(self.config.engines) if unit.leader not in named]
        # While blocks are copied ahead, requests go on.
        needs_steps = treatment is m.Treatment.SEQUENTIAL or self.config.precopy_tokens > 0
        return self.switched(self.ask([*units, *rest], treatment), needs_steps=needs_steps)

    @contextmanager
    def bound(self, *groups: Unit) -> Iterator[None]:
        """Bind groups for a while."""
        self.switch(*groups)
        try:
            yield
        finally:
            self.switch()

    def drain(self, engine: int, *, drained: bool) -> int:
        """Take an engine out or let it serve again; return how many requests it still has."""
        call = next(self._numbers)
        self._control.send(m.encode(m.DrainEngines(call, [engine], drained)))
        self.until(lambda: call in self._replies, "drain")
        reply = self._replies.pop(call)
        assert isinstance(reply, m.LayoutView)
        return reply.engines[engine].requests

    def even_out(self, source: Unit, destination: Unit) -> None:
        """Let all requests of a unit go to another one of its layout, as if that had less to do."""
        self.until(lambda: self.controller._operations.is_idle, "the end of an operation")
        self.controller._balancing._move(Rebalance(source, destination, sys.maxsize), math.inf)

    # --- memory ---

    def move(self, source: Unit, destination: Unit, count: int) -> None:
        """Carry so many requests of a unit to another one, as a policy may plan; wait for that."""
        self.until(lambda: self.controller._operations.is_idle, "the end of an operation")
        self.controller._handovers.begin([Move(source, destination, count)])
        self.until(lambda: not self.controller._carries.running, "moves")

    def ask_memory(self, share: int, stages: int = 1) -> int:
        """Ask for a level of memory without waiting; returns the call for ``memory_changed``."""
        call = next(self._numbers)
        self._control.send(m.encode(m.ChangeMemory(call, share, stages)))
        return call

    def memory_changed(self, call: int, *, needs_steps: bool = True) -> MemoryView:
        """Wait for a change of memory to be over.

        Args:
            call: as ``ask_memory`` has returned it.
            needs_steps: see ``switched``.

        Raises:
            SwitchFailed: the controller could not do it.
        """
        self._until_answered(call, "memory", needs_steps)
        reply = self._replies.pop(call)
        if isinstance(reply, m.CallFailed):
            raise SwitchFailed(reply.error)
        assert isinstance(reply, m.MemoryChanged)
        return reply.change

    def change_memory(self, share: int, stages: int = 1) -> MemoryView:
        """Let the engines have another level of memory (``Level``)."""
        return self.memory_changed(self.ask_memory(share, stages))

    def audit(self) -> list[str]:
        """Return every broken invariant of the engines' and the controller's books."""
        call = next(self._numbers)
        self._control.send(m.encode(m.AuditNode(call)))
        self.until(lambda: call in self._replies, "audit")
        reply = self._replies.pop(call)
        assert isinstance(reply, m.AuditDone)
        return reply.problems

    # --- looking into runners ---

    def probe(self, engine: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(runner, *args)`` in a runner's process, between two of its steps."""
        unit = self.controller.books.units.unit_of(engine)
        probes.send(self._context, self.config, unit, engine, function, args)
        self.until(lambda: self._probes.poll(0), "probe")
        return probes.answer(self._probes.recv())

    def probe_all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(runner, *args)`` in every runner's process."""
        return [self.probe(engine, function, *args) for engine in range(self.config.engines)]
