"""The input of a batch: OpenAI's lines of JSON, each a request; read one by one, never together."""

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3

from mmjax.errors import ConfigError

Url: TypeAlias = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
]
"""The routes that a line may name."""

_ID_BYTES = 16


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line, of which the body is read by the route."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    url: Url
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class _IdAlone(msgspec.Struct):
    """What a wrong line may still be known by."""

    custom_id: str | None = None


class InputLine(NamedTuple):
    """A line that has to be answered, if only by its error."""

    number: int
    """As editors count, from 1."""
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: str = ""
    """What is wrong with the line itself."""


class Summary(NamedTuple):
    """What is known of an input once it was read to its end."""

    digest: str
    num_lines: int
    """With those that are blank."""
    num_requests: int


def summarize(path: Path, max_line_bytes: int) -> Summary:
    """Read an input once, to know it again and to say how much is left; ConfigError."""
    try:
        if not path.is_file():
            raise ConfigError(f"the input {path} is no file; give one of JSON lines")
        digest = blake3(max_threads=1).update_mmap(path).hexdigest()
        num_lines = num_requests = 0
        with path.open("rb") as file:
            for _, line in _raw_lines(file, max_line_bytes):
                num_lines += 1
                num_requests += not line.isspace()
    except OSError as error:
        raise ConfigError(
            f"the input {path} cannot be read ({error.strerror or error}); give another one"
        ) from error
    return Summary(digest, num_lines, num_requests)


def read_lines(
    path: Path,
    *,
    max_line_bytes: int,
    is_done: Callable[[int], bool],
    url: str | None = None,
) -> Iterator[InputLine]:
    """Yield the lines that are not done, by their numbers.

    It keeps a hash of each `custom_id`, some 110 bytes a line, so that the second line of an id is
    an error.

    Args:
        path: The input.
        max_line_bytes: A longer line is an error, and is not kept in memory.
        is_done: Whether a line of that number has its result.
        url: The only one that lines may name; None: any of `Url`.
    """
    decoder = msgspec.json.Decoder(BatchLine)
    seen: set[bytes] = set()
    with path.open("rb") as file:
        for number, raw in _raw_lines(file, max_line_bytes):
            if raw.isspace():
                continue
            line = _parse(decoder, number, raw, max_line_bytes, url)
            if line.custom_id is not None and not line.error:
                key = blake3(line.custom_id.encode()).digest(_ID_BYTES)
                if key in seen:
                    line = InputLine(
                        number,
                        line.custom_id,
                        error="a line before has the same `custom_id`; give each line its own",
                    )
                seen.add(key)
            if not is_done(number):
                yield line


def _raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number; of one that is too long, its beginning.

    The mark of UTF-8 with which some editors begin a file is no part of its first line.
    """
    if file.read(len(BOM_UTF8)) != BOM_UTF8:
        file.seek(0)
    for number in count(1):
        line = rest = file.readline(max_bytes + 1)
        if not line:
            return
        while len(rest) > max_bytes and not rest.endswith(b"\n"):
            rest = file.readline(max_bytes + 1)
        yield number, line


def _parse(
    decoder: msgspec.json.Decoder[BatchLine],
    number: int,
    raw: bytes,
    max_bytes: int,
    url: str | None,
) -> InputLine:
    if len(raw) > max_bytes:
        return InputLine(
            number,
            None,
            error=f"the line has more than {max_bytes} bytes (`--max-request-bytes`); make its "
            "media smaller, or give their URLs",
        )
    try:
        line = decoder.decode(raw)
    except msgspec.ValidationError as error:
        return InputLine(number, _find_id(raw), error=f"the line is no request: {error}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return InputLine(number, None, error=f"the line is not valid JSON: {error}")
    if url is not None and line.url != url:
        return InputLine(
            number,
            line.custom_id,
            error=f"`url` is {line.url}, but the batch's `endpoint` is {url}; make them equal",
        )
    return InputLine(number, line.custom_id, line.url, bytes(line.body))


def _find_id(raw: bytes) -> str | None:
    try:
        return msgspec.json.decode(raw, type=_IdAlone).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
