"""A request inside a core of the fake engine."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from shoal.runtime.engine.fake.fake_tokens import digest_of, next_token
from shoal.runtime.protocol import wire


class FakeRequest:
    """A request inside a core. ``blocks`` is empty while it has no KV.

    Args:
        view: what the front end sent.
        prompt: its prompt's token ids.
        max_tokens: most output tokens, those included that other cores have generated.
        tokens: output tokens that other cores have generated.
    """

    def __init__(
        self,
        view: wire.RequestView,
        prompt: list[int],
        max_tokens: int,
        tokens: Sequence[int] = (),
    ) -> None:
        self.id = view.request_id
        self.sampling = view.sampling_params or wire.Sampling()
        self.client = view.client_index
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.generated: list[int] = []
        """All its output tokens."""
        self.tokens = len(prompt)
        """All its tokens, computed or not."""
        self.digest = digest_of(prompt)
        self.is_new = True
        """Whether this core has sent no output of it yet."""
        self.blocks: list[int] = []
        self.written = 0
        """How many of its blocks are known to hold its tokens."""
        self.computed = 0
        """Tokens whose KV is in its blocks."""
        self.in_flight = 0
        """Further tokens that steps in flight compute."""
        self.cached = 0
        """How many of its blocks are cached."""
        self.shared = 0
        """How many of its blocks were cached by others, as long as nobody has compared them."""
        self.is_unsure = False
        """Whether a copy or a step may still write what ``computed`` counts."""
        self.hits = 0 if tokens else None
        """How many of its tokens were cached when it was first scheduled, if that was here: only
        those of a prompt count (vLLM ``PrefillStats``)."""
        self.is_waiting = True
        """Whether no step has computed it yet, in any core."""
        self.arrival = view.arrival_time
        """When the front end got it."""
        self.patience = 0.0
        """How many seconds later it seems to have come, until it begins."""
        self.priority = view.priority
        self.came = 0.0
        """When it was queued; 0 if another core had computed it."""
        self.headers = view.headers
        self.events: list[wire.Event] = []
        """Events that no output has reported yet."""
        self._hashes: list[bytes] = []
        self._seed = view.cache_keys + "".join(image.identifier for image in view.features).encode()
        self.reads_cache = not self.sampling.skips_prefix_cache
        """Whether it may use what is cached."""
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add output tokens that other cores have generated."""
        self.generated += tokens
        self.tokens += len(tokens)
        self.digest = digest_of(tokens, self.digest)

    def spoil(self) -> None:
        """Let its next tokens be wrong, because its KV is not its own."""
        self.digest = digest_of([0], self.digest)

    def generate(self) -> int:
        """Return the next token."""
        token = next_token(self.digest)
        self.extend([token])
        return token

    def prefixes(self, block_tokens: int) -> list[bytes]:
        """Return the hashes of its full blocks, each of which is of all tokens up to its end.

        As in vLLM (``hash_block_tokens``), they also depend on what else decides about the KV.
        """
        while len(self._hashes) < self.tokens // block_tokens:
            start = len(self._hashes) * block_tokens
            content = array("I", self.first(start + block_tokens, start)).tobytes()
            before = self._hashes[-1] if self._hashes else self._seed
            self._hashes.append(blake2b(before + content, digest_size=16).digest())
        return self._hashes

    def first(self, end: int, start: int = 0) -> list[int]:
        """Return its tokens before ``end``, from ``start`` on."""
        prompt = len(self.prompt)
        if end <= prompt:
            return self.prompt[start:end]
        return self.prompt[start:] + self.generated[max(0, start - prompt) : end - prompt]

    @property
    def scheduled(self) -> int:
        """Tokens that are computed, or are in flight."""
        return self.computed + self.in_flight

    @property
    def tokens_left(self) -> int:
        """Tokens that the request may still generate."""
        return self.max_tokens - len(self.generated)

    @property
    def decodes(self) -> bool:
        """Whether its next step computes its last token and nothing else."""
        return self.computed > 0 and self.tokens - self.computed == 1
