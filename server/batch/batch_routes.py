"""``/v1/batches``, as OpenAI documents it."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from shoal.server.batch.batch_objects import ENDPOINTS, PURPOSE, Batch, Status, new_id
from shoal.server.batch.batch_store import BatchStore, NoRoomError
from shoal.server.batch.list_answers import (
    Batches,
    RefusedError,
    lifetime_of,
    limit_of,
    listed,
    owner_of,
)
from shoal.server.gate.bodies import DECODED_BODY
from shoal.server.gate.middleware import key_of

BATCHES_PATH = "/v1/batches"
_LISTED, _MOST_LISTED = 20, 100
_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
_MOST_HOURS = 168
_METADATA = 16
_METADATA_KEY_CHARS, _METADATA_VALUE_CHARS = 64, 512


def batches_router(batches: Batches) -> APIRouter:
    """Return the routes."""
    router, store, clock = APIRouter(), batches.store, batches.clock

    @router.post(BATCHES_PATH)
    def create(request: Request) -> dict[str, Any]:
        fields = request.scope.get(DECODED_BODY) or {}
        batch = _asked(fields, owner_of(request), int(clock()))
        file = store.file(batch.owner, batch.input_file_id, clock())
        if file is None:
            raise _no_file()
        if file.purpose != PURPOSE:
            wrong = f"input_file_id: the purpose of the file must be {PURPOSE}"
            raise RefusedError(400, wrong, "input_file_id")
        key = key_of(request.scope)
        try:
            store.add_batch(batch, (key and key.max_batches) or batches.limits.batches)
        except NoRoomError as error:
            raise RefusedError(429, str(error)) from None
        except KeyError:
            raise _no_file() from None
        return batch.shown()

    @router.get(BATCHES_PATH)
    def show_all(request: Request) -> dict[str, Any]:
        limit = limit_of(request, _LISTED, _MOST_LISTED)
        after = request.query_params.get("after")
        try:
            found = store.batches(owner_of(request), limit=limit + 1, after=after)
        except KeyError:
            raise RefusedError(404, "after: there is no such batch", "after") from None
        return listed(found, limit)

    @router.get(BATCHES_PATH + "/{batch_id}")
    def show(batch_id: str, request: Request) -> dict[str, Any]:
        return _found(store, batch_id, request).shown()

    @router.post(BATCHES_PATH + "/{batch_id}/cancel")
    def cancel(batch_id: str, request: Request) -> dict[str, Any]:
        batch = _found(store, batch_id, request)
        return store.change(batch.id, partial(_cancelled, now=int(clock()))).shown()

    return router


def _found(store: BatchStore, batch_id: str, request: Request) -> Batch:
    batch = store.batch(owner_of(request), batch_id)
    if batch is None:
        raise RefusedError(404, "there is no such batch", "id")
    return batch


def _no_file() -> RefusedError:
    return RefusedError(404, "input_file_id: there is no such file", "input_file_id")


def _cancelled(batch: Batch, *, now: int) -> Batch:
    if batch.status is Status.CANCELLING:
        return batch
    if batch.status not in (Status.VALIDATING, Status.IN_PROGRESS):
        raise RefusedError(409, f"the batch is {batch.status}: it cannot be cancelled")
    return msgspec.structs.replace(batch, status=Status.CANCELLING, cancelling_at=now)


def _asked(fields: Mapping[str, Any], owner: str, now: int) -> Batch:
    """Return the batch that a body asks for.

    Raises:
        RefusedError: a field is missing or wrong.
    """
    endpoint, file_id = fields.get("endpoint"), fields.get("input_file_id")
    if not isinstance(file_id, str):
        raise RefusedError(400, "input_file_id: it must be the id of a file", "input_file_id")
    if endpoint not in ENDPOINTS:
        allowed = f"endpoint: it must be one of {', '.join(ENDPOINTS)}"
        raise RefusedError(400, allowed, "endpoint")
    window = fields.get("completion_window")
    found = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    if found is None or int(found[1]) > _MOST_HOURS:
        allowed = f"completion_window: it must be 24h, or from 1h to {_MOST_HOURS}h"
        raise RefusedError(400, allowed, "completion_window")
    return Batch(
        id=new_id("batch_"),
        owner=owner,
        endpoint=endpoint,
        input_file_id=file_id,
        completion_window=found[0],
        created_at=now,
        expires_at=now + int(found[1]) * 3600,
        metadata=_metadata(fields.get("metadata")),
        output_seconds=_output_seconds(fields.get("output_expires_after")),
    )


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > _METADATA:
        raise RefusedError(
            400, f"metadata: it must be an object of at most {_METADATA} texts", "metadata"
        )
    for name, text in value.items():
        fits = isinstance(text, str) and len(text) <= _METADATA_VALUE_CHARS
        if not fits or len(name) > _METADATA_KEY_CHARS:
            most = (
                f"metadata: keys have at most {_METADATA_KEY_CHARS} characters, and values are "
                f"texts of at most {_METADATA_VALUE_CHARS}"
            )
            raise RefusedError(400, most, "metadata")
    return value


def _output_seconds(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        wrong = "output_expires_after: it must be an object"
        raise RefusedError(400, wrong, "output_expires_after")
    return lifetime_of(value.get("seconds"), value.get("anchor"), "output_expires_after")
