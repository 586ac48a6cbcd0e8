"""How long a step takes under each layout: a roofline, corrected by what was measured.

The roofline is that of Seesaw's Appendix A. A step reads the weights once and computes its tokens
through them, whichever is slower; reads its context's KV and attends to it, whichever is slower;
and reduces its activations twice a layer among the engines of a group. Every term but the last
shrinks with the degree. A fixed overhead stands for what no roofline sees: launches, scheduling,
sampling.

In SP (Arctic Ulysses; Shift Parallelism, 2.4 and Table 2) a member computes its part of the tokens
with all the weights. So it reads more where a step has few tokens, and where it has many its share
of the arithmetic is that of TP; but what it exchanges, the heads of its own tokens, shrinks with
the degree, while an all-reduce carries all tokens through every member.

The host launches the exchanges of such a step one by one, without CUDA graphs, and takes as long
for a layer whatever the number of tokens. Launches run ahead of the device, so the longer of the
two counts, over all layers; the overhead lies before the first and after the last one, and is part
of both. A step in TP above the largest CUDA graph waits for its host too, which is not modelled: so
``shoal.policies.shift`` compares the modes by ``device_seconds``, which leaves out every host.
"""

import math
from dataclasses import dataclass, replace

from shoal.policies.values.batch import Batch, Mode, StepKind
from shoal.policies.values.layouts import Layout

SMOOTHING = 0.1
"""Weight of a new measurement in a correction."""
SPREAD = 0.1
"""Relative standard deviation from which on steps of one kind tell a part from a constant."""
MAX_CORRECTION = 10.0
"""Bound on a correction, and its inverse: one absurd measurement must not decide anything."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a decoder-only transformer decides its step times."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    """Of all linear layers, those that one token passes through."""
    weight_bytes: float = 2.0
    """Of one parameter."""
    kv_bytes: float = 2.0
    """Of one element of a key or a value."""
    activation_bytes: float = 2.0

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
    """Of an all-reduce, per engine; an all-to-all is taken to reach the same."""
    allreduce_seconds: float = 0.0
    """What an all-reduce, or all-to-all, of no bytes takes."""
    overhead_seconds: float = 0.0
    """What a step of no work takes."""
    sp_layer_host_seconds: float = 0.0
    """What one layer of a step by sequence takes of a member's host: no such step is faster."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How measured times of one kind and mode of steps, of a layout, compare with the roofline.

    A line through them, by least squares: some of what the roofline misses is a part of it, such as
    arithmetic that does not reach the peak, and some is the same in every step, such as launches.
    Steps that are all about equally long cannot tell; it is taken for the latter until they differ.
    """

    layout: Layout
    kind: StepKind
    mode: Mode = Mode.TP
    error: float = 0.0
    """Smoothed relative error of the predictions, before each one corrected the next."""
    samples: int = 0
    roofline: float = 0.0
    """Smoothed seconds by the roofline."""
    missed: float = 0.0
    """Smoothed seconds that were measured beyond those."""
    variance: float = 0.0
    """Of the former."""
    covariance: float = 0.0
    """Of the two."""

    def apply(self, roofline: float) -> float:
        """Return the seconds that a step takes which has so many by the roofline."""
        if not self.samples:
            return roofline
        doubt = (SPREAD * self.roofline) ** 2
        # A step of more work takes no less time, whatever a few measurements say.
        slope = max(-1.0, self.covariance / (self.variance + doubt))
        return _bounded(roofline + self.missed + slope * (roofline - self.roofline), roofline)

    def learn(self, roofline: float, seconds: float) -> "Correction":
        """Return it with one more measurement."""
        weight = max(SMOOTHING, 1 / (self.samples + 1))
        error = abs(self.apply(roofline) - seconds) / seconds
        missed = _bounded(seconds, roofline) - roofline
        off, beyond = roofline - self.roofline, missed - self.missed
        return replace(
            self,
            error=self.error + weight * (error - self.error),
            samples=self.samples + 1,
            roofline=self.roofline + weight * off,
            missed=self.missed + weight * beyond,
            variance=(1 - weight) * (self.variance + weight * off * off),
            covariance=(1 - weight) * (self.covariance + weight * off * beyond),
        )


def _bounded(seconds: float, roofline: float) -> float:
    return min(MAX_CORRECTION * roofline, max(roofline / MAX_CORRECTION, seconds))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts step times; a new one comes of every measurement."""

    shape: ModelShape
    hardware: Hardware
    corrections: tuple[Correction, ...] = ()
    max_sp: int = 1
    """Largest degree of SP: a wider group combines it with TP."""

    def correction(self, layout: Layout, kind: StepKind, mode: Mode = Mode.TP) -> Correction:
        """Return the correction of such steps; the neutral one before the first measurement."""
        for known in self.corrections:
            if (known.layout, known.kind, known.mode) == (layout, kind, mode):
                return known
        return Correction(layout, kind, mode)

    def step_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the predicted time of a step of a unit in this layout."""
        correction = self._nearest(layout, batch.kind, mode)
        return correction.apply(self.roofline_seconds(layout, batch, mode))

    def _nearest(self, layout: Layout, kind: StepKind, mode: Mode) -> Correction:
        """Return the correction of such steps; before any was measured, of the most similar ones.

        Layouts are compared: were only that corrected which runs, all others would seem faster.
        """

        def distance(known: Correction) -> float:
            return (
                abs(math.log2(known.layout.world_size / layout.world_size))
                + (known.mode is not mode) / 2
            )

        same = [known for known in self.corrections if known.kind is kind]
        return min(same, key=distance, default=Correction(layout, kind, mode))

    def roofline_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the time before any correction, in seconds: no less than a host in SP takes."""
        host = self._host_seconds(self._sp_degree(layout, mode))
        return max(self.device_seconds(layout, batch, mode), host) + self.hardware.overhead_seconds

    def device_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return what devices and links take, in seconds, before any correction.

        Without any host's time and the overhead (Seesaw, A.1, times the number of layers).
        """
        shape, hardware = self.shape, self.hardware
        sp = self._sp_degree(layout, mode)
        degree = layout.tp
        tp, tokens = degree // sp, -(-batch.tokens // sp)
        weights = shape.parameters * shape.weight_bytes
        linear = max(
            weights / hardware.memory_bytes_per_second,
            2 * shape.parameters * tokens / hardware.flops_per_second,
        )
        # A group wider than the KV heads holds copies of them: reading gets no faster.
        kv_share = min(degree, shape.kv_heads)
        read = batch.context_tokens * shape.kv_bytes_per_token
        pairs = batch.context_tokens + batch.prefill_tokens * batch.prefill_context
        attend = 4 * shape.layers * shape.heads * shape.head_dim * pairs
        attention = max(
            read / kv_share / hardware.memory_bytes_per_second,
            attend / degree / hardware.flops_per_second,
        )
        network = self._reduce_seconds(tp, tokens) + self._exchange_seconds(sp, tp, tokens)
        return linear / tp + attention + network

    def _sp_degree(self, layout: Layout, mode: Mode) -> int:
        """Return among how many members such a step's tokens are divided."""
        return min(layout.tp, self.max_sp) if mode is Mode.SP else 1

    def _host_seconds(self, sp: int) -> float:
        """Return the time in which the host launches the layers of a step by sequence."""
        return self.shape.layers * self.hardware.sp_layer_host_seconds if sp > 1 else 0.0

    def _reduce_seconds(self, tp: int, tokens: int) -> float:
        """Return the time of two all-reduces a layer of so many tokens' hidden states."""
        if tp == 1:
            return 0.0
        shape, hardware = self.shape, self.hardware
        moved = 2 * (tp - 1) / tp * tokens * shape.hidden * shape.activation_bytes
        reduce = hardware.allreduce_seconds + moved / hardware.link_bytes_per_second
        return 2 * shape.layers * reduce

    def _exchange_seconds(self, sp: int, tp: int, tokens: int) -> float:
        """Return the time of two all-to-alls a layer: of queries, keys and values; of the outputs.

        ``tokens`` are one member's. Every member gets a KV head, if need be a copy.
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
        old = self.correction(layout, batch.kind, mode)
        new = old.learn(self.roofline_seconds(layout, batch, mode), seconds)
        same = (layout, batch.kind, mode)
        rest = tuple(c for c in self.corrections if (c.layout, c.kind, c.mode) != same)
        return replace(self, corrections=(*rest, new))
