"""A runner's part in changes of memory between weights and KV."""

import logging
import time
from collections.abc import Callable

import torch
from vllm.platforms import current_platform

from shoal.policies.values.layouts import DP
from shoal.policies.values.level import WHOLE, Level
from shoal.runtime.clock import Clock
from shoal.runtime.engine.kv.kv_lender import KvLender
from shoal.runtime.engine.runner.loading import LayoutLoader
from shoal.runtime.engine.weights.sharing.shared_layers import SharedLayers
from shoal.runtime.protocol.messages import Shares

log = logging.getLogger("shoal.engine")


class MemoryMoves:
    """Moves memory between the weights and the KV of one engine.

    Args:
        engine: the engine.
        loader: its workers, whose cores have started.
        share: how many engines share weights at the start (``NodeConfig.share_weights``).
        clock: seconds.
    """

    def __init__(
        self, engine: int, loader: LayoutLoader, share: int, clock: Clock = time.monotonic
    ) -> None:
        self._engine, self._loader, self._share = engine, loader, share
        self._clock = clock

    @property
    def _shared(self) -> SharedLayers:
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
        blocks = {
            Level(self._share): self._loader.workers[DP].model_runner.kv_cache_config.num_blocks
        }
        for stages in (1, *self._shared.whole.stages):
            left = self._lender.blocks(stages)
            if left > 1:
                blocks[WHOLE if stages == 1 else Level(self._share, stages)] = left
        without_null = {level: int(left) - 1 for level, left in blocks.items()}
        return Shares(without_null, "the memory for KV is smaller than what these weights need")

    def fill(self, blocks: int, level: Level) -> Callable[[], str]:
        """Let weights have the memory of blocks, whose contents nobody needs any more.

        Args:
            blocks: those with higher ids have been given up: at least as many as are lent.
            level: says which weights.

        Returns:
            Copies what engines keep, and returns why the copies cannot be used; "": they can.
        """
        left = self._lender.blocks(level.stages)
        assert blocks < left, "weights would have the memory of blocks that are in use"
        lent = self._lender.lent(self._loader.buffer.raw, level.stages)
        copy = self._shared.fill_whole(lent, level.stages)

        def filled() -> str:
            try:
                done = copy()
            except (OSError, ValueError) as error:
                return str(error)
            log.info(
                "engine %d copied weights in %.3f s beside steps, %d layers that steps had streamed"
                " and %d from their engines, and compared them in %.3f s",
                self._engine,
                done.copying_seconds,
                done.streamed,
                done.fetched,
                done.comparing_seconds,
            )
            return ""

        return filled

    def use(self, level: Level) -> int:
        """Go on at another level of memory; return the engine's bytes of weights."""
        began = self._clock()
        if current_platform.is_cuda():
            torch.cuda.synchronize()  # as the exchange would: so each is timed by itself
        ended = self._clock()
        if level == Level(self._share):
            self._shared.be_shared()
        else:
            self._shared.be_whole()
        log.info(
            "engine %d exchanged the memory of weights in %.3f s, after it had waited %.3f s for "
            "steps in flight",
            self._engine,
            self._clock() - ended,
            ended - began,
        )
        return self._loader.store.resident_bytes
