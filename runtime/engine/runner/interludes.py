"""Steps of an engine's own between the portions of what its runner does to form a group anew.

A layout is made in the thread that runs steps, because vLLM keeps what belongs to a layout in
globals of its modules. But most of it consists of portions: the communicators, the worker, the
views of the weights, and then one pass of the model after the other, to compile it, to warm it up
and to capture its CUDA graphs. Between two portions, in an *interlude*, the runner does steps.

Members run a portion's collectives together. So an interlude ends when all members are in it. A
member that is still in a step then makes the others wait for that step at most. Steps of an engine
alone wait for no other engine, so a member always comes.
"""

import importlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import vllm.config.vllm as vllm_config
from torch import nn
from vllm.forward_context import override_forward_context
from vllm.platforms import current_platform

from shoal.runtime.clock import Clock

log = logging.getLogger("shoal.engine")

SHARE_SECONDS = 1.0
"""The longest time that steps get for one portion. They get as long as the portion took: a portion
that takes longer than this has compiled or connected something, and will not come again."""
IDLE_SECONDS = 0.01
"""How long a runner that does steps waits for the next one. Its scheduler may have to see the last
one's tokens first."""
POLL_SECONDS = 0.005
"""How long it waits between two looks whether the other members are there."""
LOGGED_SECONDS = 0.5
"""Portions that take longer are logged: no step runs in a portion."""
CUTS = (
    ("vllm.compilation.decorators", "_try_load_aot_compiled_fn", "loading of compiled code"),
    ("vllm.v1.worker.gpu_worker", "kernel_warmup", "warming up of kernels"),
    ("vllm.compilation.compiler_interface", "trigger_inductor_lazy_init", "last captures"),
    ("vllm.v1.worker.gpu_worker", "freeze_gc_heap", "second collection of garbage"),
)
"""Functions of vLLM, in the midst of a pass or between two, after which a portion ends."""


class Meeting(Protocol):
    """How members agree to go on (``rendezvous.Rendezvous``)."""

    @property
    def patience(self) -> float:
        """How long members wait for each other, in seconds."""

    def arrive(self, point: int) -> None:
        """Tell the others that this member has come to a point."""

    def all_are_at(self, point: int) -> bool:
        """Return whether all members have come to it."""


class OwnSteps(Protocol):
    """What a runner does for its engine alone."""

    def alone(self) -> AbstractContextManager[None]:
        """Be as between two steps, in the middle of what is done for a group."""

    def step(self, seconds: float) -> bool:
        """Do what the engine's own queue says next; return False if that is nothing.

        Args:
            seconds: how long to wait for it.
        """


class Interludes:
    """The interludes of one runner.

    Args:
        steps: the runner's own.
        clock: seconds.
    """

    def __init__(self, steps: OwnSteps, clock: Clock = time.monotonic) -> None:
        self._steps = steps
        self._clock = clock
        self._meeting: Meeting
        self._patience = 0.0
        self._group = self._part = ""
        self._point = self._passes = 0
        self._resumed = 0.0
        self._has_steps = False
        """Whether the last interlude had steps."""

    def begin(self, meeting: Meeting, group: str) -> None:
        """Begin with the first portion of a group's forming; its members meet here.

        Args:
            meeting: of the members.
            group: what the log calls the group.
        """
        self._meeting, self._patience, self._group = meeting, meeting.patience, group
        self._point, self._has_steps = 0, False
        self.enter("")

    def be_patient(self) -> None:
        """Wait for the other members as long as it takes: the controller watches them."""
        self._patience = float("inf")

    def enter(self, part: str) -> None:
        """Begin with the first portion of a part that consists of passes of the model."""
        self._part, self._passes, self._resumed = part, 0, self._clock()

    def hold_pass(self) -> None:
        """Do the same as ``hold``; what comes next is a pass of the model."""
        self._passes += 1
        self.hold(f"{self._part}, until pass {self._passes} began")

    def hold_end(self) -> None:
        """Do the same as ``hold``; the part is over."""
        self.hold(f"{self._part}, from pass {self._passes} on")

    def hold(self, portion: str) -> None:
        """Do steps for as long as the last portion took, and until all members are here.

        Args:
            portion: what the log calls the portion that is over.

        Raises:
            TimeoutError: a member did not come in time.
        """
        self._point += 1
        took = self._clock() - self._resumed
        if took > LOGGED_SECONDS:
            log.info("%s: no step for %.1f s: %s", self._group, took, portion)
        with self._steps.alone():
            self._use_share()
            self._meeting.arrive(self._point)
            self._await_all()
        self._resumed = self._clock()

    def _use_share(self) -> None:
        now = self._clock()
        end = now + min(now - self._resumed, SHARE_SECONDS)
        idle = IDLE_SECONDS if self._has_steps else 0.0
        self._has_steps = False
        while self._clock() < end and self._steps.step(idle):
            self._has_steps, idle = True, IDLE_SECONDS

    def _await_all(self) -> None:
        end = self._clock() + self._patience
        while not self._meeting.all_are_at(self._point):
            self._has_steps |= self._steps.step(POLL_SECONDS)
            if self._clock() >= end:
                raise TimeoutError(f"not all members came to portion {self._point}")


@contextmanager
def before_passes(model: nn.Module, hold: Callable[[], None]) -> Iterator[None]:
    """While active, call ``hold`` before each pass of a layout's model that vLLM runs to warm up.

    Not within the capture of a graph: then nothing else may run on the device. vLLM runs the model
    once before each capture, so the time between two calls is at most that of a pass and a capture.
    """

    def look(*_: Any) -> None:
        if not (current_platform.is_cuda() and torch.cuda.is_current_stream_capturing()):
            hold()

    hook = model.register_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def after_cuts(hold: Callable[[str], None]) -> Iterator[None]:
    """While active, call ``hold`` after each of the functions of ``CUTS``, with what it was."""

    def cut(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            hold(name)
            return result

        return called

    found = [(importlib.import_module(module), attribute) for module, attribute, _ in CUTS]
    original = [getattr(*place) for place in found]
    for place, function, (*_, name) in zip(found, original, CUTS, strict=True):
        setattr(*place, cut(function, name))
    try:
        yield
    finally:
        for place, function in zip(found, original, strict=True):
            setattr(*place, function)


@contextmanager
def outside(stream: "torch.cuda.Stream | None") -> Iterator[None]:
    """Be outside of what vLLM has set for the pass that is about to begin.

    Args:
        stream: what steps run on; None: the device has no streams. vLLM captures on another one,
            and the graphs of all layouts share their memory. So steps begin when the device has
            done what comes before them, and when this ends they are over.
    """
    saved = vllm_config._current_vllm_config, vllm_config._current_prefix
    vllm_config._current_vllm_config = vllm_config._current_prefix = None
    try:
        with override_forward_context(None), _on(stream):
            yield
    finally:
        vllm_config._current_vllm_config, vllm_config._current_prefix = saved


@contextmanager
def _on(stream: "torch.cuda.Stream | None") -> Iterator[None]:
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
