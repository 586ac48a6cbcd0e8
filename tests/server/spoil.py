"""A ``shoal`` whose fake engines spoil outputs, as the names of their requests ask for it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol import wire
from tests.server.node import shoal

UNDECODABLE, UNPROCESSABLE, GARBAGE = "undecodable", "unprocessable", "garbage"
"""In the name of a request: its outputs are no ``EngineCoreOutput``; they have log probabilities
that nobody asked for, which vLLM asserts against; one message that has an output of it is no
msgpack at all."""
_UNASKED = (
    wire.packed("int32", (1, 1), bytes(4)),
    wire.packed("float32", (1, 1), bytes(4)),
    wire.packed("int64", (1,), bytes(8)),
    None,
)
_CLEAN_TOKENS = 2
"""How many tokens a request gets before its outputs are spoiled."""


class _Spoiler:
    """Encodes outputs in place of ``wire.encode_outputs``."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def __call__(
        self, outputs: Sequence[wire.Output], *, unit: Unit | None = None, timestamp: float = 0.0
    ) -> bytes:
        encoded = wire.encode_outputs(outputs, unit=unit, timestamp=timestamp)
        fields: list[Any] = msgspec.msgpack.decode(encoded)
        for output in fields[1]:
            name: str = output[0]
            before = self._tokens.get(name, 0)
            self._tokens[name] = before + len(output[1])
            if before < _CLEAN_TOKENS:
                continue
            if UNDECODABLE in name:
                output[1] = "no tokens"
            elif UNPROCESSABLE in name:
                output += [None] * (3 - len(output))
                output[2] = _UNASKED
            elif GARBAGE in name and before == _CLEAN_TOKENS:
                return b"\xc1"
        return msgspec.msgpack.encode(fields)


def spoiling_shoal(arguments: list[str]) -> int:
    """Be the ``shoal`` command."""
    from types import SimpleNamespace

    from shoal.runtime.engine.fake import fake_core  # before engines are forked

    names = {**vars(wire), "encode_outputs": _Spoiler()}
    fake_core.wire = SimpleNamespace(**names)  # type: ignore[assignment]
    return shoal(arguments)
