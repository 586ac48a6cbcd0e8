"""``/v1/files``, as OpenAI documents it, for the files of batches."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from shoal.server.batch.batch_objects import PURPOSE, StoredFile, new_id
from shoal.server.batch.batch_options import DAY_SECONDS, BatchLimits
from shoal.server.batch.batch_store import BatchStore, InUseError, NoRoomError
from shoal.server.batch.list_answers import (
    Batches,
    RefusedError,
    lifetime_of,
    limit_of,
    listed,
    owner_of,
)
from shoal.server.batch.upload_room import UploadRoom
from shoal.server.batch.uploads import Upload, UploadError, read_upload
from shoal.server.gate.middleware import key_of

FILES_PATH = "/v1/files"
_LISTED = 10_000
_NAME_CHARS = 256


def files_router(batches: Batches) -> APIRouter:
    """Return the routes."""
    router, store, clock = APIRouter(), batches.store, batches.clock

    @router.post(FILES_PATH)
    async def create(request: Request) -> dict[str, Any]:
        return await _create(request, batches)

    @router.get(FILES_PATH)
    def show_all(request: Request) -> dict[str, Any]:
        query, limit = request.query_params, limit_of(request, _LISTED, _LISTED)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RefusedError(400, "order: it must be asc or desc", "order")
        try:
            found = store.files(
                owner_of(request),
                clock(),
                limit=limit + 1,
                after=query.get("after"),
                purpose=query.get("purpose"),
                ascending=order == "asc",
            )
        except KeyError:
            raise RefusedError(404, "after: there is no such file", "after") from None
        return listed(found, limit)

    @router.get(FILES_PATH + "/{file_id}")
    def show(file_id: str, request: Request) -> dict[str, Any]:
        return _found(store, file_id, request, clock()).shown()

    @router.get(FILES_PATH + "/{file_id}/content")
    def content(file_id: str, request: Request) -> Response:
        file = _found(store, file_id, request, clock())
        return FileResponse(
            store.path(file.id), media_type="application/octet-stream", filename=file.filename
        )

    @router.delete(FILES_PATH + "/{file_id}")
    def delete(file_id: str, request: Request) -> dict[str, Any]:
        try:
            deleted = store.delete_file(owner_of(request), file_id)
        except InUseError as error:
            raise RefusedError(409, str(error)) from None
        if not deleted:
            raise _unknown()
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def _found(store: BatchStore, file_id: str, request: Request, now: float) -> StoredFile:
    file = store.file(owner_of(request), file_id, now)
    if file is None:
        raise _unknown()
    return file


def _unknown() -> RefusedError:
    return RefusedError(404, "there is no such file", "id")


async def _create(request: Request, batches: Batches) -> dict[str, Any]:
    store, limits = batches.store, batches.limits
    owner, file_id = owner_of(request), new_id("file-")
    key = key_of(request.scope)
    most = (key and key.max_file_bytes) or limits.stored_bytes
    length = request.headers.get("content-length")

    def too_large(size: int) -> str | None:
        if size > limits.file_bytes:
            return f"the file is larger than {limits.file_bytes} bytes"
        return None

    try:
        declared = None if length is None else min(int(length), limits.file_bytes)
        async with UploadRoom(store, file_id, owner, most, declared) as room:
            pieces = request.stream()
            upload = await read_upload(request.headers, pieces, room.file, too_large, room.cover)
            file = _described(upload, owner, file_id, int(batches.clock()), limits)
            await asyncio.to_thread(store.take_in, file, most)
    except UploadError as error:
        raise RefusedError(error.status, str(error), error.param) from None
    except NoRoomError as error:
        raise RefusedError(413, str(error), "file") from None
    return file.shown()


def _described(
    upload: Upload, owner: str, file_id: str, now: int, limits: BatchLimits
) -> StoredFile:
    fields = upload.fields
    purpose = fields.get("purpose")
    if purpose != PURPOSE:
        raise RefusedError(400, f"purpose: it must be {PURPOSE}", "purpose")
    if not upload.size:
        raise RefusedError(400, "file: it is empty", "file")
    seconds = int(limits.keep_days * DAY_SECONDS)
    if any(name.startswith("expires_after") for name in fields):
        anchor = fields.get("expires_after[anchor]")
        seconds = lifetime_of(fields.get("expires_after[seconds]"), anchor, "expires_after")
    name = upload.filename[:_NAME_CHARS]
    return StoredFile(file_id, owner, upload.size, now, name, purpose, now + seconds)
