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

The host launches the exchanges of a step in SP one by one, without CUDA graphs. A layer takes the
host the same time for any number of tokens. Launches run ahead of the device, so over all layers
the longer of the two times counts. The overhead lies before the first and after the last layer and
is added to both. A step in TP above the largest CUDA graph also waits for its host, which is not
modelled. So ``shoal.policies.shift`` compares the modes by ``device_seconds``, without any host.
"""

import math
from dataclasses import dataclass, replace

from shoal.policies.values.batch import Batch, Mode, StepKind
from shoal.policies.values.layouts import Layout

SMOOTHING = 0.1
"""Weight of a new measurement in a correction."""
SPREAD = 0.1
"""Relative standard deviation of steps that is enough to tell a proportional error from a constant.
"""
MAX_CORRECTION = 10.0
"""Upper bound of the factor of a correction; its inverse is the lower bound. So a single absurd
measurement has little effect."""


OUTLIER = 1.5
"""Once enough steps are known, a measurement counts as at most this factor times the prediction, or
its inverse: the first step after a switch also waits for what its devices still compute."""
KNOWN = 20
"""Number of measurements after which predictions are that good."""


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
    peer_bytes_per_second: float = 390e9
    """Rate at which one engine reads the memory of another; the default is an H200's."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How measured times of one layout's steps, of one kind and mode, differ from the roofline.

    A line is fitted to them by least squares. A part of the error is proportional to the roofline,
    such as arithmetic below peak speed, and the rest is the same in every step, such as launches.
    Steps of about equal length cannot separate the two; until lengths differ, the error counts as
    constant.
    """

    layout: Layout
    kind: StepKind
    mode: Mode = Mode.TP
    error: float = 0.0
    """Smoothed relative error of the predictions, each made before its measurement was learned."""
    samples: int = 0
    roofline: float = 0.0
    """Smoothed seconds by the roofline."""
    missed: float = 0.0
    """Smoothed difference of the measured seconds and the roofline's."""
    variance: float = 0.0
    """Smoothed variance of the roofline's seconds."""
    covariance: float = 0.0
    """Smoothed covariance of the roofline's seconds and the difference."""

    def apply(self, roofline: float) -> float:
        """Return the corrected seconds of a step to which the roofline gives ``roofline``."""
        if not self.samples:
            return roofline
        doubt = (SPREAD * self.roofline) ** 2
        # A step of more work takes no less time, whatever a few measurements say.
        slope = max(-1.0, self.covariance / (self.variance + doubt))
        return _bounded(roofline + self.missed + slope * (roofline - self.roofline), roofline)

    def learn(self, roofline: float, seconds: float) -> "Correction":
        """Return the correction after one more measurement."""
        weight = max(SMOOTHING, 1 / (self.samples + 1))
        predicted = self.apply(roofline)
        error = abs(predicted - seconds) / seconds
        if self.samples >= KNOWN:
            seconds = min(OUTLIER * predicted, max(predicted / OUTLIER, seconds))
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
    """Predicts step times; every measurement makes a new one."""

    shape: ModelShape
    hardware: Hardware
    corrections: tuple[Correction, ...] = ()
    max_sp: int = 1
    """Largest degree of SP; a wider group combines SP with TP."""

    def correction(self, layout: Layout, kind: StepKind, mode: Mode = Mode.TP) -> Correction:
        """Return the correction of these steps; before any measurement it changes nothing."""
        for known in self.corrections:
            if (known.layout, known.kind, known.mode) == (layout, kind, mode):
                return known
        return Correction(layout, kind, mode)

    def step_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the predicted time of a step of a unit in this layout."""
        correction = self._nearest(layout, batch.kind, mode)
        return correction.apply(self.roofline_seconds(layout, batch, mode))

    def carry_seconds(self, tokens: float, links: int) -> float:
        """Return the predicted time in which the KV of requests is read from other engines.

        Args:
            tokens: tokens of all requests that are carried.
            links: pairs of engines that read at the same time.
        """
        size = tokens * self.shape.kv_bytes_per_token
        return size / (self.hardware.peer_bytes_per_second * links)

    def _nearest(self, layout: Layout, kind: StepKind, mode: Mode) -> Correction:
        """Return the correction of these steps, or of the most similar measured ones.

        Policies compare layouts. If only the running layout were corrected, the others would seem
        faster.
        """

        def distance(known: Correction) -> float:
            return (
                abs(math.log2(known.layout.world_size / layout.world_size))
                + (known.mode is not mode) / 2
            )

        same = [known for known in self.corrections if known.kind is kind]
        return min(same, key=distance, default=Correction(layout, kind, mode))

    def roofline_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the uncorrected time in seconds, at least the host's time if it runs in SP."""
        host = self._host_seconds(self._sp_degree(layout, mode))
        return max(self.device_seconds(layout, batch, mode), host) + self.hardware.overhead_seconds

    def device_seconds(self, layout: Layout, batch: Batch, mode: Mode = Mode.TP) -> float:
        """Return the uncorrected time of devices and links, in seconds.

        It includes neither host time nor overhead (Seesaw, A.1, times the number of layers).
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
        # A group with more members than KV heads holds copies of heads, so reading gets no faster.
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
        """Return the number of members among which a step's tokens are divided."""
        return min(layout.tp, self.max_sp) if mode is Mode.SP else 1

    def _host_seconds(self, sp: int) -> float:
        """Return the time in which the host launches the layers of a step in SP; 0 for TP."""
        return self.shape.layers * self.hardware.sp_layer_host_seconds if sp > 1 else 0.0

    def _reduce_seconds(self, tp: int, tokens: int) -> float:
        """Return the time of two all-reduces per layer, of the hidden states of ``tokens``."""
        if tp == 1:
            return 0.0
        shape, hardware = self.shape, self.hardware
        moved = 2 * (tp - 1) / tp * tokens * shape.hidden * shape.activation_bytes
        reduce = hardware.allreduce_seconds + moved / hardware.link_bytes_per_second
        return 2 * shape.layers * reduce

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
        old = self.correction(layout, batch.kind, mode)
        new = old.learn(self.roofline_seconds(layout, batch, mode), seconds)
        same = (layout, batch.kind, mode)
        rest = tuple(c for c in self.corrections if (c.layout, c.kind, c.mode) != same)
        return replace(self, corrections=(*rest, new))
