"""The work of one step, and how a unit executes it."""

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Mode(enum.StrEnum):
    """How a group executes one step, on the same KV cache either way."""

    TP = "tp"
    """Every member computes all tokens with its part of the weights. Single engines always do."""
    SP = "sp"
    """Every member computes its part of the tokens with all the weights, and its heads of attention
    (Arctic Ulysses; combined with TP where the group is wider than the SP degree)."""


class StepKind(enum.StrEnum):
    """Kinds of steps that are corrected separately, because their errors differ."""

    DECODE = "decode"
    """Steps that compute no prompt token."""
    PREFILL = "prefill"
    """Steps that compute prompt tokens."""


class PromptWork(NamedTuple):
    """What is to be computed of prompts."""

    tokens: int = 0
    pairs: int = 0
    """Tokens to which each of these attends, summed."""

    @classmethod
    def of(cls, prompt: int, new: int) -> "PromptWork":
        """Return the work of the last ``new`` tokens of a prompt."""
        return cls(new, new * (2 * prompt - new) // 2)

    def with_(self, more: "PromptWork") -> "PromptWork":
        """Return the work of both."""
        return PromptWork(self.tokens + more.tokens, self.pairs + more.pairs)


NO_PROMPTS = PromptWork()


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step."""

    decodes: int = 0
    """Requests that get one more token."""
    context_tokens: int = 0
    """Tokens whose KV the decodes read, summed over the decodes."""
    prefill_tokens: int = 0
    """Prompt tokens that are computed."""
    prefill_context: int = 0
    """Mean number of tokens that a prompt token attends to."""

    @property
    def tokens(self) -> int:
        """Tokens that pass through the linear layers."""
        return self.decodes + self.prefill_tokens

    @property
    def kind(self) -> StepKind:
        """The kind of step, which decides its correction."""
        return StepKind.PREFILL if self.prefill_tokens else StepKind.DECODE
