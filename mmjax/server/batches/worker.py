"""Works on batches one after another, in the order of their creation, while others come first."""

import asyncio
import time
from collections.abc import Collection

from mmjax.errors import EngineUnavailableError
from mmjax.server.batches.endpoints import Endpoints
from mmjax.server.batches.journal import Journal, LineResponse
from mmjax.server.batches.lines import InputLine, Summary, read_lines, summarize
from mmjax.server.batches.protocol import (
    UNFINISHED,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchStatus,
    FileObject,
    RequestCounts,
)
from mmjax.server.batches.runner import run_lines
from mmjax.server.batches.store import BatchStore, StoredBatch
from mmjax.system.logger import get_logger

logger = get_logger(__name__)


class BatchWorker:
    """Of one event loop."""

    def __init__(
        self,
        store: BatchStore,
        endpoints: Endpoints,
        owners: Collection[str],
        *,
        max_line_bytes: int,
    ) -> None:
        """`owners`: the digests of the API keys that are valid; "" where there are none."""
        self._store = store
        self._endpoints = endpoints
        self._owners = owners
        self._max_line_bytes = max_line_bytes
        self._waiting: asyncio.Queue[StoredBatch] = asyncio.Queue()
        self._running: asyncio.Task[None] | None = None
        self._batch: StoredBatch | None = None
        """The one that is worked on, and its results."""
        self._journal: Journal | None = None

    def add(self, batch: StoredBatch) -> None:
        """Work on a batch, behind those before."""
        self._waiting.put_nowait(batch)

    async def cancel(self, batch: StoredBatch) -> None:
        """Work on a batch no longer; what has its result keeps it."""
        has_begun = batch.shown.status == "in_progress"
        _set_status(batch.shown, "cancelling")
        if batch is self._batch and self._running is not None:
            self._running.cancel()
        elif not has_begun:
            await self._end(batch, "cancelled")
            return
        await asyncio.to_thread(self._store.put_batch, batch)

    def count(self, shown: BatchObject) -> None:
        """Bring the counts of a batch up to date."""
        if self._journal is not None and self._batch is not None and shown is self._batch.shown:
            shown.request_counts.completed = self._journal.num_completed
            shown.request_counts.failed = self._journal.num_failed

    async def work(self) -> None:
        """Work for ever; first on what an earlier process left, if its owner still has a key."""
        for batch in list(self._store.batches.values()):
            if batch.shown.status in UNFINISHED:
                self.add(batch)
        while True:
            batch = await self._waiting.get()
            if batch.shown.status not in UNFINISHED:
                continue
            if batch.owner not in self._owners:
                await self._fail(batch, "invalid_api_key", "its API key is not valid any more")
                continue
            self._batch = batch
            self._running = asyncio.create_task(self._work_on(batch))
            try:
                await asyncio.wait({self._running})
            except asyncio.CancelledError:
                # The server ends; the next process goes on.
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
                raise
            ended, self._batch, self._running, self._journal = self._running, None, None, None
            if not await self._settle(batch, ended):
                return

    async def _settle(self, batch: StoredBatch, ended: asyncio.Task[None]) -> bool:
        """Note how the work on a batch ended; False if none can be worked on any more."""
        if ended.cancelled():
            await self._end(batch, "cancelled")
            return True
        error = ended.exception()
        if isinstance(error, EngineUnavailableError):
            logger.error("batches wait for the server's next start: %s", error)
            return False
        if error is not None:
            logger.error("the batch %s failed", batch.shown.id, exc_info=error)
            await self._fail(batch, "server_error", "the server failed on it; its log says why")
        return True

    async def _work_on(self, batch: StoredBatch) -> None:
        shown = batch.shown
        path = self._store.path_of(shown.input_file_id)
        summary = await asyncio.to_thread(summarize, path, self._max_line_bytes)
        if not summary.num_requests:
            await self._fail(batch, "empty_file", "the input has no lines; upload one that has")
            return
        output, errors = self._store.path_of(batch.output_id), self._store.path_of(batch.error_id)
        journal = await asyncio.to_thread(Journal, output, errors, summary)
        self._journal = journal
        try:
            if shown.status != "cancelling":
                await self._answer(batch, journal, summary)
        finally:
            await asyncio.to_thread(journal.close)
            self.count(shown)
        await self._end(batch, "cancelled" if shown.status == "cancelling" else "completed")

    async def _answer(self, batch: StoredBatch, journal: Journal, summary: Summary) -> None:
        shown = batch.shown
        shown.request_counts = RequestCounts(total=summary.num_requests)
        _set_status(shown, "in_progress")
        await asyncio.to_thread(self._store.put_batch, batch)
        lines = read_lines(
            self._store.path_of(shown.input_file_id),
            max_line_bytes=self._max_line_bytes,
            is_done=journal.is_done,
            url=shown.endpoint,
        )

        async def answer(line: InputLine) -> LineResponse:
            return await self._endpoints.answer(
                line.url, line.body, owner=batch.owner, gives_way=True
            )

        await run_lines(lines, journal, answer, max_in_work=self._endpoints.max_in_work)
        _set_status(shown, "finalizing")

    async def _fail(self, batch: StoredBatch, code: str, message: str) -> None:
        batch.shown.errors = BatchErrors(data=[BatchError(code=code, message=message)])
        await self._end(batch, "failed")

    async def _end(self, batch: StoredBatch, status: BatchStatus) -> None:
        """Show what there is of the output and the errors, and remember how it ended."""
        try:
            await asyncio.to_thread(self._keep_results, batch)
            _set_status(batch.shown, status)
            await asyncio.to_thread(self._store.put_batch, batch)
        except OSError as error:
            # The disk is full, say: the next process finds it unfinished, and goes on with it.
            logger.error("how the batch %s ended was not written: %s", batch.shown.id, error)
            if batch.shown.status in UNFINISHED:
                _set_status(batch.shown, "failed")

    def _keep_results(self, batch: StoredBatch) -> None:
        shown = batch.shown
        names = {"output_file_id": batch.output_id, "error_file_id": batch.error_id}
        for field, file_id in names.items():
            path = self._store.path_of(file_id)
            if not path.exists():
                continue
            if not path.stat().st_size:
                path.unlink()
                continue
            file = FileObject(
                id=file_id,
                bytes=path.stat().st_size,
                created_at=int(time.time()),
                filename=f"{shown.id}_{field.partition('_')[0]}.jsonl",
                purpose="batch_output",
            )
            self._store.put_file(batch.owner, file)
            setattr(shown, field, file_id)


def _set_status(shown: BatchObject, status: BatchStatus) -> None:
    shown.status = status
    setattr(shown, f"{status}_at", int(time.time()))
