"""The files and batches that the store keeps, and the objects of OpenAI's API that show them."""

import enum
import secrets
from typing import Any

import msgspec

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The routes that a batch can be for."""
PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


class Status(enum.StrEnum):
    """The states of a batch, as OpenAI names them."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing happens to the batch any more."""
        return self in _FINAL


_FINAL = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})
UNFINISHED = tuple(status for status in Status if status not in _FINAL)


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with an input file."""

    code: str
    message: str
    line: int | None = None
    """From 1 on; None: the file as a whole."""
    param: str | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of the answers so far."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Usage(*(a + b for a, b in zip(mine, theirs, strict=True)))


class StoredFile(msgspec.Struct, frozen=True):
    """A file. Its content lies under its id."""

    id: str
    owner: str
    """The tenant whose API key it came with; empty: the node asked for no key."""
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's ``file`` object."""
        shown = msgspec.to_builtins(self)
        del shown["owner"]
        return {"object": "file", "status": "processed", **shown}


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch: the fields of OpenAI's object, and what the worker has to remember."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = Status.VALIDATING
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    errors: tuple[LineError, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = Usage()
    output_seconds: int | None = None
    """How long after their creation the output files expire; None: as all others."""
    answers_id: str = ""
    """The file to which answers are written from the start; it exists for others at the end."""
    failures_id: str = ""
    """The same for requests without an answer."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's ``batch`` object."""
        shown = msgspec.to_builtins(self)
        for name in ("owner", "output_seconds", "answers_id", "failures_id"):
            del shown[name]
        counts = {name: shown.pop(name) for name in ("total", "completed", "failed")}
        errors, usage = shown.pop("errors"), self.usage
        return {
            "object": "batch",
            **shown,
            "errors": {"object": "list", "data": errors} if errors else None,
            "request_counts": counts,
            "usage": {
                "input_tokens": usage.input_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.output_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.input_tokens + usage.output_tokens,
            },
        }


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(16)}"
