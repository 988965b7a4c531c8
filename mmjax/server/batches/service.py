"""/v1/files and /v1/batches: files of requests that are answered while nobody waits for them."""

import asyncio
import os
import time

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from mmjax.config.engine_config import ServerConfig
from mmjax.errors import RequestValueError
from mmjax.server.batches.protocol import (
    BatchObject,
    CreateBatchRequest,
    FileObject,
    ListQuery,
    UploadFile,
)
from mmjax.server.batches.store import BatchStore, StoredBatch, new_id, page_of
from mmjax.server.batches.upload import UploadedForm
from mmjax.server.batches.worker import BatchWorker
from mmjax.server.openai.errors import json_response
from mmjax.server.openai.request_body import API_KEY_STATE, RequestReader, validated

MAX_LINES = 1_000_000
"""Of one input."""

_UPLOADS_AT_ONCE = 4

FILES_PATH = "/v1/files"
_FORM_BYTES = 2**20
"""What the body of an upload may have besides the file."""


class BatchService:
    """Serves the routes."""

    def __init__(
        self, store: BatchStore, worker: BatchWorker, reader: RequestReader, config: ServerConfig
    ) -> None:
        self._store = store
        self._worker = worker
        self._reader = reader
        self._config = config
        self._uploads = asyncio.Semaphore(_UPLOADS_AT_ONCE)

    async def work(self) -> None:
        """Answer batches until it is cancelled; then another process may have the directory."""
        try:
            await self._worker.work()
        finally:
            self._store.close()

    def add_to(self, app: FastAPI) -> None:
        """Add the routes without a JSON body."""
        batches = "/v1/batches"
        routes = (
            ("GET", FILES_PATH, self.files),
            ("GET", f"{FILES_PATH}/{{file_id}}", self.file),
            ("DELETE", f"{FILES_PATH}/{{file_id}}", self.delete_file),
            ("GET", f"{FILES_PATH}/{{file_id}}/content", self.file_content),
            ("GET", batches, self.batches),
            ("GET", f"{batches}/{{batch_id}}", self.batch),
            ("POST", f"{batches}/{{batch_id}}/cancel", self.cancel_batch),
        )
        for method, path, serve in routes:
            app.add_api_route(path, serve, methods=[method], name=serve.__name__)

    async def upload_file(self, request: Request) -> Response:
        """Serve POST /v1/files."""
        self._store.check_room()
        file_id = new_id("file-")
        path = self._store.path_of(file_id)
        draft = path.with_suffix(".draft")
        try:
            with draft.open("xb") as file:
                form = UploadedForm(
                    request.headers.get("content-type", ""),
                    file,
                    max_bytes=self._config.max_batch_file_bytes,
                    max_lines=MAX_LINES,
                )

                async def feed(chunk: bytes) -> None:
                    await asyncio.to_thread(form.feed, chunk)

                async with self._uploads:
                    await self._reader.receive_each(request, feed)
                form.finish()
                validated(UploadFile, form.fields)
                self._store.check_room(form.num_bytes)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        shown = FileObject(
            id=file_id,
            bytes=form.num_bytes,
            created_at=int(time.time()),
            filename=form.filename or "",
            purpose="batch",
        )
        await asyncio.to_thread(self._store.put_file, _owner(request), shown)
        return json_response(shown)

    async def files(self, request: Request) -> Response:
        """Serve GET /v1/files."""
        query, owner = validated(ListQuery, dict(request.query_params)), _owner(request)
        found = [
            one.shown
            for one in list(self._store.files.values())
            if one.owner == owner and query.purpose in (None, one.shown.purpose)
        ]
        page = page_of(found, after=query.after, limit=query.limit, order=query.order)
        return json_response(page)

    async def file(self, request: Request, file_id: str) -> Response:
        """Serve GET /v1/files/{id}."""
        return json_response(self._store.file(file_id, _owner(request)).shown)

    async def file_content(self, request: Request, file_id: str) -> Response:
        """Serve GET /v1/files/{id}/content."""
        stored = self._store.file(file_id, _owner(request))
        return FileResponse(
            self._store.path_of(stored.shown.id),
            media_type="application/octet-stream",
            headers={"X-Content-Type-Options": "nosniff"},
        )

    async def delete_file(self, request: Request, file_id: str) -> Response:
        """Serve DELETE /v1/files/{id}."""
        await asyncio.to_thread(self._store.delete_file, file_id, _owner(request))
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request, body: CreateBatchRequest) -> Response:
        """Serve POST /v1/batches."""
        owner = _owner(request)
        source = self._store.file(body.input_file_id, owner, param="input_file_id")
        if source.shown.purpose != "batch":
            raise RequestValueError.about("input_file_id", "is a batch's output; upload an input")
        self._store.check_room()
        shown = BatchObject(
            id=new_id("batch_"),
            endpoint=body.endpoint,
            input_file_id=source.shown.id,
            completion_window=body.completion_window,
            created_at=int(time.time()),
            metadata=body.metadata,
        )
        stored = StoredBatch(owner, shown, new_id("file-"), new_id("file-"))
        await asyncio.to_thread(self._store.put_batch, stored)
        self._worker.add(stored)
        return json_response(shown)

    async def batches(self, request: Request) -> Response:
        """Serve GET /v1/batches."""
        query, owner = validated(ListQuery, dict(request.query_params)), _owner(request)
        found = [one.shown for one in list(self._store.batches.values()) if one.owner == owner]
        for shown in found:
            self._worker.count(shown)
        page = page_of(found, after=query.after, limit=query.limit, order=query.order)
        return json_response(page)

    async def batch(self, request: Request, batch_id: str) -> Response:
        """Serve GET /v1/batches/{id}."""
        shown = self._store.batch(batch_id, _owner(request)).shown
        self._worker.count(shown)
        return json_response(shown)

    async def cancel_batch(self, request: Request, batch_id: str) -> Response:
        """Serve POST /v1/batches/{id}/cancel: what has its result keeps it."""
        stored = self._store.batch(batch_id, _owner(request))
        if stored.shown.status not in ("validating", "in_progress"):
            raise RequestValueError(
                f"this batch is {stored.shown.status}, and cannot be cancelled any more"
            )
        await self._worker.cancel(stored)
        return json_response(stored.shown)


def body_limit(config: ServerConfig) -> int:
    """Return the size of an upload's body."""
    return config.max_batch_file_bytes + _FORM_BYTES


def _owner(request: Request) -> str:
    return getattr(request.state, API_KEY_STATE, "")
