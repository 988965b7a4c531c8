"""OpenAI's objects of /v1/files and /v1/batches, and what clients send there."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from mmjax.server.batches.lines import Url
from mmjax.server.openai.protocol import Object, Strict
from mmjax.server.openai.responses_api.protocol import Metadata, PageQuery

BatchStatus = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "cancelling",
    "cancelled",
]
UNFINISHED: frozenset[BatchStatus] = frozenset(
    {"validating", "in_progress", "finalizing", "cancelling"}
)


class FileObject(msgspec.Struct, kw_only=True):
    """A file that clients see."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    """What its client called it: a label, and no path of ours."""
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class RequestCounts(msgspec.Struct, kw_only=True):
    """`request_counts`."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, kw_only=True):
    """Why a batch failed as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """`errors`."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    created_at: int
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    expires_at: int | None = None
    expired_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class CreateBatchRequest(Strict):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=128)]
    endpoint: Url
    completion_window: Literal["24h"] = "24h"
    """No effect: a batch is worked on until it is done."""
    metadata: Metadata | None = None
    output_expires_after: Annotated[Object | None, Field(exclude=True)] = None
    """No effect: files are kept until they are deleted."""


class UploadFile(Strict):
    """The form of POST /v1/files; the file is read as it comes."""

    purpose: Literal["batch"]
    file: Any = None
    expires_after: Annotated[Object | None, Field(exclude=True)] = None
    """No effect, as `output_expires_after` of batches."""


class ListQuery(PageQuery):
    """The query of the lists."""

    purpose: Annotated[str, Field(max_length=64)] | None = None
    """Of files alone."""


FilesAtOnce = Annotated[int, Field(ge=1, le=10_000)]
"""As OpenAI has it, of files alone."""


class FilesQuery(ListQuery):
    """The query of the list of files, of which more come at a time."""

    limit: FilesAtOnce = 20
