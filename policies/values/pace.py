"""How long the steps of one layout take, of one kind and in one mode, as a formula."""

from dataclasses import dataclass

from shoal.policies.values.layouts import Layout


@dataclass(frozen=True, slots=True)
class Pace:
    """The cost model's roofline with its numbers put in, which takes a microsecond to compute.

    Times are in seconds; ``CostModel`` says what they stand for.
    """

    members: int
    """Members among which a step's tokens are divided: the degree of SP."""
    weights: float
    """To read the weights that every token passes through."""
    token: float
    """Arithmetic of one of a member's tokens."""
    latency: float
    """Exchanges of no bytes."""
    moved: float
    """What the exchanges of one of a member's tokens add."""
    read: float
    """To read a token of context."""
    attend: float
    """Arithmetic of attention, for a pair of tokens."""
    host: float
    """Least time of the layers, on the host."""
    mixed_host: float
    """The same if requests decode beside prompts."""
    overhead: float
    request: float = 0.0
    """What the host does for each request that decodes."""
    experts: float = 0.0
    """To read all routed experts."""
    unread: float = 1.0
    """The share of the experts that one token does not choose. Tokens are taken to choose theirs
    independently, and each expert as often as others."""
    fetch: float = 0.0
    """To read the weights that other engines keep, while the step is computed."""
    hops: float = 0.0
    """The part of ``latency`` between stages of a pipeline, where no stage reads such weights."""
    hopped: float = 0.0
    """The same of ``moved``."""
    whole: float = 0.0
    """The share of the layers that the engine has whole, in a step that reads others. While these
    are computed, nothing is read, as slots have room for the next layer only."""
    slope: float = 1.0
    """The factor by which the computing is corrected."""
    offset: float = 0.0
    """What is added to it."""
    fetch_slope: float = 1.0
    """The factor by which a step is corrected that reads weights of others meanwhile."""
    fetch_offset: float = 0.0
    """What is added to it."""
    yielded: float = 1.0
    """Tokens that a decode gets of a step. If it is more than 1, ``token``, ``moved``, ``attend``
    and ``unread`` are of a decode with all that it checks."""
    most: float = 10.0
    """Largest factor by which the correction changes a step; its inverse is the smallest."""

    def device(self, tokens: float, context: float, pairs: float) -> float:
        """Return the uncorrected time of devices and links.

        Args:
            tokens: tokens that pass through the linear layers.
            context: tokens whose KV the decodes read.
            pairs: pairs of a token and one that it attends to.
        """
        computing = self._computing(tokens, context, pairs)
        return max(self.fetching(tokens) + self.whole * computing, computing)

    def fetching(self, tokens: float) -> float:
        """Return the least time of devices and links of a step that reads weights of others.

        It is 0 for one that reads none. What layers take that are ``whole`` is not in it.

        Args:
            tokens: see ``device``.
        """
        return self.fetch + self.hops + self.hopped * tokens if self.fetch else 0.0

    def _computing(self, tokens: float, context: float, pairs: float) -> float:
        own = -(-tokens // self.members)
        linear, attention = self.token * own, self.read * context
        arithmetic = self.attend * pairs
        weights = self.weights
        if self.experts:
            weights += self.experts * (1 - self.unread**own)
        return (
            (linear if linear > weights else weights)
            + (attention if attention > arithmetic else arithmetic)
            + self.latency
            + self.moved * own
        )

    def roofline(self, tokens: float, context: float, pairs: float, decodes: float) -> float:
        """Return the uncorrected time of a step.

        Args:
            tokens: see ``device``.
            context: see ``device``.
            pairs: see ``device``.
            decodes: requests that decode. They take time of the host.
        """
        return self._with_host(self.device(tokens, context, pairs), decodes)

    def _with_host(self, device: float, decodes: float) -> float:
        """Return the time of a step whose devices and links take so long."""
        launches = self.mixed_host if decodes else self.host
        host = self.overhead + self.request * decodes
        return (device if device > launches else launches) + host

    def computed(self, tokens: float, context: float, pairs: float, decodes: float) -> float:
        """Return the corrected time of a step that has all weights in its own memory."""
        roofline = self._with_host(self._computing(tokens, context, pairs), decodes)
        corrected = self.slope * roofline + self.offset
        return min(self.most * roofline, max(roofline / self.most, corrected))

    def overlapped(self, tokens: float, context: float, pairs: float, decodes: float) -> float:
        """Return the longer of the corrected computing and the uncorrected reading from others.

        The computing of the layers that are ``whole`` is added to the reading.
        """
        computed = self.computed(tokens, context, pairs, decodes)
        host = self.overhead + self.request * decodes
        of_whole = self.whole * max(0.0, computed - host)
        return max(computed, self.fetching(tokens) + of_whole + host)

    def hides(self, tokens: float) -> bool:
        """Return whether a step of so many tokens, without KV, computes as long as it reads."""
        return self.computed(tokens, 0, 0, 0) >= self.overlapped(tokens, 0, 0, 0)

    def step(self, tokens: float, context: float, pairs: float, decodes: float) -> float:
        """Return the time of a step for each token that a decode gets of it.

        The arguments are those of ``roofline``. A look ahead asks for this thousands of times. So
        what most models need is written out here, and gives what ``computed`` does, to the last
        bit.
        """
        if not self.fetch and not self.experts:
            own = -(-tokens // self.members)
            linear, weights = self.token * own, self.weights
            read, attend = self.read * context, self.attend * pairs
            device = (
                (linear if linear > weights else weights)
                + (read if read > attend else attend)
                + self.latency
                + self.moved * own
            )
            launches = self.mixed_host if decodes else self.host
            host = self.overhead + self.request * decodes
            roofline = (device if device > launches else launches) + host
            corrected = self.slope * roofline + self.offset
            least, most = roofline / self.most, self.most * roofline
            corrected = corrected if corrected > least else least
            return (corrected if corrected < most else most) / self.yielded
        if not self.fetch:
            return self.computed(tokens, context, pairs, decodes) / self.yielded
        both = self.overlapped(tokens, context, pairs, decodes)
        corrected = self.fetch_slope * both + self.fetch_offset
        return min(self.most * both, max(both / self.most, corrected)) / self.yielded


def stage_seconds(layout: Layout, seconds: float, hop: float) -> float:
    """Return the time of a step in one of its stages.

    Args:
        layout: the unit's.
        seconds: a step from its beginning to its end.
        hop: the part of it between two stages.
    """
    return (seconds - (layout.pp - 1) * hop) / layout.pp
