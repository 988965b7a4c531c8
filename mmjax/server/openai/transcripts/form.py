"""Read a `multipart/form-data` body (RFC 7578) that lies in memory: fields and one file.

No field is copied before its length is known to be within a limit, and nothing is decoded that the
form's encoding does not have.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from email.parser import BytesHeaderParser
from email.utils import collapse_rfc2231_value
from typing import NamedTuple

from mmjax.errors import RequestValueError

MAX_FORM_PARTS = 64
MAX_HEADER_BYTES = 4096
"""Of one part."""
MAX_FIELD_BYTES = 64 * 2**10
_MAX_BOUNDARY_CHARS = 70
"""As RFC 2046 has it."""
_MAX_SHOWN_NAME = 64


@dataclass(frozen=True, slots=True)
class Form:
    """What a form holds."""

    fields: dict[str, list[str]] = field(default_factory=dict)
    """The values of each field, in their order."""
    files: dict[str, bytes] = field(default_factory=dict)


class PartHeader(NamedTuple):
    """What a part says of itself."""

    name: str
    filename: str | None
    """None: it is no file."""


def parse_form(body: bytes | bytearray, content_type: str) -> Form:
    """Return a form's parts; `RequestValueError` for a body that is none."""
    mark = b"--" + read_boundary(content_type)
    form = Form()
    for header, content in _split(body, mark):
        _add(form, header, content)
    return form


def read_boundary(content_type: str) -> bytes:
    """Return what stands between a form's parts; `RequestValueError` for another type."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary()
    is_form = message.get_content_type() == "multipart/form-data"
    if not is_form or not boundary or len(boundary) > _MAX_BOUNDARY_CHARS:
        raise RequestValueError(
            "the body must be a form, sent with `Content-Type: multipart/form-data; boundary=...`"
        )
    return boundary.encode("latin-1", "replace")


def read_part_header(header: bytes) -> PartHeader:
    """Return a part's header, read; `RequestValueError` if it names none."""
    headers = BytesHeaderParser().parsebytes(header)
    disposition = headers.get_content_disposition()
    name = headers.get_param("name", header="content-disposition")
    if disposition != "form-data" or not isinstance(name, str) or not name:
        raise RequestValueError(
            "a part of the form has no `Content-Disposition: form-data; name=...`; name each"
        )
    filename = headers.get_param("filename", header="content-disposition")
    if filename is not None:
        text = collapse_rfc2231_value(filename)
        filename = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return PartHeader(name, filename)


def _split(body: bytes | bytearray, mark: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the header and the content of each part."""
    start = body.find(mark)
    # Only at the beginning of a line is it a mark.
    if start > 0 and body[start - 2 : start] != b"\r\n":
        start = -1
    if start < 0:
        raise cut_off()
    start += len(mark)
    for _ in range(MAX_FORM_PARTS + 1):
        if body[start : start + 2] == b"--":
            return
        header_end = body.find(b"\r\n\r\n", start, start + MAX_HEADER_BYTES)
        end = body.find(b"\r\n" + mark, start if header_end < 0 else header_end + 2)
        if body[start : start + 2] != b"\r\n" or header_end < 0 or end < 0:
            raise cut_off()
        yield bytes(body[start + 2 : header_end + 2]), memoryview(body)[header_end + 4 : end]
        start = end + 2 + len(mark)
    raise RequestValueError(f"the form has more than {MAX_FORM_PARTS} parts; send fewer")


def _add(form: Form, header: bytes, content: memoryview) -> None:
    name, filename = read_part_header(header)
    shown = name[:_MAX_SHOWN_NAME]
    if filename is not None:
        if name in form.files:
            raise RequestValueError(f"the form has two files `{shown}`; send one", param=shown)
        form.files[name] = bytes(content)
        return
    if len(content) > MAX_FIELD_BYTES:
        raise RequestValueError(
            f"`{shown}` has {len(content)} bytes; a field may have {MAX_FIELD_BYTES}, unless it is "
            "a file (`filename=...`)",
            param=shown,
        )
    try:
        text = str(content, "utf-8")
    except UnicodeDecodeError:
        raise RequestValueError(f"`{shown}` is not UTF-8; encode it so", param=shown) from None
    form.fields.setdefault(name, []).append(text)


def cut_off() -> RequestValueError:
    """Return the error of a form that is not whole."""
    return RequestValueError(
        "the form is cut off, or its parts are not as `multipart/form-data` has them; send it whole"
    )
