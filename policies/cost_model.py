"""How long a step takes under each layout: a roofline, corrected by what was measured.

The roofline is that of Seesaw's Appendix A. A step reads the weights once and computes its tokens
through them, whichever is slower; reads its context's KV and attends to it, whichever is slower;
and reduces its activations twice a layer among the engines of a group. Every term but the last
shrinks with the degree. A fixed overhead stands for what no roofline sees: launches, scheduling,
sampling.
"""

import enum
from dataclasses import dataclass, replace

SMOOTHING = 0.1
"""Weight of a new measurement in a correction."""
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
    """Of an all-reduce, per engine."""
    allreduce_seconds: float = 0.0
    """What an all-reduce of no bytes takes."""
    overhead_seconds: float = 0.0
    """What a step of no work takes."""


class StepKind(enum.StrEnum):
    """What steps are corrected apart: arithmetic and memory miss the roofline differently."""

    DECODE = "decode"
    """Steps that compute no prompt token."""
    PREFILL = "prefill"
    """All others."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step."""

    decodes: int = 0
    """Requests that get one more token."""
    context_tokens: int = 0
    """Tokens whose KV the decodes read, summed over them."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_context: int = 0
    """Mean number of tokens that a prompt token attends to."""

    @property
    def tokens(self) -> int:
        """Tokens that pass through the linear layers."""
        return self.decodes + self.prefill_tokens

    @property
    def kind(self) -> StepKind:
        """Which correction it takes."""
        return StepKind.PREFILL if self.prefill_tokens else StepKind.DECODE


@dataclass(frozen=True, slots=True)
class Correction:
    """How measured times of one kind of steps, of one degree, compare with the roofline."""

    degree: int
    kind: StepKind
    factor: float = 1.0
    """Measured over predicted."""
    error: float = 0.0
    """Smoothed relative error of the predictions, before each one corrected the next."""
    samples: int = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts step times; a new one comes of every measurement."""

    shape: ModelShape
    hardware: Hardware
    corrections: tuple[Correction, ...] = ()

    def correction(self, degree: int, kind: StepKind) -> Correction:
        """Return the correction of such steps; the neutral one before the first measurement."""
        for known in self.corrections:
            if known.degree == degree and known.kind is kind:
                return known
        return Correction(degree, kind)

    def step_seconds(self, degree: int, batch: Batch) -> float:
        """Return the predicted time of a step on a group of ``degree`` engines."""
        factor = self.correction(degree, batch.kind).factor
        return self.roofline_seconds(degree, batch) * factor

    def roofline_seconds(self, degree: int, batch: Batch) -> float:
        """Return the time before any correction (Seesaw, A.1, times the number of layers)."""
        shape, hardware = self.shape, self.hardware
        weights = shape.parameters * shape.weight_bytes
        linear = max(
            weights / hardware.memory_bytes_per_second,
            2 * shape.parameters * batch.tokens / hardware.flops_per_second,
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
        network = self._network_seconds(degree, batch.tokens)
        return linear / degree + attention + network + hardware.overhead_seconds

    def _network_seconds(self, degree: int, tokens: int) -> float:
        if degree == 1:
            return 0.0
        shape, hardware = self.shape, self.hardware
        moved = 2 * (degree - 1) / degree * tokens * shape.hidden * shape.activation_bytes
        reduce = hardware.allreduce_seconds + moved / hardware.link_bytes_per_second
        return 2 * shape.layers * reduce

    def observe(self, degree: int, batch: Batch, seconds: float) -> "CostModel":
        """Return the model corrected by a measured step.

        Raises:
            ValueError: ``seconds`` is not positive.
        """
        if seconds <= 0:
            raise ValueError(f"a step of {seconds} s cannot be")
        old = self.correction(degree, batch.kind)
        error = abs(self.step_seconds(degree, batch) - seconds) / seconds
        ratio = seconds / self.roofline_seconds(degree, batch)
        weight = max(SMOOTHING, 1 / (old.samples + 1))
        factor = old.factor + weight * (ratio - old.factor)
        new = replace(
            old,
            factor=min(MAX_CORRECTION, max(1 / MAX_CORRECTION, factor)),
            error=old.error + weight * (error - old.error),
            samples=old.samples + 1,
        )
        rest = tuple(c for c in self.corrections if (c.degree, c.kind) != (degree, batch.kind))
        return replace(self, corrections=(*rest, new))
