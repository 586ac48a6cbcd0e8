"""Every message that crosses a process boundary outside an engine: one tagged union per direction.

Encoded with msgpack.
"""

import msgspec

from runtime.messages.control import (
    AuditDone,
    AuditNode,
    CallFailed,
    CountRefused,
    Ended,
    EngineDied,
    FromController,
    GetLayout,
    GetMetrics,
    KillEngines,
    LayoutView,
    NodeMetrics,
    Note,
    Placed,
    PoolLimits,
    SetLayout,
    SetPolicy,
    Stopped,
    SwitchDone,
    Switching,
    ToControllerControl,
)
from runtime.messages.engine import (
    AbortBind,
    AbortRequests,
    AddRequest,
    CheckIntegrity,
    Commit,
    Committed,
    EngineFailed,
    EngineReady,
    Grow,
    Integrity,
    KeepBound,
    LayoutLimits,
    Lend,
    Lent,
    Load,
    Moved,
    MoveOut,
    NeedBlocks,
    Prepare,
    Prepared,
    Release,
    Released,
    Resume,
    Resumed,
    Returning,
    Stop,
    TakeBack,
    ToController,
    ToEngine,
    Utility,
)
from runtime.messages.values import (
    Message,
    Outcome,
    Treatment,
    Work,
)

__all__ = [
    "AbortBind",
    "AbortRequests",
    "AddRequest",
    "AuditDone",
    "AuditNode",
    "CallFailed",
    "CheckIntegrity",
    "Commit",
    "Committed",
    "CountRefused",
    "Ended",
    "EngineDied",
    "EngineFailed",
    "EngineReady",
    "FromController",
    "GetLayout",
    "GetMetrics",
    "Grow",
    "Integrity",
    "KeepBound",
    "KillEngines",
    "LayoutLimits",
    "LayoutView",
    "Lend",
    "Lent",
    "Load",
    "Message",
    "MoveOut",
    "Moved",
    "NeedBlocks",
    "NodeMetrics",
    "Note",
    "Outcome",
    "Placed",
    "PoolLimits",
    "Prepare",
    "Prepared",
    "Release",
    "Released",
    "Resume",
    "Resumed",
    "Returning",
    "SetLayout",
    "SetPolicy",
    "Stop",
    "Stopped",
    "SwitchDone",
    "Switching",
    "TakeBack",
    "ToController",
    "ToControllerControl",
    "ToEngine",
    "Treatment",
    "Utility",
    "Work",
    "decode_control",
    "decode_from_controller",
    "decode_to_controller",
    "decode_to_engine",
    "encode",
]

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Encode any message of this package."""
    return _encoder.encode(message)


decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_controller = msgspec.msgpack.Decoder(ToController).decode
decode_control = msgspec.msgpack.Decoder(ToControllerControl).decode
decode_from_controller = msgspec.msgpack.Decoder(FromController).decode
