"""``Copier`` on GPUs: the copy engines copy, on streams of their own, beside what is computed."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shoal.runtime.engine.weights.sharing.cuda_driver import CudaDriver
from shoal.runtime.engine.weights.sharing.slots import Copy


class _Streams(NamedTuple):
    peers: torch.cuda.Stream
    """For what comes over the link: one peer's part after the other (peak shifting)."""
    own: torch.cuda.Stream
    """For what is in this engine's own memory, which takes nothing of the link."""


class StreamCopier:
    """See the module.

    One thread uses it, on whose current stream layers are computed; only ``finish`` is for any.

    Args:
        device: this engine's.
        driver: of the GPUs.
    """

    def __init__(self, device: torch.device, driver: CudaDriver) -> None:
        self._device, self._driver = device, driver
        self._streams: _Streams | None = None
        """Made when first used, because CUDA is not initialised before."""

    def start(self, copies: Sequence[Copy]) -> tuple[torch.cuda.Event, ...]:
        """See ``Copier.start``. Returns an event for each stream, which is after the copies."""
        if self._streams is None:
            self._streams = _Streams(*(torch.cuda.Stream(self._device) for _ in _Streams._fields))
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        for stream in self._streams:
            stream.wait_event(computed)
        for copy in copies:
            stream = self._streams.own if copy.is_own else self._streams.peers
            size = copy.target.nbytes
            self._driver.copy(
                copy.target.data_ptr(), copy.source.data_ptr(), size, stream.cuda_stream
            )
        return tuple(_after(stream) for stream in self._streams)

    def wait(self, started: tuple[torch.cuda.Event, ...]) -> None:
        """See ``Copier.wait``. The host does not wait."""
        computing = torch.cuda.current_stream(self._device)
        for copied in started:
            computing.wait_event(copied)

    def finish(self, started: tuple[torch.cuda.Event, ...]) -> None:
        """See ``Copier.finish``."""
        for copied in started:
            copied.synchronize()


def _after(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
