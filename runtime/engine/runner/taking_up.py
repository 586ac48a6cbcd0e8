"""What a runner does with requests that come to its unit from other engines."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from shoal.policies.values.layouts import DP, Unit
from shoal.runtime.config import CarryPath, NodeConfig
from shoal.runtime.engine.groups.peer_memory import NotSharedError
from shoal.runtime.engine.groups.rendezvous import LOAD_SECONDS
from shoal.runtime.engine.kv.host_copy import HostCopier
from shoal.runtime.engine.kv.kv_memory import HeldBuffer, HostMemory
from shoal.runtime.engine.kv.kv_pages import KvPages
from shoal.runtime.engine.kv.kv_reader import KvReader, Plan
from shoal.runtime.engine.kv.peer_buffers import PeerBuffers
from shoal.runtime.engine.kv.portions import Copier
from shoal.runtime.engine.kv.staged_reader import Lane, StagedReader
from shoal.runtime.engine.kv.staging_memory import Pins, pins_of
from shoal.runtime.engine.kv.staging_server import StagingServer, address_of
from shoal.runtime.engine.kv.tier_memory import Tiers
from shoal.runtime.engine.kv.vllm_pages import element_order, pages_of
from shoal.runtime.engine.layouts.layout_worker import LayoutWorker
from shoal.runtime.engine.link.instructions import Arrival, Carry, Copied, CopyAhead, Foresee
from shoal.runtime.engine.runner.arrivals import introduce
from shoal.runtime.engine.runner.loading import LayoutLoader

log = logging.getLogger("shoal.engine")


def reaches(path: CarryPath, device: torch.device, engine: int) -> bool:
    """Return whether a device can read the memory of another engine's.

    Args:
        path: the node's ``carry_path``.
        device: the device.
        engine: the other engine, whose device has its number.
    """
    if path is CarryPath.HOST:
        return False
    return device.type == "cpu" or bool(torch.cuda.can_device_access_peer(device, engine))


class TakingUp:
    """Takes up requests of other engines on one runner.

    Args:
        node: the node's configuration.
        engine: this runner's engine.
        loader: its workers; the cores of all that it has loaded have started.
    """

    def __init__(self, node: NodeConfig, engine: int, loader: LayoutLoader) -> None:
        self._node, self._engine = node, engine
        self._problem = ""
        self._copier: Copier | None = None
        self._reader: KvReader | None = None
        self._tiers: Tiers | None = None
        self._foreseen: dict[tuple[Unit, Unit], tuple[int, list[Arrival], Plan]] = {}
        """By the unit that takes requests, and the one that has them: what is to be read."""
        self._directory = Path(node.runtime_dir)
        self._peers = PeerBuffers(
            self._directory, engine, loader.buffer.memory, settle=self._settle
        )
        try:
            self._reader = self._make_reader(loader)
        except NotSharedError as error:
            self._problem = str(error)
        # If others cannot map the buffer, they hear why, and read it through the host.
        with suppress(NotSharedError):
            self._peers.announce(loader.buffer.raw)

    def _make_reader(self, loader: LayoutLoader) -> KvReader:
        model_runner, raw = loader.workers[DP].model_runner, loader.buffer.raw
        own, pages = HeldBuffer(raw), pages_of(model_runner)
        if raw.is_cuda:
            from shoal.runtime.engine.kv.device_copy import DeviceCopier  # imports Triton

            copier: Copier = DeviceCopier(own, pages)
        else:
            copier = HostCopier(partial(element_order, model_runner))
        self._copier, pins = copier, pins_of(raw.device)
        self._tiers = self._make_tiers(pages, pins)
        memory = HostMemory(f"{self._directory.name}-staging")
        address = address_of(self._directory, self._engine)
        StagingServer(address, pages, own, copier, memory, pins)
        self._reaches = partial(reaches, self._node.carry_path, raw.device)
        lane = partial(Lane, self._directory, pages, own, memory, pins)
        self._staged = StagedReader(lane, self._reaches)
        return KvReader(
            self._engine,
            self._node.max_sp,
            pages,
            own,
            self._peers,
            copier,
            self._staged,
            self._tiers,
        )

    def _make_tiers(self, pages: Sequence[KvPages], pins: Pins) -> Tiers | None:
        if not self._node.tier_bytes:
            return None
        began = time.monotonic()
        size = self._node.tier_bytes
        try:
            tiers = Tiers(self._directory, self._engine, size, pages, pins, self._settle)
        except NotSharedError as error:
            log.warning("engine %d has no KV in the host's memory: %s", self._engine, error)
            return None
        took = time.monotonic() - began
        log.info("%d KV blocks in the host's memory, pinned in %.1f s", tiers.blocks, took)
        return tiers

    def tier_blocks(self) -> int:
        """Return the blocks of this engine's tier; 0: it has none, or cannot read another one's.

        Waits until all engines of the node have a tier.
        """
        if self._tiers is None:
            return 0
        problem = self._tiers.open_all(self._node.engines, LOAD_SECONDS)
        if problem:
            log.warning("no KV goes to the host's memory: %s", problem)
        return 0 if problem else self._tiers.blocks

    def _settle(self) -> None:
        if self._copier is not None:
            self._copier.settle()

    def problem(self) -> str:
        """Return why the KV of other engines cannot be read, in one line; "" if it can be.

        Waits until all engines of the node have a KV cache.
        """
        if not self._problem:
            self._problem = self._open_all()
        if self._problem:
            log.warning("requests cannot take their KV to another engine: %s", self._problem)
        return self._problem

    def _open_all(self) -> str:
        unmapped = self._peers.open_all(self._node.engines, LOAD_SECONDS, reaches=self._reaches)
        for engine, reason in unmapped.items():
            try:
                self._staged.connect(engine)
            except NotSharedError as error:
                return f"{reason}; {error}"
            log.info("KV of engine %d comes through the host: %s", engine, reason)
        return ""

    def carry(self, worker: LayoutWorker, carry: Carry) -> Callable[[], Copied]:
        """Know requests, and begin to read their KV; later steps find it.

        Args:
            worker: the layout's.
            carry: the requests.

        Returns:
            Waits until all is read, and says what was done.
        """
        # A V1 model runner that knows a request from before forgets it first, which writes to
        # tensors that steps have made.
        with torch.inference_mode():
            for arrival in carry.requests:
                introduce(worker.model_runner, arrival)
        requests, plan, unit = carry.requests, None, worker.unit
        if carry.foreseen:
            number, requests, plan = self._foreseen.pop((unit, carry.source))
            if number != carry.foreseen:
                raise RuntimeError(f"copy {carry.foreseen} was not foreseen, but {number}")
        return self._read(carry.source, unit, requests, beside=False, plan=plan)

    def foresee(self, unit: Unit, foresee: Foresee) -> None:
        """Find out by now what a unit's ``Carry`` will let this engine read."""
        if self._reader is not None:
            plan = self._reader.plan(foresee.source, unit, foresee.requests)
            self._foreseen[unit, foresee.source] = foresee.number, foresee.requests, plan

    def copy_ahead(self, ahead: CopyAhead) -> Callable[[], Copied]:
        """Begin to read KV of requests that still run elsewhere, if this engine is to have some.

        Returns:
            Waits until all is read, and says what was done.
        """
        if self._engine not in ahead.target.engines:
            return partial(Copied, 0, 0.0)
        return self._read(ahead.source, ahead.target, ahead.requests, beside=True)

    def move(
        self, unit: Unit, requests: list[Arrival], *, beside: bool = False
    ) -> Callable[[], Copied]:
        """Begin to copy KV from blocks of a unit to others.

        Args:
            unit: the unit.
            requests: say what is copied (``Move``).
            beside: whether later steps go on meanwhile; otherwise they find it there.

        Returns:
            Waits until all is copied, and says what was done.
        """
        return self._read(unit, unit, requests, beside=beside)

    def _read(
        self,
        source: Unit,
        target: Unit,
        requests: list[Arrival],
        *,
        beside: bool,
        plan: Plan | None = None,
    ) -> Callable[[], Copied]:
        if self._reader is None:
            return partial(Copied, 0, 0.0, self._problem)
        try:
            return self._reader.read(source, target, requests, beside=beside, plan=plan)
        except NotSharedError as error:
            return partial(Copied, 0, 0.0, str(error))
