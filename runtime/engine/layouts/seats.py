"""Rows that a V2 model runner gives to requests before the step that begins with them.

``GPUModelRunner.add_requests`` takes tens of microseconds for each request, and carried requests
stand still meanwhile. Most of it can be done as soon as a request has its blocks: it is *seated*.
What that writes to tables is only staged. It is written before the layout goes on
(``writing_ahead.py``), and what is new with the step. Where the layout runs, the step writes all
at once, because a model runner has buffers for no more writes than one in each step.

How long a request will be when it begins is mostly known before it comes. Then that is written
ahead, too: for 64 requests, the step then takes 0.3 ms less of the host.

vLLM draws a seed for each request that has none, and all members of a unit have to draw the same.
Before the unit is bound they have no generator in common. So each seat has one, which begins with
the request's id.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from vllm.v1.core.sched.output import NewRequestData

from shoal.runtime.engine.layouts.writing_ahead import WritingAhead
from shoal.runtime.engine.link.instructions import Seated


class _Foreseen(NamedTuple):
    """What is written of a request before it begins."""

    begin: int
    """How many of its tokens are in the table of tokens."""
    computed: int
    """How many the other tables say that it has computed, and that it has one more."""


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
        self._foreseen: dict[str, _Foreseen] = {}
        """What tables say of seated requests although it is not so yet."""

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

    def foresee(self, computed: Mapping[str, int]) -> None:
        """Write by now how long requests will be when they begin, as far as that is possible.

        If they begin otherwise, or others with them, ``begin`` writes it again.

        Args:
            computed: how many of their tokens will have their KV: all but one.
        """
        names = [name for name in computed if name in self._seated and name not in self._foreseen]
        if not names or not self._ahead.is_possible:
            return
        states, done = self._runner.req_states, [computed[name] for name in names]
        rows = [states.req_id_to_index[name] for name in names]
        begins = states.prefill_len.np[rows].tolist()
        for name, *foreseen in zip(names, begins, done, strict=True):
            self._foreseen[name] = _Foreseen(*foreseen)
        self._stage_lengths(rows, [count + 1 for count in done], done)
        self._ahead.write(self._runner)

    def _stage_lengths(self, rows: list[int], lengths: list[int], computed: list[int]) -> None:
        states, zeros, ones = self._runner.req_states, [0] * len(rows), [1] * len(rows)
        states.prefill_len.np[rows] = lengths
        _stage(states.total_len, rows, zeros, lengths, ones)
        _stage(states.num_computed_tokens, rows, zeros, computed, ones)

    def begin(self, seated: Seated, *, writes: bool) -> None:
        """Add what a step says of requests that are seated.

        Args:
            seated: what it says.
            writes: whether nobody else writes what is staged: no other requests begin.
        """
        states = self._runner.req_states
        rows = [states.req_id_to_index[request_id] for request_id in seated.request_ids]
        foreseen = [self._foreseen.pop(request_id, None) for request_id in seated.request_ids]
        begins = [
            int(states.prefill_len.np[row]) if known is None else known.begin
            for row, known in zip(rows, foreseen, strict=True)
        ]
        _stage(states.all_token_ids, rows, begins, seated.tokens, seated.counts)
        lengths = [begin + count for begin, count in zip(begins, seated.counts, strict=True)]
        are_written = all(
            known is not None and known.computed == computed == length - 1
            for known, computed, length in zip(foreseen, seated.computed, lengths, strict=True)
        )
        if not are_written:
            self._stage_lengths(rows, lengths, seated.computed)
        self._seated.difference_update(seated.request_ids)
        if writes:
            with torch.inference_mode():
                (states.all_token_ids.apply_write if are_written else states.apply_staged_writes)()

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
            self._foreseen.pop(request_id, None)
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


def _stage(
    table: Any,
    rows: list[int],
    starts: list[int],
    values: Sequence[int],
    counts: list[int],
) -> None:
    """Do what ``StagedWriteTensor.stage_write`` does, for many rows at once.

    Args:
        table: the tensor.
        rows: where to write.
        starts: from where on in each row.
        values: those of the first row, then those of the second, and so on.
        counts: how many of them each row gets; 0: it is left as it is.
    """
    ends = accumulate(counts, initial=len(table._staged_write_contents))
    next(ends)
    table._staged_write_indices.extend(rows)
    table._staged_write_starts.extend(starts)
    table._staged_write_cu_lens.extend(ends)
    table._staged_write_contents.extend(values)


def _unstage(table: Any) -> None:
    """Take the last write of one number back (``StagedWriteTensor.stage_write_elem``)."""
    table._staged_write_indices.pop()
    table._staged_write_starts.pop()
    table._staged_write_contents.pop()
    table._staged_write_cu_lens.pop()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
