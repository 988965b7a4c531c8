"""Files and batches of a directory, so that they outlive the server's process.

What a client sends is looked up in a table, and never becomes a path: a file's name is its id, and
ids are drawn here.
"""

import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from mmjax.errors import CapacityError, ConfigError, RequestValueError
from mmjax.server.batches.protocol import UNFINISHED, BatchObject, FileObject

MAX_OBJECTS = 10_000
"""Files, and batches: no more files are taken, and the oldest batches that ended are forgotten."""

_StoredT = TypeVar("_StoredT", "StoredFile", "StoredBatch")


class ItemNotFoundError(RequestValueError):
    """A file or a batch that is not there, or is another's."""

    status = 404
    code = "not_found"


class StoredFile(msgspec.Struct):
    """A file's record; its content lies beside it."""

    owner: str
    """The digest of the API key that it was sent with."""
    shown: FileObject


class StoredBatch(msgspec.Struct):
    """A batch's record."""

    owner: str
    shown: BatchObject
    output_id: str
    """Of the file that the answers go to; shown once there is one."""
    error_id: str


class BatchStore:
    """The records, in memory and on the disk. Methods that write are for threads."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Read what is there; ConfigError if the directory cannot be used, or is in use."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._writing = threading.Lock()
        with ExitStack() as opened, _explaining(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = opened.enter_context((directory / "lock").open("w"))
            fcntl.flock(self._lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            files = [_read(path, StoredFile) for path in directory.glob("file-*.json")]
            batches = [_read(path, StoredBatch) for path in directory.glob("batch_*.json")]
            opened.pop_all()
        self.files = {one.shown.id: one for one in sorted(files, key=_created_at)}
        self.batches = {one.shown.id: one for one in sorted(batches, key=_created_at)}
        self._drop_leftovers()

    def close(self) -> None:
        """Let another process have the directory."""
        self._lock.close()

    def check_room(self, num_bytes: int = 0) -> None:
        """Raise CapacityError without room for a file of so many bytes."""
        total = sum(one.shown.bytes for one in list(self.files.values())) + num_bytes
        if len(self.files) >= MAX_OBJECTS or total > self._max_bytes:
            raise CapacityError(
                f"the server keeps {len(self.files)} files, and takes {MAX_OBJECTS} of together "
                f"{self._max_bytes} bytes (`--max-batch-dir-bytes`); delete some, or wait",
                retry_after_s=60.0,
            )

    def check_unfinished(self) -> None:
        """Raise CapacityError if as many batches as are kept have not ended: none is forgotten."""
        in_work = [one for one in list(self.batches.values()) if one.shown.status in UNFINISHED]
        if len(in_work) >= MAX_OBJECTS:
            raise CapacityError(
                f"{len(in_work)} batches have not ended, and the server takes no more; cancel "
                "some, or wait",
                retry_after_s=60.0,
            )

    def path_of(self, file_id: str) -> Path:
        """Return where the content of a file lies, of an id that was drawn here."""
        return self._directory / file_id

    def put_file(self, owner: str, shown: FileObject) -> None:
        """Keep a file, whose content is there."""
        stored = StoredFile(owner, shown)
        self._write(shown.id, stored)
        self.files[shown.id] = stored

    def put_batch(self, stored: StoredBatch) -> None:
        """Keep a batch, or what has become of it."""
        self._write(stored.shown.id, stored)
        self.batches[stored.shown.id] = stored
        ended = [one for one in list(self.batches.values()) if one.shown.status not in UNFINISHED]
        for one in ended[: max(0, len(self.batches) - MAX_OBJECTS)]:
            del self.batches[one.shown.id]
            self._record_of(one.shown.id).unlink(missing_ok=True)

    def file(self, file_id: str, owner: str, *, param: str | None = None) -> StoredFile:
        """Return an owner's file; ItemNotFoundError."""
        stored = self.files.get(file_id)
        if stored is None or stored.owner != owner:
            raise ItemNotFoundError("there is no such file (any more)", param=param)
        return stored

    def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return an owner's batch; ItemNotFoundError."""
        stored = self.batches.get(batch_id)
        if stored is None or stored.owner != owner:
            raise ItemNotFoundError("there is no such batch (any more)")
        return stored

    def delete_file(self, file_id: str, owner: str) -> None:
        """Delete an owner's file; RequestValueError while a batch reads it."""
        self.file(file_id, owner)
        for one in list(self.batches.values()):
            if one.shown.input_file_id == file_id and one.shown.status in UNFINISHED:
                raise RequestValueError(
                    f"the batch {one.shown.id} reads this file; cancel it, or wait for its end"
                )
        del self.files[file_id]
        self._record_of(file_id).unlink(missing_ok=True)
        self.path_of(file_id).unlink(missing_ok=True)

    def _record_of(self, item_id: str) -> Path:
        return self._directory / f"{item_id}.json"

    def _write(self, item_id: str, record: StoredFile | StoredBatch) -> None:
        path = self._record_of(item_id)
        draft = path.with_suffix(".draft")
        with self._writing, draft.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
            draft.replace(path)

    def _drop_leftovers(self) -> None:
        """Remove what a process that was ended had begun, but for what batches go on with."""
        in_work = [one for one in self.batches.values() if one.shown.status in UNFINISHED]
        known = {*self.files, *(name for one in in_work for name in (one.output_id, one.error_id))}
        for path in [*self._directory.glob("*.draft"), *self._directory.glob("file-*")]:
            if path.suffix == ".draft" or (not path.suffix and path.name not in known):
                path.unlink(missing_ok=True)


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return prefix + secrets.token_hex(16)


@contextmanager
def _explaining(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"`batch_dir` {directory} cannot be used ({error}); is it another server's? Give "
            "another one"
        ) from error


def _read(path: Path, kind: type[_StoredT]) -> _StoredT:
    return msgspec.json.decode(path.read_bytes(), type=kind)


def _created_at(stored: StoredFile | StoredBatch) -> int:
    return stored.shown.created_at
