"""Read a request's body, from the socket to validated fields, in bounded time and memory.

Decoding and validation are calls into C and Rust that hold the GIL: the event loop is blocked while
one runs, in any thread. So the work is bounded before, by counting the JSON's elements as it is
received.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from email.message import Message
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import ClientDisconnect, Request

from mmjax.errors import BodyTimeoutError, RequestValueError, ShuttingDownError

ModelT = TypeVar("ModelT", bound=BaseModel)

API_KEY_STATE = "api_key_digest"
"""Entry of a request's state with the digest of its API key."""

MAX_VALUES = 2**18
"""Elements of all lists and objects; most are token ids."""

MAX_NODES = 2**16
"""Lists, objects and strings (also keys), which cost more than numbers."""

MAX_ESCAPES = 2**21
"""Backslashes in strings, which are decoded one by one."""

MAX_NON_ASCII_BYTES = 8 * 2**20
"""Bytes that are not ASCII in all strings together; encoded media are ASCII."""

MAX_TEXT_BYTES = 4 * 2**20
"""Bytes of one string that is not ASCII, which takes up to four a character in memory."""

MAX_STRUCTURE_BYTES = 4 * 2**20
"""Everything outside of strings: numbers, punctuation and spaces."""

MAX_NUMBER_CHARS = 40
"""Characters of one number: parsing it takes time quadratic in its length."""

_INLINE_BYTES = 16 * 2**10
"""Smaller bodies are parsed in the event loop, in less time than a thread takes to start."""

_PIECE_BYTES = 64 * 2**10
"""That are counted at a time: a text within one piece is short."""

_MAX_REREAD_BYTES = 64 * 2**10

_ASCII = bytes(range(128))
_NUMBER_CHARS = bytes(ord("0") if chr(i) in "0123456789+-.eE" else ord(" ") for i in range(256))
_LONG_NUMBER = b"0" * (MAX_NUMBER_CHARS + 1)

UNKNOWN_FIELDS = "unknown_fields"
"""Type of the error about all unknown fields of an object."""

REPLACED_FIELDS: Mapping[str, str] = {
    "guided_json": """give `structured_outputs: {"json": ...}`, or a `response_format`""",
    "guided_regex": """give `structured_outputs: {"regex": ...}`""",
    "guided_choice": """give `structured_outputs: {"choice": [...]}`""",
    "guided_grammar": """give `structured_outputs: {"grammar": ...}`""",
    "guided_whitespace_pattern": """give `structured_outputs: {"whitespace_pattern": ...}`""",
    "guided_decoding_backend": "it is always llguidance; leave it out",
}
"""Names that vLLM had before -> what to give instead."""

_MAX_ERRORS_SHOWN = 3
_MAX_NAME_CHARS = 64
_LEAST_ALIKE = 0.8
_MAX_PATH_CHARS = 256


def owner_of(request: Request) -> str:
    """Return the digest of the API key that a request bears; "" where there are none."""
    return getattr(request.state, API_KEY_STATE, "")


class RequestReader:
    """Reads the bodies of all requests."""

    def __init__(self, silence_s: float) -> None:
        """`silence_s`: seconds without data after which a body is given up; 0: never."""
        self._silence_s = silence_s
        self.is_stopping = False
        """Whether the server drains."""
        self._open: set[asyncio.Timeout] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mmjax-parse")
        self._turn = asyncio.Lock()
        self._count_turn = asyncio.Lock()

    async def read(self, request: Request, model: type[ModelT]) -> ModelT:
        """Return the body as a `model`.

        Raises RequestError, or starlette's ClientDisconnect.
        """
        body = await self.receive(request)
        if not _is_json(request.headers.get("content-type", "")):
            raise _no_object()
        return await self._parse(body, model, request.is_disconnected)

    async def read_line(self, body: bytes, model: type[ModelT]) -> ModelT:
        """Return a body that is there as a whole, and of no client that could leave."""
        await self._count(JsonScan(), body)
        return await self._parse(body, model, None)

    async def _parse(
        self,
        body: bytes | bytearray,
        model: type[ModelT],
        has_left: Callable[[], Awaitable[bool]] | None,
    ) -> ModelT:
        if len(body) <= _INLINE_BYTES:
            return parse(body, model)
        await self._turn.acquire()
        loop, start = asyncio.get_running_loop(), time.perf_counter()
        try:
            # The client may have left while the request waited for its turn.
            if has_left is not None and await has_left():
                raise ClientDisconnect
            return await loop.run_in_executor(self._pool, parse, body, model)
        finally:
            # The event loop was blocked for part of this time: leave it as much before the next.
            loop.call_later(time.perf_counter() - start, self._turn.release)

    def stop(self) -> None:
        """Refuse incomplete bodies from now on."""
        self.is_stopping = True
        for timeout in self._open:
            # One whose time is over, but whose task has not run since, takes no other.
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def receive(self, request: Request, *, is_json: bool = True) -> bytearray:
        """Return the body as it comes, the elements of JSON counted; raises as `read` does."""
        body, scan = bytearray(), JsonScan()

        async def take(chunk: bytes) -> None:
            if is_json:
                await self._count(scan, chunk)
            body.extend(chunk)

        await self.receive_each(request, take)
        return body

    async def receive_each(
        self, request: Request, take: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Call `take` with each piece of a body, as it comes; raises as `read` does."""
        try:
            async with asyncio.timeout(self._seconds_left()) as timeout:
                self._open.add(timeout)
                try:
                    async for chunk in request.stream():
                        await take(chunk)
                        seconds = self._seconds_left()
                        now = asyncio.get_running_loop().time()
                        timeout.reschedule(None if seconds is None else now + seconds)
                finally:
                    self._open.discard(timeout)
        except TimeoutError:
            if self.is_stopping:
                raise ShuttingDownError from None
            raise BodyTimeoutError(self._silence_s) from None

    async def _count(self, scan: "JsonScan", chunk: bytes) -> None:
        """Count a chunk; of large ones, a piece of one in each turn of the event loop."""
        if len(chunk) <= _INLINE_BYTES:
            scan.feed(chunk)
            return
        # A body that is there as a whole is one chunk.
        for place in range(0, len(chunk), _PIECE_BYTES):
            async with self._count_turn:
                scan.feed(chunk[place : place + _PIECE_BYTES])
                # Else those of all clients would be counted in one turn.
                await asyncio.sleep(0)

    def _seconds_left(self) -> float | None:
        # 0: read what has been received, and do not wait.
        return 0.0 if self.is_stopping else self._silence_s or None


class JsonScan:
    """Counts the elements of a JSON text, chunk by chunk, without decoding it.

    Invalid JSON may be miscounted after its first error, where a decoder stops.
    """

    def __init__(self) -> None:
        self._num_values = 0
        self._num_lists = 0
        self._num_quotes = 0
        self._num_escapes = 0
        self._num_non_ascii_bytes = 0
        self._num_structure_bytes = 0
        self._is_in_string = False
        self._is_escaped = False
        # Of the string that continues in the next chunk.
        self._num_text_bytes = 0
        self._is_text_ascii = True
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Count a chunk; RequestValueError if a limit is exceeded."""
        if not chunk:
            return
        if not chunk.isascii():
            self._num_non_ascii_bytes += len(chunk.translate(None, _ASCII))
            _check(self._num_non_ascii_bytes, MAX_NON_ASCII_BYTES, "bytes that are not ASCII")
        chunk = self._without_escapes(chunk)
        self._num_quotes += chunk.count(b'"')
        self._check_nodes()
        parts = chunk.split(b'"')
        structure = b"".join(parts[int(self._is_in_string) :: 2])
        if self._is_in_string:
            self._count_text(parts[0])
        self._is_in_string ^= len(parts) % 2 == 0
        if self._is_in_string and len(parts) > 1:
            self._num_text_bytes, self._is_text_ascii = 0, True
            self._count_text(parts[-1])
        if structure:
            self._count_structure(structure)

    def _count_text(self, part: bytes) -> None:
        # NOTE: a string within one chunk is not counted, as it is short (`_PIECE_BYTES`).
        self._num_text_bytes += len(part)
        has_escapes = self._num_escapes > 0
        self._is_text_ascii &= part.isascii() and not (has_escapes and b"\\u" in part)
        if not self._is_text_ascii:
            _check(self._num_text_bytes, MAX_TEXT_BYTES, "bytes in a text that is not ASCII")

    def _count_structure(self, structure: bytes) -> None:
        self._num_structure_bytes += len(structure)
        _check(self._num_structure_bytes, MAX_STRUCTURE_BYTES, "bytes outside of texts")
        self._num_values += structure.count(b",")
        _check(self._num_values, MAX_VALUES, "values")
        self._num_lists += structure.count(b"{") + structure.count(b"[")
        self._check_nodes()
        structure = self._tail + structure
        if _LONG_NUMBER in structure.translate(_NUMBER_CHARS):
            raise RequestValueError(
                f"the body holds a number of more than {MAX_NUMBER_CHARS} characters; shorten it"
            )
        self._tail = structure[-MAX_NUMBER_CHARS:]

    def _check_nodes(self) -> None:
        _check(self._num_lists + self._num_quotes // 2, MAX_NODES, "lists, objects and texts")

    def _without_escapes(self, chunk: bytes) -> bytes:
        """Remove escaped backslashes and quotes, so that every quote left delimits a string."""
        if self._is_escaped:
            self._is_text_ascii &= not chunk.startswith(b"u")
            chunk = chunk[1:]
        if b"\\" in chunk:
            self._num_escapes += chunk.count(b"\\")
            _check(self._num_escapes, MAX_ESCAPES, "backslashes")
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._is_escaped = chunk.endswith(b"\\")
        return chunk


def _check(count: int, limit: int, name: str) -> None:
    if count > limit:
        raise RequestValueError(
            f"the body holds more than {limit} {name}; send fewer of them at once"
        )


def parse(body: bytes | bytearray, model: type[ModelT]) -> ModelT:
    """Return the fields of a body, after JsonScan; RequestError if they are invalid."""
    data = _decode(body)
    if not isinstance(data, dict):
        raise _no_object()
    return validated(model, data)


def _decode(body: bytes | bytearray) -> Any:
    if not body:
        raise RequestValueError("the body is empty; send one JSON object")
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        reason = str(error).replace(" at line ", ", line ")
    if len(body) <= _MAX_REREAD_BYTES:
        # A lone surrogate is valid JSON, but not a valid string: name the field.
        try:
            data = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            data = None
        _refuse_surrogates(data)
    raise RequestValueError(f"the body is not valid JSON ({reason}); send one JSON object")


def _refuse_surrogates(data: Any) -> None:
    """Raise RequestValueError for a text of JSON data that holds half of a surrogate pair."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), data)]
    while waiting:
        place, value = waiting.pop()
        names = list(value) if isinstance(value, dict) else []
        for text in [value, *names]:
            if isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text):
                path = field_path(place)
                raise RequestValueError(
                    f"`{path or 'the body'}` holds half of a surrogate pair, which is no Unicode; "
                    "mend its encoding",
                    param=path or None,
                )
        pairs = value.items() if isinstance(value, dict) else []
        pairs = enumerate(value) if isinstance(value, list) else pairs
        waiting += [((*place, name), one) for name, one in pairs]


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _no_object() -> RequestValueError:
    return RequestValueError(
        "the body must be a JSON object, sent with `Content-Type: application/json`"
    )


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    is_application = message.get_content_maintype() == "application"
    return is_application and (subtype == "json" or subtype.endswith("+json"))


# ---- fields -------------------------------------------------------------------------------------


def unknown_fields_error(names: Sequence[str], known: Collection[str]) -> PydanticCustomError:
    """Return one error for all of `names`, of which it lists the first, with the like of `known`.

    A field is about a dozen characters long: a name of `_MAX_NAME_CHARS` is compared in no time.
    """
    shown = [name[:_MAX_NAME_CHARS] for name in names[:_MAX_ERRORS_SHOWN]]
    alike = [
        next(iter(get_close_matches(name, known, n=1, cutoff=_LEAST_ALIKE)), "") for name in shown
    ]
    return PydanticCustomError(
        UNKNOWN_FIELDS,
        "unknown fields",
        {"names": shown, "alike": alike, "num_more": len(names) - len(shown)},
    )


def validated(model: type[ModelT], fields: Mapping[str, Any]) -> ModelT:
    """Return `fields` as a `model`; RequestValueError names the wrong ones."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        refusal = refusal_of(error)
    # Outside of `except`, so that the error does not reference pydantic's, and so the body.
    raise refusal


def refusal_of(error: ValidationError) -> RequestValueError:
    """Return a 400 that names the first few wrong fields.

    The models stop at the first error of a list or a dict, so there are few in all.
    """
    messages: dict[str, str] = {}
    num_more = 0
    for item in error.errors(include_url=False, include_input=False):
        path = field_path(item["loc"])
        if item["type"] == UNKNOWN_FIELDS:
            context = item.get("ctx", {})
            num_more += context["num_more"]
            for name, alike in zip(context["names"], context["alike"], strict=True):
                field = f"{path}.{name}" if path else name
                messages[field] = _unknown_message(field, alike)
        else:
            # Each member of a union has an error: keep the first.
            messages.setdefault(path, _message(path, item))
    shown = list(messages.values())[:_MAX_ERRORS_SHOWN]
    num_more += len(messages) - len(shown)
    text = "; ".join(shown)
    if num_more:
        text += f"; and {num_more} more"
    return RequestValueError(text, param=next(iter(messages), "") or None)


def field_path(loc: Sequence[str | int]) -> str:
    """Return pydantic's location as a path: `messages[0].content`."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        # Names of union members, and pydantic's own steps such as `[key]`, have other characters.
        elif step[:_MAX_PATH_CHARS].replace("_", "").replace("-", "").isalnum() and (
            step not in _UNION_MARKS
        ):
            path += f".{step[:_MAX_PATH_CHARS]}" if path else step[:_MAX_PATH_CHARS]
    return path[:_MAX_PATH_CHARS]


_OBJECT = "input should be an object"
_UNION_MARKS = frozenset({"str", "constrained-str", "int", "float", "bool", "dict", "none"})
"""Steps of pydantic's location that name a union's member."""


def _unknown_message(field: str, alike: str) -> str:
    if field in REPLACED_FIELDS:
        return f"`{field}` is an older name, which mmjax does not take: {REPLACED_FIELDS[field]}"
    advice = f"do you mean `{alike}`?" if alike else "remove it"
    return f"`{field}` is not a field that mmjax knows; {advice}"


def _message(path: str, error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return f"`{path}` is missing; give it"
    # Python's words for it would name classes of ours.
    text = _OBJECT if error["type"] in ("dict_type", "model_type") else error["msg"]
    return f"`{path}`: {text[:1].lower()}{text[1:]}"
