"""The output of a batch: a line for each result, so that what is there need not be done again.

A result's `id` holds the digest of the input and the line's number: the output alone says what it
is the output of, and which lines it answers.
"""

import fcntl
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import msgspec

from mmjax.errors import ConfigError
from mmjax.server.batches.lines import InputLine, Summary

SYNC_INTERVAL_S = 5.0
"""A power failure costs the results of so many seconds, which are computed again."""

_ID = re.compile(r"batch_req_([0-9a-f]{24})_([0-9]{1,12})")
_DIGEST_CHARS = 24
_BEGINNING = b'{"id":"batch_req_'


class LineResponse(msgspec.Struct):
    """`response` of a result: what the route answers."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    """`error` of a result: why no route was asked."""

    message: str
    code: str = "invalid_line"


class LineResult(msgspec.Struct):
    """A line of the output, in OpenAI's form."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None


class _IdOfResult(msgspec.Struct):
    id: str


class Journal:
    """Results of one input: `output` has the answers, `errors` the others, if there are any.

    They are written by one thread at a time, one behind the other; killed in the middle, the next
    journal drops the torn line. Only one process has an output at a time.
    """

    def __init__(self, output: Path, errors: Path, summary: Summary) -> None:
        """Go on with what is there; ConfigError if it is not this input's."""
        self._summary = summary
        self._output_path, self._error_path = output, errors
        self._done = bytearray(summary.num_lines + 1)
        self._lock = threading.Lock()
        self._synced_at = time.monotonic()
        self._output = self._open(output)
        self._errors: FileIO | None = None
        try:
            _take(self._output, output)
            self.num_completed = self._resume(output)
            self.num_failed = self._resume(errors) if errors.exists() else 0
        except BaseException:
            self._output.close()
            raise

    @property
    def num_done(self) -> int:
        """Lines that have a result."""
        return self.num_completed + self.num_failed

    def is_done(self, number: int) -> bool:
        """Return whether a line had its result before."""
        return number < len(self._done) and self._done[number] == 1

    def write(self, results: Iterable[tuple[InputLine, LineResponse | LineError]]) -> None:
        """Write the results of lines; when it returns, no death of this process loses them."""
        answered, failed = list[bytes](), list[bytes]()
        for line, answer in results:
            response = answer if isinstance(answer, LineResponse) else None
            error = answer if isinstance(answer, LineError) else None
            result = LineResult(self._id_of(line), line.custom_id, response, error)
            is_answered = response is not None and response.status_code == 200
            (answered if is_answered else failed).append(msgspec.json.encode(result) + b"\n")
        with self._lock:
            if answered:
                with _explaining(self._output_path):
                    _append(self._output, answered)
                self.num_completed += len(answered)
            if failed:
                with _explaining(self._error_path):
                    _append(self._open_errors(), failed)
                self.num_failed += len(failed)
            if time.monotonic() - self._synced_at >= SYNC_INTERVAL_S:
                with _explaining(self._output_path):
                    self._sync()

    def close(self) -> None:
        """Write everything to the disk."""
        with self._lock:
            self._sync()
            self._output.close()
            if self._errors is not None:
                self._errors.close()

    def _id_of(self, line: InputLine) -> str:
        return f"batch_req_{self._summary.digest[:_DIGEST_CHARS]}_{line.number}"

    def _sync(self) -> None:
        for file in (self._output, self._errors):
            if file is not None:
                os.fsync(file.fileno())
        self._synced_at = time.monotonic()

    def _open_errors(self) -> FileIO:
        if self._errors is None:
            self._errors = self._open(self._error_path)
        return self._errors

    def _open(self, path: Path) -> FileIO:
        with _explaining(path):
            if path.exists() and not path.is_file():
                raise ConfigError(f"the output {path} is no file; give another one")
            return path.open("ab", buffering=0)

    def _resume(self, path: Path) -> int:
        """Note which lines have their result in a file, and drop a torn last one."""
        num_found = end = 0
        is_torn = False
        with _explaining(path), path.open("r+b") as file:
            beginning = file.read(len(_BEGINNING))
            if not _BEGINNING.startswith(beginning):
                raise _not_ours(path)
            file.seek(0)
            for line in file:
                is_whole = self._note(line, path)
                if is_whole and is_torn:
                    raise ConfigError(
                        f"line {num_found + 1} of {path} is damaged, and others follow; take it "
                        "out, or give another output"
                    )
                is_torn |= not is_whole
                num_found += is_whole
                end += len(line) if is_whole else 0
            if is_torn:
                file.truncate(end)
                os.fsync(file.fileno())
        return num_found

    def _note(self, line: bytes, path: Path) -> bool:
        """Note a result; False if the line is torn; ConfigError if it is no result of ours."""
        if not line.endswith(b"\n"):
            return False
        try:
            result_id = msgspec.json.decode(line, type=_IdOfResult).id
        except msgspec.ValidationError:
            raise _not_ours(path) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        found = _ID.fullmatch(result_id)
        if found is None or found[1] != self._summary.digest[:_DIGEST_CHARS]:
            raise _not_ours(path)
        number = int(found[2])
        if number > self._summary.num_lines or self._done[number]:
            raise _not_ours(path)
        self._done[number] = 1
        return True


def _append(file: FileIO, lines: list[bytes]) -> None:
    """Write lines, or none of them: those of a full disk are done again, and none is torn."""
    end, data = os.fstat(file.fileno()).st_size, memoryview(b"".join(lines))
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the output {path} cannot be written ({error.strerror or error}); give another one"
        ) from error


def _take(file: FileIO, path: Path) -> None:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"another process writes to {path} ({error.strerror}); wait for its end"
        ) from error


def _not_ours(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} holds something else than results of this input (was the input changed since?); "
        "move it away, or give another output"
    )
