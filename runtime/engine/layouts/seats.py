"""Rows that a V2 model runner gives to requests before the step that begins with them.

``GPUModelRunner.add_requests`` takes tens of microseconds for each request, and carried requests
stand still meanwhile. Most of it can be done as soon as a request has its blocks: it is *seated*.
What that writes to tables is only staged. It is written while another layout runs
(``writing_ahead.py``), and what is new with the step. Where this layout runs, the step writes all
at once, because a model runner has buffers for no more writes than one in each step.

vLLM draws a seed for each request that has none, and all members of a unit have to draw the same.
Before the unit is bound they have no generator in common. So each seat has one, which begins with
the request's id.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from vllm.v1.core.sched.output import NewRequestData

from shoal.runtime.engine.layouts.writing_ahead import WritingAhead
from shoal.runtime.engine.link.instructions import Rest


class Seats:
    """The rows of one layout's model runner that such requests have.

    Args:
        model_runner: the layout's, V2.
        ahead: writes what is staged before the step comes.
    """

    def __init__(self, model_runner: Any, ahead: WritingAhead) -> None:
        self._runner = model_runner
        self._ahead = ahead
        self._seated: set[str] = set()

    def take(self, request: NewRequestData) -> None:
        """Give a request a row; what it has computed may still change."""
        self.leave([request.req_id])
        staging: Any = _Staging(self._runner)
        with torch.inference_mode(), _drawing_for(request.req_id):
            type(self._runner).add_requests(staging, SimpleNamespace(scheduled_new_reqs=[request]))
        # The step stages these, and of two writes to one number either may be the last.
        states = self._runner.req_states
        for table in (states.total_len, states.num_computed_tokens):
            _unstage(table)
        self._seated.add(request.req_id)

    def begin(self, rests: Sequence[Rest], *, writes: bool) -> None:
        """Add what a step says of requests that are seated.

        Args:
            rests: what it says.
            writes: whether nobody else writes what is staged: no other requests begin.
        """
        if not rests:
            return
        states = self._runner.req_states
        rows = [states.req_id_to_index[rest.request_id] for rest in rests]
        begins = states.prefill_len.np[rows]
        for row, begin, rest in zip(rows, begins.tolist(), rests, strict=True):
            states.all_token_ids.stage_write(row, begin, rest.tokens)
        lengths = begins + [len(rest.tokens) for rest in rests]
        states.prefill_len.np[rows] = lengths
        _stage(states.total_len, rows, lengths.tolist())
        _stage(states.num_computed_tokens, rows, [rest.computed for rest in rests])
        self._seated.difference_update([rest.request_id for rest in rests])
        if writes:
            with torch.inference_mode():
                states.apply_staged_writes()

    def leave(self, request_ids: Iterable[str]) -> None:
        """Take the rows of requests that do not begin; those that have none are ignored."""
        gone = self._seated.intersection(request_ids)
        if not gone:
            return
        # What is staged for a row must be written before the row is another request's. Such a write
        # is one more than a step has, so it must not meet those of a step.
        self._ahead.join()
        with torch.inference_mode():
            _settle(self._runner.device)
            self._runner.req_states.apply_staged_writes()
            self._runner.block_tables.apply_staged_writes()
            _settle(self._runner.device)
        for request_id in sorted(gone):
            self._runner._remove_request(request_id)
        self._seated -= gone


class _Staging:
    """A model runner that writes nothing."""

    def __init__(self, model_runner: Any) -> None:
        self._of = model_runner
        for name in ("req_states", "model_state", "sampler"):
            setattr(self, name, _Unwritten(getattr(model_runner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class _Unwritten:
    """A part of a model runner whose tables are staged only."""

    def __init__(self, part: Any) -> None:
        self._of = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def apply_staged_writes(self) -> None:
        """Leave it for later."""


@contextmanager
def _drawing_for(request_id: str) -> Iterator[None]:
    """While active, numpy draws what it draws for this request in every process."""
    of_layout = mtrand.get_bit_generator()
    # To seed numpy's usual one takes ten times as long.
    mtrand.set_bit_generator(np.random.PCG64(zlib.crc32(request_id.encode())))
    try:
        yield
    finally:
        mtrand.set_bit_generator(of_layout)


def _stage(table: Any, rows: list[int], values: list[int]) -> None:
    """Do what ``StagedWriteTensor.stage_write_elem`` does, for many rows at once."""
    table._staged_write_indices.extend(rows)
    table._staged_write_starts.extend([0] * len(rows))
    done = len(table._staged_write_contents)
    table._staged_write_contents.extend(values)
    table._staged_write_cu_lens.extend(range(done + 1, done + len(rows) + 1))


def _unstage(table: Any) -> None:
    """Take the last write of one number back (``StagedWriteTensor.stage_write_elem``)."""
    table._staged_write_indices.pop()
    table._staged_write_starts.pop()
    table._staged_write_contents.pop()
    table._staged_write_cu_lens.pop()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
