"""Read a form as it comes, its file to the disk: at no time is it in memory."""

from collections.abc import Callable
from typing import BinaryIO

from mmjax.errors import RequestError, RequestValueError
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
