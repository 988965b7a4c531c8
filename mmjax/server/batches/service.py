"""/v1/files and /v1/batches: files of requests that are answered while nobody waits for them.

Read a form as it comes, its file to the disk: at no time is it in memory.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from mmjax.config.engine_config import ServerConfig
from mmjax.errors import RequestError, RequestValueError
from mmjax.server.batches.protocol import (
    BatchObject,
    CreateBatchRequest,
    FileObject,
    FilesQuery,
    ListQuery,
    UploadFile,
)
from mmjax.server.batches.store import BatchStore, StoredBatch, new_id
from mmjax.server.batches.worker import BatchWorker
from mmjax.server.openai.errors import JsonResponse
from mmjax.server.openai.request_body import RequestReader, owner_of, validated
from mmjax.server.openai.responses_api.protocol import PageQuery
from mmjax.server.openai.transcripts.form import (
    MAX_FIELD_BYTES,
    MAX_FORM_PARTS,
    MAX_HEADER_BYTES,
    cut_off,
    read_boundary,
    read_part_header,
)


class FileTooLargeError(RequestValueError):
    """A file of more bytes or lines than the server takes."""

    status = 413
    code = "file_too_large"


class UploadedForm:
    """The parts of a form, of which one is a file."""

    def __init__(
        self, content_type: str, file: BinaryIO, *, max_bytes: int, max_lines: int
    ) -> None:
        """Write the content of the part `file` to a file of ours."""
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Once the file has begun."""
        self.num_bytes = self.num_lines = 0
        self._file = file
        self._max_bytes, self._max_lines = max_bytes, max_lines
        self._end = b"\r\n--" + read_boundary(content_type)
        # The first mark, too, stands at the beginning of a line.
        self._buffer = bytearray(b"\r\n")
        self._take: Callable[[bytes], None] | None = self._drop
        """What has the part's content; None: a part's header comes."""
        self._num_parts = 0
        self._is_over = False

    def feed(self, chunk: bytes) -> None:
        """Take what has come; RequestError for a wrong form, or one above a limit."""
        self._buffer += chunk
        while not self._is_over and self._step():
            pass
        if self._is_over:
            self._buffer.clear()

    def finish(self) -> None:
        """Raise RequestError unless the form was whole, and had a file."""
        if not self._is_over:
            raise cut_off()
        if self.filename is None:
            raise RequestValueError.about("file", "is missing; send it as a file of the form")

    def _step(self) -> bool:
        """Read a part's header, or of its content what is there; return whether more may be."""
        if self._take is None:
            return self._begin_part()
        index = self._buffer.find(self._end)
        length = len(self._buffer) - len(self._end) + 1 if index < 0 else index
        if length > 0:
            self._take(bytes(self._buffer[:length]))
            del self._buffer[:length]
        if index < 0:
            return False
        del self._buffer[: len(self._end)]
        self._take = None
        return True

    def _begin_part(self) -> bool:
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        if buffer[:2] == b"--":
            self._is_over = True
            return False
        header_end = buffer.find(b"\r\n\r\n", 0, MAX_HEADER_BYTES)
        if buffer[:2] != b"\r\n" or (header_end < 0 and len(buffer) >= MAX_HEADER_BYTES):
            raise cut_off()
        if header_end < 0:
            return False
        self._num_parts += 1
        if self._num_parts > MAX_FORM_PARTS:
            raise RequestValueError(f"the form has more than {MAX_FORM_PARTS} parts; send fewer")
        header = read_part_header(bytes(buffer[2 : header_end + 2]))
        del buffer[: header_end + 4]
        self._take = self._open(header.name, header.filename)
        return True

    def _open(self, name: str, filename: str | None) -> Callable[[bytes], None]:
        shown = name[:64]
        if filename is not None:
            if name != "file" or self.filename is not None:
                raise RequestValueError.about(shown, "is a file; the form has one, `file`")
            self.filename = filename[:255]
            return self._take_of_file
        if name in self.fields:
            raise RequestValueError.about(shown, "is given twice; give it once")
        self.fields[name] = ""
        return lambda piece: self._take_of_field(name, piece)

    def _take_of_file(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        self.num_lines += piece.count(b"\n")
        if self.num_bytes > self._max_bytes or self.num_lines > self._max_lines:
            raise too_large(self._max_bytes, self._max_lines)
        self._file.write(piece)

    def _take_of_field(self, name: str, piece: bytes) -> None:
        # Of what is not UTF-8 no field's value is made.
        value = self.fields[name] + piece.decode("latin-1")
        if len(value) > MAX_FIELD_BYTES:
            raise RequestValueError.about(name[:64], f"has more than {MAX_FIELD_BYTES} bytes")
        self.fields[name] = value

    def _drop(self, piece: bytes) -> None:
        pass


def too_large(max_bytes: int, max_lines: int) -> RequestError:
    """Return the error of a file above the limits."""
    return FileTooLargeError(
        f"the file has more than {max_bytes} bytes (`--max-batch-file-bytes`) or {max_lines} "
        "lines; send several",
        param="file",
    )


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
                validated(UploadFile, _nested(form.fields))
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
        await asyncio.to_thread(self._store.put_file, owner_of(request), shown)
        return JsonResponse(shown)

    async def files(self, request: Request) -> Response:
        """Serve GET /v1/files."""
        query, owner = validated(FilesQuery, dict(request.query_params)), owner_of(request)
        found = [
            one.shown
            for one in list(self._store.files.values())
            if one.owner == owner and query.purpose in (None, one.shown.purpose)
        ]
        return _page_of(query, found)

    async def file(self, request: Request, file_id: str) -> Response:
        """Serve GET /v1/files/{id}."""
        return JsonResponse(self._store.file(file_id, owner_of(request)).shown)

    async def file_content(self, request: Request, file_id: str) -> Response:
        """Serve GET /v1/files/{id}/content."""
        stored = self._store.file(file_id, owner_of(request))
        return FileResponse(
            self._store.path_of(stored.shown.id),
            media_type="application/octet-stream",
            headers={"X-Content-Type-Options": "nosniff"},
        )

    async def delete_file(self, request: Request, file_id: str) -> Response:
        """Serve DELETE /v1/files/{id}."""
        await asyncio.to_thread(self._store.delete_file, file_id, owner_of(request))
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request, body: CreateBatchRequest) -> Response:
        """Serve POST /v1/batches."""
        owner = owner_of(request)
        source = self._store.file(body.input_file_id, owner, param="input_file_id")
        if source.shown.purpose != "batch":
            raise RequestValueError.about("input_file_id", "is a batch's output; upload an input")
        self._store.check_room()
        self._store.check_unfinished()
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
        return JsonResponse(shown)

    async def batches(self, request: Request) -> Response:
        """Serve GET /v1/batches."""
        query, owner = validated(ListQuery, dict(request.query_params)), owner_of(request)
        found = [one.shown for one in list(self._store.batches.values()) if one.owner == owner]
        for shown in found:
            self._worker.count(shown)
        return _page_of(query, found)

    async def batch(self, request: Request, batch_id: str) -> Response:
        """Serve GET /v1/batches/{id}."""
        shown = self._store.batch(batch_id, owner_of(request)).shown
        self._worker.count(shown)
        return JsonResponse(shown)

    async def cancel_batch(self, request: Request, batch_id: str) -> Response:
        """Serve POST /v1/batches/{id}/cancel: what has its result keeps it."""
        stored = self._store.batch(batch_id, owner_of(request))
        if stored.shown.status not in ("validating", "in_progress"):
            raise RequestValueError(
                f"this batch is {stored.shown.status}, and cannot be cancelled any more"
            )
        await self._worker.cancel(stored)
        return JsonResponse(stored.shown)


def body_limit(config: ServerConfig) -> int:
    """Return the size of an upload's body."""
    return config.max_batch_file_bytes + _FORM_BYTES


def _page_of(query: PageQuery, found: Iterable[FileObject | BatchObject]) -> Response:
    return JsonResponse(query.page_of(((one.id, one) for one in found), "is none of the list"))


def _nested(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return a form's fields with objects in place of their members, `name[member]`."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        outer, _, rest = name.partition("[")
        if outer and rest.endswith("]") and isinstance(nested.get(outer, {}), dict):
            nested.setdefault(outer, {})[rest[:-1]] = value
        else:
            nested[name] = value
    return nested
