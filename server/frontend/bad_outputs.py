"""Outputs that a front end cannot read, or fails at: only the requests that they are of end.

vLLM decodes messages of engines in one task and processes their outputs in another
(``AsyncMPClient._ensure_output_queue_task``, ``AsyncLLM._run_output_handler``). Each ends with the
first exception, and all streams of the front end with it. Both call a method of an object that
they have: ``MsgpackDecoder.decode`` and ``OutputProcessor.process_outputs``. Here these calls are
tried, and what they fail at is taken out of what they are given.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackDecoder

log = logging.getLogger("shoal.frontend")

Fail = Callable[[Sequence[str]], None]
"""Ends requests with an error."""
_raw_fields = msgspec.msgpack.Decoder(list[msgspec.Raw])


class BadOutputs:
    """Stands between vLLM and the messages of engines.

    Args:
        llm: decodes messages and processes outputs through this object from now on.
        fail: is given requests whose outputs are bad.
        lose: is called when outputs are lost and nobody knows of which requests.
    """

    def __init__(self, llm: AsyncLLM, fail: Fail, lose: Callable[[], None]) -> None:
        self._states = llm.output_processor.request_states
        self._fail = fail
        self._lose = lose
        self._output_decoder = MsgpackDecoder(EngineCoreOutput)
        decoder, processor = llm.engine_core.decoder, llm.output_processor
        self._decode, decoder.decode = decoder.decode, self._decode_safely
        self._process, processor.process_outputs = processor.process_outputs, self._process_safely

    # --- messages -----------------------------------------------------------------------------

    def _decode_safely(self, frames: Any) -> EngineCoreOutputs:
        """Decode a message as vLLM does, without the outputs that cannot be decoded."""
        try:
            return self._decode(frames)
        except Exception as error:  # noqa: BLE001 - it must not end the task
            message, bad = self._salvage(list(frames))
            whose = "unknown requests" if bad is None else ", ".join(bad) or "no request"
            log.error("cannot decode outputs of %s: %s", whose, _line(error))
        if bad is None:
            self._lose()
        else:
            self._fail(bad)
        return message

    def _salvage(self, frames: Sequence[Any]) -> tuple[EngineCoreOutputs, list[str] | None]:
        """Return what can be read of a message, and whose outputs cannot; None: nobody knows.

        Statistics of a message that cannot be read as a whole are left out.
        """
        try:
            head, *rest = frames
            fields = _raw_fields.decode(head)
            index = msgspec.msgpack.decode(fields[0], type=int)
            outputs = _raw_fields.decode(fields[1])
            timestamp = msgspec.msgpack.decode(fields[3], type=float)
        except (ValueError, IndexError):  # msgspec's errors are ValueErrors
            return EngineCoreOutputs(), None
        good: list[EngineCoreOutput] = []
        bad: list[str] | None = []
        for output in outputs:
            try:
                good.append(self._output_decoder.decode((output, *rest)))
            except Exception:  # noqa: BLE001 - as above
                name = _request_of(output)
                bad = None if bad is None or name is None else [*bad, name]
        return EngineCoreOutputs(engine_index=index, outputs=good, timestamp=timestamp), bad

    # --- outputs ------------------------------------------------------------------------------

    def _process_safely(self, outputs: Sequence[Any], *rest: Any, **more: Any) -> Any:
        """Process outputs as vLLM does, and fail the requests of those that raise an exception.

        vLLM goes through the outputs in one loop. What it stopped at is known by how far it has
        read them, and it is called again with those that are left.
        """
        progress = _Progress(outputs)
        stopped: list[str] = []
        while True:
            begun = progress.taken
            try:
                processed = self._process(progress.left, *rest, **more)
            except Exception:
                if progress.taken == begun:
                    raise
                *before, failed = outputs[begun : progress.taken]
                log.exception("cannot process an output of %s", failed.request_id)
                stopped += self._stopped(before)
                self._fail([failed.request_id])
            else:
                processed.reqs_to_abort += stopped
                return processed

    def _stopped(self, outputs: Iterable[Any]) -> list[str]:
        """Return the requests that ended with these outputs though their engines go on.

        That they ended at a stop string vLLM would have said at the end of its loop. Those that
        ended before are returned, too; to abort them again does nothing.
        """
        return [
            output.request_id
            for output in outputs
            if not output.finished and output.request_id not in self._states
        ]


class _Progress:
    """Says how many outputs have been taken from ``left``, an iterator over all of them."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.taken = 0
        self.left = self._follow(outputs)

    def _follow(self, outputs: Sequence[Any]) -> Iterator[Any]:
        for output in outputs:
            self.taken += 1
            yield output


def _request_of(output: msgspec.Raw) -> str | None:
    """Return the id of an output's request; None if that cannot be read either."""
    try:
        return msgspec.msgpack.decode(_raw_fields.decode(output)[0], type=str)
    except (ValueError, IndexError):
        return None


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
