"""In which steps of a group each member computes whole experts (EP) and not shares of each (TP).

Both are views of the same weights, so a group may choose in every step. A member that has half of
the experts writes and sums half as many rows as one that has half of each expert. But if a step has
few tokens, most of the experts that they ask for may be one member's, which the others wait for.
"""

import math

import msgspec

FEWEST_PER_EXPERT = 4
"""With so many tokens for an expert on average, hardly any expert of any member has none."""
MOST_PER_EXPERT = 32
"""With more tokens than this, experts compute longer than their weights are read. Then a member
whose experts have more tokens than others' takes longer, and shares of all experts do not."""
SMALL_SHARE = 512
"""Shares of fewer inner features than this gain by whole experts. On an H200 half of an expert of
Qwen3-30B-A3B (384 features) did, with 64 and 256 tokens; half of Mixtral's (7,168) and of GLM-4.5
Air's (704) did not, nor did a quarter of Qwen3's, of four members
(``docs/benchmarks/qwen3-30b-a3b-1xh200.md``)."""


class WholeExperts(msgspec.Struct, frozen=True):
    """Steps by their number of tokens, padding included.

    The defaults are what a kernel's times on an H200 say, and stock vLLM's on two: by experts in 16
    bits a token took less time with 64 and 256 requests, and more with one; in FP8 it took more
    with any of these (``docs/benchmarks/qwen3-30b-a3b-2xh200.md``).
    """

    fewest: int = FEWEST_PER_EXPERT
    most: int | None = MOST_PER_EXPERT
    """None: any number."""
    automatic: bool = True
    """Whether both are numbers of tokens that an expert has on average, and not of a step's, in
    groups of two with small shares in 16 bits alone."""

    @property
    def always(self) -> bool:
        """Whether members compute whole experts in all steps."""
        return self.fewest == 0 and self.most is None

    def steps(
        self, experts: int, top_k: int, inner: int, members: int, largest: int, *, bits: int
    ) -> range:
        """Return the numbers of tokens of the steps in which members compute whole experts.

        The memory of a step is reserved as the largest step is tried, and whole experts have
        ``members`` times the inner size of shares. So where the largest step has shares, steps with
        whole experts are at least ``members`` times shorter.

        Args:
            experts: routed experts of a layer.
            top_k: how many of these a token goes to.
            inner: inner features of an expert.
            members: engines of the group that divide them.
            largest: most tokens of a step.
            bits: of each weight.
        """
        if self.automatic and (members > 2 or inner // members >= SMALL_SHARE or bits < 16):
            return range(0)
        scale = experts / top_k if self.automatic else 1.0
        most = largest if self.most is None else min(largest, math.floor(self.most * scale))
        if most < largest:
            most = min(most, largest // members)
        return range(math.ceil(self.fewest * scale), most + 1)


ALWAYS = WholeExperts(0, None, automatic=False)
"""In all steps."""


def parse(text: str) -> WholeExperts | None:
    """Return what ``never``, ``auto``, ``FROM`` or ``FROM-TO`` says; None: no step has whole ones.

    Raises:
        ValueError: it says something else.
    """
    if text in ("never", "auto"):
        return None if text == "never" else WholeExperts()
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"{text!r} is neither auto, never, FROM nor FROM-TO")
    if dash and int(last) < int(first):
        raise ValueError(f"{text!r} has no steps")
    return WholeExperts(int(first), int(last) if dash else None, automatic=False)
