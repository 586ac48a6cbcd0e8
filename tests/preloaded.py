"""Processes that begin with vLLM imported: forked from one process that has imported it.

To import vLLM and to make a first configuration takes a core some 15 s, which every server that a
test starts would spend anew. What these processes have in memory, then, is what they would have
imported; all the rest (environment, directory, standard streams, signals, temporary files) is as
if the interpreter had just started.

Run as ``python -m tests.preloaded SOCKET MODULE...``, with the descriptor of a Unix socket and the
modules that it imports first, this is the process that forks. It dies with its client, and kills
what still runs. A forked process is a client, too: what it starts is forked from the same process,
and does not outlive it.
"""

import atexit
import functools
import gc
import importlib
import logging
import os
import pickle
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from logging.config import DictConfigurator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple, Self
from unittest.mock import patch

from shoal.server.options.serve_options import (
    add_shoal_options,
    model_defaults,
    prepare_environment,
    with_chosen,
)

_ROOT = Path(__file__).parents[1]
_MESSAGE_BYTES = 1 << 20
_NUMBER_BYTES = 8

_PRELOADED = (
    *(
        "shoal.server.frontend.frontend",
        "shoal.server.commands.serve",
        "tests.server.node",
        "tests.runtime.engine.real_node",
    ),
    *("shoal.runtime.controller.loop", "shoal.runtime.engine.fake.fake_backend"),
    *(
        "shoal.runtime.engine.scheduler.vllm_backend",
        "shoal.runtime.engine.runner.runner",
        "vllm.entrypoints.llm",
    ),
)
"""Every module that a process of a node begins with."""


class Job(NamedTuple):
    """What a process is to run."""

    function: str
    """As ``module:name``."""
    arguments: Sequence[Any]
    environment: Mapping[str, str]
    directory: str


# --- the client's side ----------------------------------------------------------------------------


class Process:
    """A process that calls a function, and ends with what that says as an exit code.

    It has the part of ``subprocess.Popen``'s interface that tests of servers use.

    Args:
        function: what it calls, as ``module:name``; importable and picklable, as its arguments are.
        arguments: with what.
        environment: its environment variables: all of them.
        first: modules that were imported before all others.

    Attributes:
        stdout: a pipe that it writes its standard output and errors to.
    """

    def __init__(
        self,
        function: str,
        arguments: Sequence[Any],
        environment: Mapping[str, str],
        first: Sequence[str] = (),
    ) -> None:
        job = Job(function, arguments, dict(environment), str(Path.cwd()))
        output, output_end = os.pipe()
        status, status_end = os.pipe()
        try:
            descriptors = [output_end, status_end]
            with _one_at_a_time:
                client = _client(*first)
            socket.send_fds(client, [pickle.dumps(tuple(job))], descriptors)
        finally:
            os.close(output_end)
            os.close(status_end)
        self.args = [function, *arguments]
        self.stdout: IO[str] = os.fdopen(output, encoding="utf-8", errors="replace")
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int.from_bytes(self._status.read(_NUMBER_BYTES), "little")
        assert self.pid, "the process that forks has ended"
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that has ended the process; None if it runs."""
        return self._reap(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return what ``poll`` returns then.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        code = self._reap(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _reap(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if selector.select(timeout):
                    said = self._status.read(_NUMBER_BYTES)
                    assert said, "the process that forks has ended"
                    self._status.close()
                    self.returncode = int.from_bytes(said, "little", signed=True)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for the end, and return what was written until then.

        Raises:
            subprocess.TimeoutExpired: that takes more than so many seconds.
        """
        text: list[str] = []
        reading = threading.Thread(target=lambda: text.append(self.stdout.read()), daemon=True)
        reading.start()
        reading.join(timeout)
        if reading.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.stdout.close()
        self.wait(timeout)
        return text[0], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()


_given: socket.socket | None = None
"""In a forked process, the way to the process that it was forked from."""


_one_at_a_time = threading.Lock()
"""Held while the way to the process that forks is made, which is to be one for all threads."""


@functools.cache
def _client(*first: str) -> socket.socket:
    """Return the way to a process that forks, with these modules imported first."""
    if _given is not None:
        return _given
    ours, theirs = _connection()
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), *first]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=_ROOT)
    atexit.register(_end, ours, process)
    return ours


def _connection() -> tuple[socket.socket, socket.socket]:
    """Return the client's end of a new connection, and the other one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
    return ours, theirs


def _end(client: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    client.close()
    process.wait()


# --- the process that forks -----------------------------------------------------------------------


class _Running(NamedTuple):
    """A forked process."""

    client: socket.socket
    """The client that asked for it."""
    status: int
    """Where its exit code goes."""


class _Server:
    """Forks a process for each job, and tells its client of the ends."""

    def __init__(self, client: socket.socket) -> None:
        self._first = client
        self._clients = [client]
        """The first one, and each process that was forked."""
        self._running: dict[int, _Running] = {}
        """By process id."""

    def run(self) -> Callable[[], int] | None:
        """Fork until the client is gone; returns in each forked process what that is to run."""
        ended, ended_end = socket.socketpair()
        for end in (ended, ended_end):
            end.setblocking(False)
        signal.set_wakeup_fd(ended_end.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all of a test run
        while True:
            ready, _, _ = select.select([ended, *self._clients], [], [])
            if ended in ready:
                ended.recv(1 << 10)
                self._reap()
            for client in [client for client in ready if client is not ended]:
                data, descriptors, *_ = socket.recv_fds(client, _MESSAGE_BYTES, 2)
                if not data:
                    self._leave(client)
                    if client is self._first:
                        signal.set_wakeup_fd(-1)  # those who were killed end after ``ended`` does
                        return None
                elif (job := self._fork(client, data, *descriptors)) is not None:
                    for end in (ended, ended_end):
                        end.close()
                    return job

    def _leave(self, client: socket.socket) -> None:
        """Kill what a client has running that is gone; all, if it is the first one."""
        for pid, running in self._running.items():
            if client in (running.client, self._first):
                os.kill(pid, signal.SIGKILL)
        self._clients.remove(client)
        client.close()

    def _fork(
        self, client: socket.socket, data: bytes, output: int, status: int
    ) -> Callable[[], int] | None:
        theirs, ours = _connection()
        if not (pid := os.fork()):
            for other in (ours, *self._clients):
                other.close()
            return functools.partial(self._begin, theirs, data, output, status)
        theirs.close()
        os.close(output)
        self._clients.append(ours)
        self._running[pid] = _Running(client, status)
        os.write(status, pid.to_bytes(_NUMBER_BYTES, "little"))
        return None

    def _reap(self) -> None:
        while self._running:
            pid, how = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            status = self._running.pop(pid).status
            code = os.waitstatus_to_exitcode(how)
            with suppress(BrokenPipeError):  # nobody wants to know
                os.write(status, code.to_bytes(_NUMBER_BYTES, "little", signed=True))
            os.close(status)

    def _begin(self, server: socket.socket, data: bytes, output: int, status: int) -> int:
        """Make a forked process what it would be if it had just started, and run its job."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for other in (status, *(running.status for running in self._running.values())):
            os.close(other)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        job = Job(*pickle.loads(data))
        os.environ.clear()
        os.environ.update(job.environment)
        os.chdir(job.directory)
        tempfile.tempdir = None
        importlib.import_module("tests.preloaded")._given = server  # this module is __main__
        module, _, name = job.function.partition(":")
        return int(getattr(importlib.import_module(module), name)(*job.arguments))


def _preload() -> None:
    """Import what nodes are made of, and make a first configuration, as ``shoal serve`` does."""
    before = dict(os.environ)
    prepare_environment(os.environ, ["--fake-engine"])
    for module in _PRELOADED:
        importlib.import_module(module)
    from shoal.runtime.engine.link.seams import check_seams
    from shoal.server.options import vllm_options
    from tests.runtime.engine.exact_products import multiply_exactly

    multiply_exactly()
    parser = vllm_options.make_parser()
    add_shoal_options(parser, os.environ)
    parser.set_defaults(**model_defaults(2, on_cpu=True, demo=True))
    args = with_chosen(vllm_options.parse(parser, ["--fake-engine"]))
    know_models()
    vllm_options.make_vllm_config(vllm_options.engine_args(args))
    check_seams()  # it imports the modules that it looks into
    os.environ.clear()
    os.environ.update(before)
    find_kernels()
    clear_caches_of_loggers_once()
    gc.collect()
    gc.freeze()  # or every process would copy what its collector looks at
    gc.unfreeze = lambda: None  # which vLLM calls as an engine ends


def know_models() -> None:
    """Have vLLM know what the tests' models are, and look here at those it does not know.

    It would ask a new process about each, which imports vLLM, lest it touch a GPU in this one.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models import llama, qwen2, qwen3, registry

    registry._run_in_subprocess = lambda look: look()
    for model in (llama.LlamaForCausalLM, qwen2.Qwen2ForCausalLM, qwen3.Qwen3ForCausalLM):
        ModelRegistry.register_model(model.__name__, model)


def clear_caches_of_loggers_once() -> None:
    """Have a process that configures logging clear the caches of all loggers once.

    It would do so for each of a thousand loggers, in every process of a node.
    """
    configure = DictConfigurator.configure

    def configure_quickly(self: DictConfigurator) -> None:
        with patch.object(logging.Manager, "_clear_cache", lambda _: None):
            configure(self)
        logging.root.setLevel(logging.root.level)  # this clears them

    DictConfigurator.configure = configure_quickly  # type: ignore[method-assign]


class _Interpreter:
    """Has of ``sys.modules`` those in which one of some objects was seen, and all later ones."""

    def __init__(self, wanted: Sequence[object]) -> None:
        ids = set(map(id, wanted))

        def holds(module: ModuleType) -> bool:
            values = list(vars(module).values()) if hasattr(module, "__dict__") else []
            owned = (vars(value).get("kernel") for value in values if hasattr(value, "__dict__"))
            return any(id(value) in ids for value in (*values, *owned))

        self._others = {name for name, module in [*sys.modules.items()] if not holds(module)}

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: sys.modules[name] for name in [*sys.modules] if name not in self._others}


def find_kernels() -> None:
    """Find the Triton kernels here that vLLM's platform replaces in each process with a worker.

    There it would look at every name of every module, which takes a second.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher

    names: list[str] = []
    with patch.object(dispatcher, "register_kernels", names.extend):
        current_platform.register_triton_kernel_overrides()
    kernels = [getattr(*dispatcher._resolve_kernel(name)) for name in names]
    dispatcher.sys = _Interpreter(kernels)


def main(descriptor: int, *first: str) -> int:
    """Fork for the client at the other end of a socket, with these modules imported first."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # before all others, so it is called after them
    client = socket.socket(fileno=descriptor)
    for module in first:
        importlib.import_module(module)
    _preload()
    job = _Server(client).run()
    codes.append(0 if job is None else job())
    return codes[0]


def _leave(codes: Sequence[int]) -> None:
    """End with an exit code, if there is one, before the interpreter takes all its modules apart.

    That takes half a second in each process, which would write to memory that it shares.
    """
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
