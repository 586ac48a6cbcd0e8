"""A runner's part in changes of memory between weights and KV."""

from collections.abc import Callable

from shoal.policies.values.layouts import DP
from shoal.runtime.engine.kv.kv_lender import KvLender
from shoal.runtime.engine.runner.loading import LayoutLoader
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

    @property
    def _shared(self) -> SharedMlps:
        assert self._loader.shared is not None, "the engine shares no weights"
        return self._loader.shared

    @property
    def _lender(self) -> KvLender:
        assert self._loader.lender is not None, "the engine shares no weights"
        return self._loader.lender

    @property
    def shares(self) -> Shares:
        """What the engine says of the levels that it can have."""
        if self._loader.shared is None:
            return Shares()
        loan = self._lender.loan
        if loan is None:
            return Shares(fixed="the memory for KV is smaller than what whole weights need")
        all_blocks = int(self._loader.workers[DP].model_runner.kv_cache_config.num_blocks)
        # Without the null block.
        return Shares({1: loan.blocks - 1, self._share: all_blocks - 1})

    def fill(self, blocks: int) -> Callable[[], str]:
        """Let weights have the memory of blocks, whose contents nobody needs any more.

        Args:
            blocks: those with higher ids have been given up: at least as many as are lent.

        Returns:
            Copies what peers keep, and returns why the copies cannot be used; "": they can.
        """
        loan = self._lender.loan
        assert loan is not None, "the share level is fixed"
        assert blocks < loan.blocks, "weights would have the memory of blocks that are in use"
        copy = self._shared.fill_whole(self._lender.lent(self._loader.buffer.raw))

        def filled() -> str:
            try:
                copy()
            except (OSError, ValueError) as error:
                return str(error)
            return ""

        return filled

    def use(self, share: int) -> int:
        """Share weights with so many engines; return the engine's bytes of weights."""
        if share == 1:
            self._shared.be_whole()
        else:
            self._shared.be_shared()
        return self._loader.store.resident_bytes
