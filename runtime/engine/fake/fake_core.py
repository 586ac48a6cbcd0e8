"""The fake engine's cores: the whole of what vLLM's do, with made-up steps and tokens."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from shoal.policies.values.layouts import Unit
from shoal.runtime.engine.agent.copies_ahead import NO_PREFIXES, Prefixes
from shoal.runtime.engine.agent.interface import RunnerDied
from shoal.runtime.engine.agent.results import (
    Adoption,
    Collected,
    Copied,
    CoreLoad,
    CoreOutputs,
    EndedSteps,
)
from shoal.runtime.engine.agent.step_mode import Shift
from shoal.runtime.engine.agent.step_work import work_of_step
from shoal.runtime.engine.fake import fake_logprobs
from shoal.runtime.engine.fake.fake_ahead import FakeAhead
from shoal.runtime.engine.fake.fake_blocks import FakeBlocks
from shoal.runtime.engine.fake.fake_copies import Arriving, FakeCopies
from shoal.runtime.engine.fake.fake_leaving import FakeLeaving
from shoal.runtime.engine.fake.fake_request import FakeRequest
from shoal.runtime.engine.fake.fake_scheduler import Batch, FakeScheduler
from shoal.runtime.engine.fake.fake_vacated import holders, vacate
from shoal.runtime.engine.fake.faults import Seam
from shoal.runtime.engine.fake.step_times import (
    DeviceStep,
    repeated,
)
from shoal.runtime.engine.fake.surroundings import Surroundings
from shoal.runtime.latest import Latest
from shoal.runtime.protocol import wire
from shoal.runtime.protocol.messages import AheadRequest, CarriedRequest, LayoutLimits, Mode, Work


class _Step(DeviceStep, kw_only=True):
    """A step in flight, or a run of equal ones."""

    batch: Batch
    """Requests, and how many of their tokens one step computes."""
    work: Work
    """The work of the first of them."""
    mode: Mode


class FakeCore:
    """``Core`` of one unit: what a single engine and a group have in common.

    Args:
        unit: the engines of the unit.
        limits: batch size, block size and length of this layout.
        surroundings: what the engine's cores share.
        pool: the engine's own blocks, or virtual ids of the lease.
    """

    def __init__(
        self, unit: Unit, limits: LayoutLimits, surroundings: Surroundings, pool: FakeBlocks
    ) -> None:
        self.unit = unit
        self.shift = Shift(limits.sp_floor)
        self._limits = limits
        self._around = surroundings
        self._clock = surroundings.clock
        self._devices = surroundings.devices
        self._scheduler = FakeScheduler(limits, surroundings.settings, pool, surroundings.clock)
        self._expected: dict[str, FakeRequest] = {}
        self._latest = Latest[FakeRequest]()
        settings, devices = surroundings.settings, surroundings.devices
        self._copies = FakeCopies(unit, settings, devices)
        size, scheduler = limits.block_tokens, self._scheduler
        self._leaving = FakeLeaving(scheduler, size, self._physical)
        self._ahead = FakeAhead(unit, size, settings, devices, scheduler, self._physical)
        self._depth = unit.layout.pp
        self._steps: deque[_Step] = deque()
        """Those in flight, at most one for each stage."""
        self._known_until = math.inf
        """When the next step was scheduled: requests that came later are not in it."""

    # --- requests -----------------------------------------------------------------------------

    def add(self, frames: Sequence[Any], tokens: Sequence[int] = (), patience: float = 0.0) -> None:
        """See ``Core.add``."""
        self._scheduler.add(request := self._request(frames, tokens), patience)
        self._latest.put(request.id, request, len(request.prompt))
        self._cut()

    def _request(self, frames: Sequence[Any], tokens: Sequence[int] = ()) -> FakeRequest:
        view = wire.decode_request(frames)
        prompt, limit = view.prompt_token_ids(), self._limits.max_model_len
        room = limit - len(prompt)
        if not prompt or room <= len(tokens):
            raise ValueError(f"prompt of {len(prompt) + len(tokens)} tokens, limit {limit}")
        sampling = view.sampling_params or wire.Sampling()
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        return FakeRequest(view, prompt, max_tokens, tokens)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``Core.abort``."""
        if self._scheduler.parked.keys() & set(request_ids):
            self._around.faults.strike(Seam.DROP)
        self._scheduler.remove(set(request_ids))
        self._ahead.drop(request_ids)
        self._leaving.forget(request_ids)
        for request_id in request_ids:
            if (expected := self._expected.pop(request_id, None)) is not None:
                self._scheduler.free(expected)

    def withdraw(self, request_ids: Sequence[str]) -> dict[str, list[int]]:
        """See ``Core.withdraw``."""
        wanted, known = set(request_ids), self._scheduler.requests
        self.abort(list(tokens := {r.id: r.generated for r in known if r.id in wanted}))
        return tokens

    # --- requests that are carried ------------------------------------------------------------

    def announce(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """See ``Core.announce``."""
        self._around.faults.strike(Seam.ANNOUNCE)
        self._cut()
        repeated = [(r, step.count - 1) for step in self._steps for r, _ in step.batch]
        return self._leaving.announce(request_ids, repeated, self._around.faults)

    def export(self, request_ids: Sequence[str]) -> list[CarriedRequest]:
        """See ``Core.export``.

        Raises:
            AssertionError: a step is in flight, or a copy into this core's blocks.
        """
        self._around.faults.strike(Seam.EXPORT)
        assert not self.in_flight, "a request was exported during a step"
        assert not self.copies, "a request was exported before its own copy had ended"
        return self._leaving.export(request_ids, self._around.faults)

    def keep(self, request_ids: Sequence[str]) -> None:
        """See ``Core.keep``."""
        self._around.faults.strike(Seam.KEEP)
        self._leaving.forget(request_ids)
        self._scheduler.unpark(request_ids)

    def expect(self, request_id: str, frames: Sequence[Any]) -> None:
        """See ``Core.expect``."""
        self._scheduler.check_is_new(request := self._request(frames))
        self._expected[request_id] = request

    def expect_prefix(self, name: str, frames: Sequence[Any]) -> None:
        """See ``Core.expect_prefix``."""
        asked = self._request(frames)
        if (request := self._latest.get(asked.id)) is None:
            request = asked
            self._latest.put(request.id, request, len(request.prompt))
        request.id = name
        self._expected[name] = request

    def allot(self, request: CarriedRequest) -> bool:
        """See ``Core.allot``."""
        self._around.faults.strike(Seam.ALLOT)
        if (expected := self._expected.get(request.request_id)) is None:
            return False
        beside = [each for each in self._expected.values() if each.blocks and each is not expected]
        return self._scheduler.allot(expected, request.tokens, request.length, beside)

    def tell_allotted(self, complete: Iterable[tuple[Unit, Sequence[str]]] = ()) -> None:
        """See ``Core.tell_allotted``: there are no runners."""

    def adopt(self, source: Unit, request: CarriedRequest, *, with_kv: bool) -> Adoption | None:
        """See ``Core.adopt``."""
        self._around.faults.strike(Seam.ADOPT)
        expected = self._expected[request.request_id]
        if not (computed := request.computed if with_kv else 0):
            self._scheduler.free(expected)
        if not self._scheduler.adopt(expected, request.tokens, computed):
            return None
        del self._expected[request.request_id]
        self._latest.put(expected.id, expected, len(expected.prompt))
        self._ahead.drop([request.request_id])
        if computed:
            expected.hits = 0 if request.tokens else request.cached
            begin = expected.written * self._limits.block_tokens
            self._write(expected)
            if computed > begin:
                self._copies.adopt(Arriving(expected, request, source, begin))
        self._cut()
        return Adoption()

    def send_first(self, carries: Any) -> bool:
        """See ``Core.send_first``: ``adopt`` takes no time."""
        return False

    def copy(self) -> None:
        """See ``Core.copy``."""
        self._around.faults.strike(Seam.COPY)
        self._copies.start(self._clock())

    def copied(self) -> list[Copied]:
        """See ``Core.copied``."""
        self._copies.end(self._clock())
        return self._copies.take()

    @property
    def copies(self) -> int:
        """See ``Core.copies``."""
        return len(self._copies)

    # --- blocks that are copied ahead ---------------------------------------------------------

    def pin(
        self, carry: int, request_ids: Sequence[str], prefixes: Prefixes = NO_PREFIXES
    ) -> list[CarriedRequest]:
        """See ``Core.pin``."""
        self._around.faults.strike(Seam.PIN)
        pinned, known = self._ahead.pin(carry, request_ids), self._scheduler.requests
        steps = (request in known for step in self._steps for request, _ in step.batch)
        # What a copy reads, or a step computes for nobody any more, may be cached already.
        if not prefixes.ids or self.copies or not all(steps):
            return pinned
        ended = {name: self._latest.get(request_id) for name, request_id in prefixes.ids.items()}
        return pinned + self._ahead.pin_cached(carry, ended, prefixes.room)

    def unpin(self, carry: int) -> bool:
        """See ``Core.unpin``."""
        self._around.faults.strike(Seam.UNPIN)
        self._ahead.unpin(carry)
        return True

    def reserve(
        self, carry: int, source: Unit, requests: Sequence[CarriedRequest]
    ) -> list[AheadRequest]:
        """See ``Core.reserve``."""
        self._around.faults.strike(Seam.RESERVE)
        known = self._expected
        expected = [(known[r.request_id], r) for r in requests if r.request_id in known]
        return self._ahead.reserve(carry, expected)

    def promise(self, carry: int, request_id: str) -> None:
        """See ``Core.promise``: nothing to do, ``adopt`` takes no time."""

    def settle(self, carry: int, *, copied: bool) -> bool:
        """See ``Core.settle``."""
        self._around.faults.strike(Seam.SETTLE)
        self._ahead.settle(carry, copied=copied)
        return True

    def copy_ahead(
        self, carry: int, source: Unit, target: Unit, requests: Sequence[AheadRequest]
    ) -> None:
        """See ``Core.copy_ahead``."""
        self._around.faults.strike(Seam.COPY_AHEAD)
        self._ahead.read(carry, source, target, requests, self._clock())

    def copied_ahead(self) -> list[tuple[int, Copied]]:
        """See ``Core.copied_ahead``."""
        return self._ahead.ended(self._clock())

    def _write(self, request: FakeRequest) -> None:
        """Let a request compute or read its tokens into the blocks that it has got."""
        memory, size = self._devices.memory, self._limits.block_tokens
        if request.shared and memory.knows(self.unit.engines):
            found = self._physical(request.blocks[: request.shared])
            if not memory.holds(request, request.shared * size, found):
                request.spoil()
        request.shared = 0
        if len(request.blocks) > request.written:
            new = self._physical(request.blocks[request.written :])
            memory.write(self.unit, request, request.written, new, size)
            request.written = len(request.blocks)

    def _physical(self, blocks: Sequence[int]) -> dict[int, list[int]]:
        """Return each member's own ids of the core's blocks."""
        raise NotImplementedError

    # --- blocks that are given up -------------------------------------------------------------

    def holders(self, beyond: int) -> list[str]:
        """See ``Core.holders``."""
        return [r.id for r in holders(self._scheduler, partial(self._is_beyond, beyond=beyond))]

    def _is_beyond(self, block: int, beyond: int) -> bool:
        """Return whether what backs a block of this core has an id above ``beyond``."""
        raise NotImplementedError

    def vacate(self, beyond: int, *, moves: bool) -> int:
        """See ``Core.vacate``."""
        is_given_up, memory = partial(self._is_beyond, beyond=beyond), self._devices.memory
        return vacate(self._scheduler, memory, self._physical, is_given_up, moves=moves)

    is_moving = False
    """See ``Core.is_moving``: a copy takes no time here."""

    # --- steps --------------------------------------------------------------------------------

    def dispatch(self) -> bool:
        """See ``Core.dispatch``."""
        if len(self._steps) >= self._depth:
            return False
        batch, crowded = self._scheduler.schedule(self._known_until)
        if not batch:
            return False
        # In a pipeline other requests' steps come between those of the same requests.
        count = 1 if crowded or self._depth > 1 else self._scheduler.run_length(batch)
        work = work_of_step((request.scheduled, share) for request, share in batch)
        mode = self.shift.mode(sum(tokens for _, tokens in batch))
        layout, mean = self.unit.layout, repeated(work, count).mean
        step = _Step(
            batch=batch,
            work=work,
            mode=mode,
            seconds=self._around.step_times(self.unit)(layout, mean, mode),
            count=count,
            hop=self._around.hop_times(layout, mean),
        )
        self._steps.append(step)
        self._devices.queue(self.unit, step, self._clock())
        for request, share in batch:
            request.in_flight += share
            self._write(request)
        return True

    def dispatch_ahead(self) -> bool:
        """See ``Core.dispatch_ahead``: never, as collecting a step takes no time here."""
        return False

    def pause(self) -> None:
        """See ``Core.pause``: a run of steps ends with the step that is computed now."""
        self._cut()

    def _cut(self) -> None:
        self._devices.cut(self.unit, self._clock())

    def collect(self) -> Collected | None:
        """See ``Core.collect``."""
        if not self._steps or self._clock() < self._steps[0].due:
            return None
        step = self._steps.popleft()
        if self._around.settings.asynchronous and self._depth == 1:
            self._known_until = step.due - step.seconds
        self._copies.end(self._clock())
        self._look_for_poison(step)
        finished: list[str] = []
        outputs = [
            CoreOutputs(client, [wire.encode_outputs(made, unit=self.unit, timestamp=step.due)])
            for client, made in self._compute(step, finished).items()
        ]
        if finished:
            self._scheduler.drop_ended()
        ended = EndedSteps(step.mode, repeated(step.work, step.count))
        return Collected(outputs, [ended], finished)

    def _look_for_poison(self, step: _Step) -> None:
        poison = self._around.settings.poison_token
        if poison is not None and any(poison in request.prompt for request, _ in step.batch):
            raise RunnerDied("died of a request on purpose")

    def _compute(self, step: _Step, finished: list[str]) -> dict[int, list[wire.Output]]:
        """Return a step's outputs by front end; add to ``finished`` the requests that end."""
        alive = {id(request) for request in self._scheduler.running}
        on_start = self._around.on_start
        outputs: dict[int, list[wire.Output]] = {}
        for request, computed in step.batch:
            if on_start is not None and request.is_waiting:
                on_start(request.id, step.start)
            request.is_waiting = False
            request.in_flight -= computed
            if id(request) not in alive:
                continue
            request.computed += computed
            request.is_unsure = False
            if request.computed == request.tokens:
                output = self._emit(request, step.count)
                outputs.setdefault(request.client, []).append(output)
                if output.finish_reason is not None:
                    finished.append(request.id)
        return outputs

    def _emit(self, request: FakeRequest, count: int) -> wire.Output:
        is_new, request.is_new = request.is_new, False
        first, length = not request.generated, request.tokens
        tokens = [request.generate() for _ in range(count)]
        request.computed += count - 1
        if self._around.faults.repeat_token and len(request.generated) == 2:
            tokens *= 2
        hits = request.hits or 0
        stats = wire.PrefillStats(length, length - hits, hits, hits) if is_new else None
        events, request.events = request.events, []
        return wire.Output(
            request.id,
            tokens,
            fake_logprobs.of_outputs(tokens, request.sampling),
            fake_logprobs.of_prompt(request.prompt, request.sampling) if first else None,
            finish_reason=wire.FinishReason.LENGTH if request.tokens_left <= 0 else None,
            events=events or None,
            trace_headers=request.headers,
            prefill_stats=stats,
        )

    # --- figures ------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """See ``Core.in_flight``."""
        return len(self._steps)

    @property
    def due(self) -> float | None:
        """Clock time at which the next step or copy is done; None: none is in flight."""
        ends = (self._steps[0].due if self._steps else None, self._copies.due, self._ahead.due)
        return min((due for due in ends if due is not None), default=None)

    @property
    def oldest_step(self) -> tuple[Mode, Work] | None:
        """See ``Core.oldest_step``."""
        return (self._steps[0].mode, self._steps[0].work) if self._steps else None

    @property
    def num_requests(self) -> int:
        """See ``Core.num_requests``."""
        return len(self._scheduler.requests)

    @property
    def load(self) -> CoreLoad:
        """See ``Core.load``."""
        return self._scheduler.load

    @property
    def held(self) -> list[int]:
        """The block ids that are held; those that several hold come several times."""
        held = self._scheduler.held + self._ahead.held
        return sum((request.blocks for request in self._expected.values()), held)

    def forget_prefixes(self) -> None:
        """Forget every cached prefix."""
        self._scheduler.pool.forget()

    def check_integrity(self) -> list[str]:
        """See ``Core.check_integrity``."""
        problems = self._ahead.check_integrity() + [
            f"core {self.unit.engines}: request {request.id} has blocks for nothing"
            for request in self._scheduler.requests
            if request.blocks and not request.computed
            if request not in self._scheduler.running
        ]
        if misheld := self._scheduler.pool.misheld(self.held):
            problems.append(f"core {self.unit.engines}: holders miscounted of {misheld[:8]}")
        return problems
