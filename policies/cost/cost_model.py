"""How long a step takes in each layout: a roofline, corrected by measured steps.

The roofline is that of Seesaw's Appendix A. A step has three parts. It reads the weights once and
computes its tokens with them, and the slower of the two counts. It reads the KV of its context and
attends to it, and again the slower counts. It reduces its activations twice a layer among the
engines of a group. The first two parts shrink with the degree. A fixed overhead stands for what no
roofline sees: launches, scheduling and sampling.

In SP (Arctic Ulysses; Shift Parallelism, 2.4 and Table 2) a member computes its part of the tokens
with all the weights. So it reads more, which counts if a step has few tokens. Its share of the
arithmetic is the same as in TP. It exchanges only the heads of its own tokens, so this data shrinks
with the degree, while an all-reduce carries all tokens through every member.

Where engines share weights (SiDP, 4.2), a member reads from others, during the step, what it does
not keep of the MLPs that it computes. The step takes the longer of this and of all the above. So
DP is slow for steps of few tokens, and as fast as ever for steps of many (``hidden_above``). Steps
that read weights have corrections of their own, on top of those of the computing: they say little
of the same layout with whole weights. ``Level.whole_share`` says what whole stages change.

In a pipeline (PP) a step goes through the stages one after the other, so all layers count, as in DP
or in the TP of a stage. The same holds for what stages read from others: each reads for its own
layers, while it computes them. Between two stages a step sends the hidden states of its tokens
once. Meanwhile no stage computes or reads for this step, so this time is added to both. The time
of a step is that from its beginning to its end. As many steps as there are stages are under way at
once, so steps end more often than that. How often depends on how many are under way, so no
correction learns from the measured time between the ends of two steps.

The host launches the exchanges of a step in SP one by one, without CUDA graphs. A layer takes the
host the same time for any number of tokens. Launches run ahead of the device, so over all layers
the longer of the two times counts. The overhead lies before the first and after the last layer and
is added to both. A group's step in TP that computes prompts while requests decode waits for its
host, too: vLLM replays its graphs piece by piece, and launches attention between them. Above the
largest graph it waits longer, which is not modelled. So ``shoal.policies.shift`` compares the
modes by ``device_seconds``, without any host.

Where the node speculates, each decode of a step computes the tokens that it checks, too, and gets
the accepted ones (``speculation``). Policies count the tokens that requests still want. So
``step_seconds`` and ``Pace.step`` are times for each token of a decode: a step's time divided by
the tokens that it yields. Corrections learn from whole steps.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shoal.policies.cost.correction import KNOWN, MAX_CORRECTION, Correction
from shoal.policies.cost.same import Same
from shoal.policies.values.batch import Batch, Mode, StepKind
from shoal.policies.values.layouts import Layout
from shoal.policies.values.level import WHOLE, Level
from shoal.policies.values.pace import Pace
from shoal.policies.values.speculation import NOT_SEEN, Speculation

MOST_TOKENS = 1 << 20
"""No step has so many."""
LEAST_COPY_BYTES = 16 << 20
"""Bytes of a copy from which on its rate is learned."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a decoder-only transformer that decide its step times."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    """Parameters of all linear layers that one token passes through."""
    weight_bytes: float = 2.0
    """Bytes of one parameter."""
    kv_bytes: float = 2.0
    """Bytes of one element of a key or a value."""
    activation_bytes: float = 2.0
    experts: int = 0
    """Routed experts of a layer; 0: the model has none."""
    experts_per_token: int = 0
    expert_parameters: float = 0.0
    """Parameters of all routed experts of all layers, which no token passes through all of."""
    expert_bytes: float = 0.0
    """Bytes of one of these, scales included; 0: as many as of every other parameter."""
    sharable_bytes: float = 0.0
    """Bytes of the MLPs and experts, and of attention's projections where engines share these, too
    (``CostModel.share_weights``)."""

    @property
    def expert_share(self) -> float:
        """The share of the routed experts that a token passes through; 0 if there are none."""
        return self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def shared_parameters(self) -> float:
        """Parameters that every token passes through."""
        return self.parameters - self.expert_share * self.expert_parameters

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes


@dataclass(frozen=True, slots=True)
class Hardware:
    """One engine's device and its links."""

    memory_bytes_per_second: float
    flops_per_second: float
    link_bytes_per_second: float
    """Rate of an all-reduce per engine; an all-to-all is assumed to reach the same rate."""
    allreduce_seconds: float = 0.0
    """Time of an all-reduce or all-to-all of zero bytes."""
    overhead_seconds: float = 0.0
    """Time of a step without work."""
    sp_layer_host_seconds: float = 0.0
    """Host time of one layer of a step in SP; a step's layers take at least this time each."""
    tp_layer_host_seconds: float = 0.0
    """The same of a group's step in TP that computes prompts while requests decode, if such steps
    are not launched at once (0 if they are)."""
    peer_bytes_per_second: float = 390e9
    """Rate at which one engine reads the memory of another; the default is an H200's."""
    fetch_bytes_per_second: float | None = None
    """Rate at which copy engines read weights from the memory of another engine, beside what is
    computed; None: ``peer_bytes_per_second``."""
    kv_bytes_per_second: float | None = None
    """Rate at which attention reads keys and values; None: as fast as weights are read."""
    attention_flops_per_second: float | None = None
    """Rate of attention's arithmetic; None: as that of linear layers."""
    request_seconds: float = 0.0
    """What each request that decodes adds to a step."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts step times; every measurement makes a new one."""

    shape: ModelShape
    hardware: Hardware
    corrections: tuple[Correction, ...] = ()
    max_sp: int = 1
    """Largest degree of SP; a wider group combines SP with TP."""
    share_weights: int = 1
    """How many engines share weights. Each keeps one part of so many."""
    whole_stages: int = 1
    """Stages of the pipeline whose layers engines have whole beside it (``Level.stages``)."""
    speculation: Speculation = NOT_SEEN
    """What decodes check and accept."""

    def correction(self, layout: Layout, kind: StepKind, mode: Mode = Mode.TP) -> Correction:
        """Return the correction of these steps; before any measurement it changes nothing."""
        new = Correction(layout, kind, mode, streams=self.streams(layout, mode))
        return next((known for known in self.corrections if _steps(known) == _steps(new)), new)

    @property
    def level(self) -> Level:
        """The level of memory that it is of."""
        return Level(self.share_weights, self.whole_stages)

    def at(self, level: Level) -> "CostModel":
        """Return the model of the node at another level of memory."""
        return replace(self, share_weights=level.share, whole_stages=level.stages)

    def fetch_seconds(self, layout: Layout, mode: Mode = Mode.TP) -> float:
        """Return the time in which a step reads what other engines keep of its weights.

        What is shared is divided among the members that do not divide tokens. What an engine keeps
        lies within its member's part. Layers that it has whole are not read.
        """
        degree = layout.tp // self._sp_degree(layout, mode)
        missing = max(0.0, 1 / degree - 1 / self.share_weights)
        missing *= 1 - self.level.whole_share(layout)
        size = missing * self.shape.sharable_bytes
        hardware = self.hardware
        return size / (hardware.fetch_bytes_per_second or hardware.peer_bytes_per_second)

    def streams(self, layout: Layout, mode: Mode = Mode.TP) -> bool:
        """Return whether a step reads weights from other engines."""
        return self.fetch_seconds(layout, mode) > 0

    def hidden_above(self, layout: Layout) -> int:
        """Return from how many tokens on a step in TP computes longer than it reads from others.

        This is the threshold B_th of SiDP (4.3). The KV of a context, which also takes time, is
        left out. Where nothing is read from others it is 0.
        """
        pace = self.pace(layout, StepKind.PREFILL)
        if not pace.fetch:
            return 0
        return bisect_left(range(MOST_TOKENS), True, key=pace.hides)

    def step_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the predicted time in which a step's decodes get one token each.

        That is the time of the step, but where the node speculates. There a step of decodes yields
        several tokens each, which take an equal part of it. A step that also computes prompts
        counts without the part in which its decodes get more than one.
        """
        seconds = self.pace(layout, batch.kind, mode).step(*self._work(batch))
        if batch.kind is StepKind.DECODE or not (batch.decodes and self.speculation.accepted):
            return seconds
        decodes = replace(batch, prefill_tokens=0, prefill_context=0)
        more = self.speculation.accepted * self.step_seconds(layout, decodes, mode)
        return max(seconds / self.speculation.yielded, seconds - more)

    def whole_step_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the predicted time of a step, however many tokens it yields."""
        pace = self.pace(layout, batch.kind, mode)
        return pace.step(*self._work(batch)) * pace.yielded

    def _work(self, batch: Batch) -> tuple[float, int, float, int]:
        """Return the arguments of ``Pace.step`` for a step; the first three are ``Pace.device``'s.

        The pace of decodes knows what each of them checks; that of prompts does not know which
        tokens are of decodes.
        """
        more = 0.0 if batch.kind is StepKind.DECODE else self.speculation.drafts
        context = batch.context_tokens
        pairs = context * (1 + more) + batch.prefill_tokens * batch.prefill_context
        return batch.tokens + batch.decodes * more, context, pairs, batch.decodes

    def hop_seconds(self, layout: Layout, batch: Batch) -> float:
        """Return the time in which a step's hidden states go from one stage to the next.

        vLLM sends two tensors, hidden states and residuals. Each member of a stage sends its share
        of them, and the next stage gathers them (``GroupCoordinator.isend_tensor_dict``), which
        counts as if every link carried all of it. In a layout without stages it is 0.
        """
        return self._hop_seconds(batch.tokens) if layout.pp > 1 else 0.0

    def pace(self, layout: Layout, kind: StepKind, mode: Mode = Mode.TP) -> Pace:
        """Return the predicted times of all steps of one layout, kind and mode."""
        return _known_pace(Same(self), layout, kind, mode)

    def _corrected_pace(self, layout: Layout, kind: StepKind, mode: Mode) -> Pace:
        slope, offset = self._nearest(Correction(layout, kind, mode)).line
        pace = replace(self._pace(layout, mode, kind), slope=slope, offset=offset)
        if not pace.fetch:
            return pace
        slope, offset = self._nearest(Correction(layout, kind, mode, streams=True)).line
        return replace(pace, fetch_slope=slope, fetch_offset=offset)

    def carry_seconds(self, tokens: float, links: int) -> float:
        """Return the predicted time in which the KV of requests is read from other engines.

        Args:
            tokens: tokens of all requests that are carried.
            links: pairs of engines that read at the same time.
        """
        size = tokens * self.shape.kv_bytes_per_token
        return size / (self.hardware.peer_bytes_per_second * links)

    def observe_carry(self, size: float, seconds: float, links: int) -> "CostModel":
        """Return the model with a rate of carries that a measured one corrects.

        Args:
            size: bytes that were read. Little says nothing, because messages take time, too.
            seconds: what that took the slowest engine.
            links: see ``carry_seconds``.
        """
        if size < LEAST_COPY_BYTES or seconds <= 0:
            return self
        before = self.hardware.peer_bytes_per_second
        rate = math.sqrt(before * size / (seconds * links))
        # KV may go through the host. Weights never do, so this says nothing of them.
        fetch = self.hardware.fetch_bytes_per_second or before
        known = replace(self.hardware, peer_bytes_per_second=rate, fetch_bytes_per_second=fetch)
        return replace(self, hardware=known)

    def _nearest(self, new: Correction, samples: int = 1) -> Correction:
        """Return the correction of these steps, or of the most similar ones measured so often.

        Policies compare layouts. If only the running layout were corrected, the others would seem
        faster.
        """

        def distance(known: Correction) -> float:
            return (
                abs(math.log2(known.layout.world_size / new.layout.world_size))
                + (known.mode is not new.mode) / 2
            )

        alike = [
            known
            for known in self.corrections
            if (known.kind, known.streams) == (new.kind, new.streams) and known.samples >= samples
        ]
        return min(alike, key=distance, default=new)

    def roofline_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the uncorrected time in seconds, at least the host's time if it runs in SP."""
        return self._pace(layout, mode, batch.kind).roofline(*self._work(batch))

    def device_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the uncorrected time of devices and links, in seconds.

        It includes neither host time nor overhead (Seesaw, A.1, times the number of layers).
        """
        return self._pace(layout, mode, batch.kind).device(*self._work(batch)[:3])

    def _pace(self, layout: Layout, mode: Mode, kind: StepKind) -> Pace:
        shape, hardware = self.shape, self.hardware
        sp, degree = self._sp_degree(layout, mode), layout.tp
        tp = degree // sp
        # A group with more members than KV heads holds copies of heads, so reading gets no faster.
        kv_share = min(degree, shape.kv_heads)
        attend = 4 * shape.layers * shape.heads * shape.head_dim
        parameter = shape.weight_bytes / hardware.memory_bytes_per_second
        of_expert = (shape.expert_bytes or shape.weight_bytes) / hardware.memory_bytes_per_second
        kv_rate = hardware.kv_bytes_per_second or hardware.memory_bytes_per_second
        attention_rate = hardware.attention_flops_per_second or hardware.flops_per_second
        hops, hop = ((layout.pp - 1) * self._hop_seconds(tokens) for tokens in (0, 1))
        empty, one = (
            self._reduce_seconds(tp, n) + self._exchange_seconds(sp, tp, n) for n in (0, 1)
        )
        empty, one = empty + hops, one + hop
        in_sp = shape.layers * hardware.sp_layer_host_seconds if sp > 1 else 0.0
        in_tp = shape.layers * hardware.tp_layer_host_seconds
        decodes = kind is StepKind.DECODE
        checked = self.speculation.checked if decodes else 1.0
        return Pace(
            members=sp,
            weights=shape.shared_parameters * parameter / tp,
            experts=shape.expert_parameters * of_expert / tp,
            unread=(1 - shape.expert_share) ** checked,
            token=checked * 2 * shape.parameters / hardware.flops_per_second / tp,
            latency=empty,
            moved=checked * (one - empty),
            read=shape.kv_bytes_per_token / kv_share / kv_rate,
            attend=checked * attend / degree / attention_rate,
            host=in_sp,
            mixed_host=in_tp if sp == 1 and degree > 1 and not decodes else in_sp,
            fetch=self.fetch_seconds(layout, mode),
            whole=self.level.whole_share(layout) if self.streams(layout, mode) else 0.0,
            hops=hops,
            hopped=checked * (hop - hops),
            overhead=hardware.overhead_seconds,
            request=hardware.request_seconds,
            yielded=self.speculation.yielded if decodes else 1.0,
            most=MAX_CORRECTION,
        )

    def _sp_degree(self, layout: Layout, mode: Mode) -> int:
        """Return the number of members among which a step's tokens are divided."""
        return min(layout.tp, self.max_sp) if mode is Mode.SP else 1

    def _reduce_seconds(self, tp: int, tokens: int) -> float:
        """Return the time of two all-reduces per layer, of the hidden states of ``tokens``."""
        if tp == 1:
            return 0.0
        shape, hardware = self.shape, self.hardware
        moved = 2 * (tp - 1) / tp * tokens * shape.hidden * shape.activation_bytes
        reduce = hardware.allreduce_seconds + moved / hardware.link_bytes_per_second
        return 2 * shape.layers * reduce

    def _hop_seconds(self, tokens: int) -> float:
        moved = 2 * tokens * self.shape.hidden * self.shape.activation_bytes
        return self.hardware.allreduce_seconds + moved / self.hardware.link_bytes_per_second

    def _exchange_seconds(self, sp: int, tp: int, tokens: int) -> float:
        """Return the time of two all-to-alls per layer: of queries, keys and values; of outputs.

        ``tokens`` are one member's. Every member gets a KV head, which may be a copy.
        """
        if sp == 1:
            return 0.0
        shape, hardware = self.shape, self.hardware
        heads = 2 * (shape.heads + max(shape.kv_heads, sp * tp)) / tp
        moved = (sp - 1) / sp * tokens * heads * shape.head_dim * shape.activation_bytes
        latency = 2 * hardware.allreduce_seconds
        return shape.layers * (latency + moved / hardware.link_bytes_per_second)

    def observe(
        self, layout: Layout, batch: Batch, seconds: float, mode: Mode = Mode.TP
    ) -> "CostModel":
        """Return the model corrected by a measured step.

        Raises:
            ValueError: ``seconds`` is not positive.
        """
        if seconds <= 0:
            raise ValueError(f"a step of {seconds} s cannot be")
        if layout.pp > 1:
            return self  # steps overlap: this is no step's time
        old = self.correction(layout, batch.kind, mode)
        roofline = self._uncorrected(layout, batch, mode)
        known = self._nearest(old, KNOWN) if batch.kind is StepKind.PREFILL else old
        expected = known.apply(roofline) if known.samples >= KNOWN else None
        return self._with(old.learn(roofline, seconds, expected))

    def fit(
        self, layout: Layout, mode: Mode, kind: StepKind, measured: Sequence[tuple[Batch, float]]
    ) -> "CostModel":
        """Return the model with these steps' correction anew, from steps of known work.

        Steps that hide what they read from other engines say what computing takes, too, if their
        lengths differ. Other layouts' steps would say it worse: in TP only short ones may have been
        measured.

        Args:
            layout: the layout of the steps.
            mode: their mode.
            kind: their kind.
            measured: the work of each and its seconds; at least one.
        """
        new, known = Correction(layout, kind, mode, streams=self.streams(layout, mode)), self
        hiding = self._hiding(layout, mode, measured) if new.streams else []
        lengths = [computing for computing, _ in hiding]
        if hiding and max(lengths) > 2 * min(lengths):
            known = self._with(replace(new, streams=False).fit(hiding))
        pairs = [(known._uncorrected(layout, batch, mode), seconds) for batch, seconds in measured]
        return known._with(new.fit(pairs))

    def _hiding(
        self, layout: Layout, mode: Mode, measured: Sequence[tuple[Batch, float]]
    ) -> list[tuple[float, float]]:
        """Return the roofline and the measured seconds of steps that compute longer than they read.

        These times are in seconds. The roofline is that of steps which read nothing from others.
        """
        whole = self.at(WHOLE)
        pairs = [(whole.roofline_seconds(layout, b, mode), b, seconds) for b, seconds in measured]
        return [
            (computing, seconds)
            for computing, batch, seconds in pairs
            if computing >= self.roofline_seconds(layout, batch, mode)
        ]

    def _uncorrected(self, layout: Layout, batch: Batch, mode: Mode) -> float:
        """Return the time that the correction of these steps changes."""
        if self.streams(layout, mode):
            return self.pace(layout, batch.kind, mode).overlapped(*self._work(batch))
        return self.roofline_seconds(layout, batch, mode)

    def _with(self, new: Correction) -> "CostModel":
        rest = tuple(known for known in self.corrections if _steps(known) != _steps(new))
        return replace(self, corrections=(*rest, new))


def _steps(correction: Correction) -> tuple[Layout, StepKind, Mode, bool]:
    """Return which steps a correction is of."""
    return correction.layout, correction.kind, correction.mode, correction.streams


@lru_cache(1024)
def _known_pace(model: Same[CostModel], layout: Layout, kind: StepKind, mode: Mode) -> Pace:
    """Return ``CostModel.pace``: to find it takes far longer than to compute one step by it."""
    return model.of._corrected_pace(layout, kind, mode)
