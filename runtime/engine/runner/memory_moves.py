"""A runner's part in changes of memory between weights and KV."""

from collections.abc import Callable

from shoal.policies.values.layouts import DP
from shoal.runtime.engine.kv.backing import KvBacking
from shoal.runtime.engine.runner.loading import LayoutLoader
from shoal.runtime.engine.weights.sharing.pages import HostPages
from shoal.runtime.engine.weights.sharing.shared_mlps import SharedMlps
from shoal.runtime.protocol.messages import Shares


class MemoryMoves:
    """Moves memory between the weights and the KV of one engine.

    Args:
        loader: the engine's workers, whose cores have started.
        share: how many engines share weights at the start (``NodeConfig.share_weights``).
    """

    def __init__(self, loader: LayoutLoader, share: int) -> None:
        self._loader, self._share = loader, share
        self._backing: KvBacking | None = None
        shared = loader.shared
        if shared is not None and not shared.whole.problem:
            buffer = loader.buffer
            self._backing = KvBacking(
                buffer.raw,
                buffer.memory.handle(buffer.raw)["file"],
                loader.workers[DP].model_runner.kv_cache_config,
                HostPages(),
            )

    @property
    def _shared(self) -> SharedMlps:
        assert self._loader.shared is not None, "the engine shares no weights"
        return self._loader.shared

    @property
    def shares(self) -> Shares:
        """What the engine says of the levels that it can have."""
        if self._loader.shared is None:
            return Shares()
        if self._backing is None:
            return Shares(fixed=self._shared.whole.problem)
        more = self._shared.whole.copied_bytes - self._shared.whole.slot_bytes
        blocks = self._backing.blocks_without(max(0, more)) - 1  # without the null block
        if blocks < 1:
            return Shares(fixed="the memory for KV is smaller than what whole weights need")
        return Shares({1: blocks, self._share: self._backing.num_blocks - 1})

    def fill(self, blocks: int) -> Callable[[], str]:
        """Give up the memory of blocks whose ids are above ``blocks``.

        Returns:
            Copies what peers keep, and returns why the copies cannot be used; "": they can.
        """
        assert self._backing is not None, "the share level is fixed"
        self._backing.keep(blocks + 1)
        return self._copy

    def _copy(self) -> str:
        try:
            self._shared.fill_whole()
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def use(self, share: int) -> int:
        """Share weights with so many engines; return the engine's bytes of weights."""
        assert self._backing is not None, "the share level is fixed"
        if share == 1:
            self._shared.be_whole()
        else:
            self._shared.be_shared()
            self._backing.keep_all()
        return self._loader.store.resident_bytes
