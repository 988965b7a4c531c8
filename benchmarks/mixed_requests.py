"""What different clients send, drawn at random: pictures, streams, bad input, clients that leave.

Each draw is one conversation with the server, which ends as it should (an `Outcome`), or raises:
`WrongAnswerError` where the server did wrong, `UnavailableError` where it had no engine.
"""

import asyncio
import base64
import io
import json
import math
import random
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from PIL import Image, ImageDraw

from benchmarks.http_load import make_head, read_chunks, read_status
from benchmarks.leaving_clients import STAGES, leave

NUM_KNOWN = 8
"""Pictures that are asked about again and again."""
TIMEOUT_S = 1800.0
"""Long, so that a machine that stands still for a while is no wrong answer."""

_CHAT = "/v1/chat/completions"
_COLORS = ("red", "green", "blue", "yellow", "purple", "orange")
_QUESTION = "What color is the circle?"

Ending = Literal["answered", "refused", "left"]


class WrongAnswerError(Exception):
    """The server did what it must not do; the message says what."""


class UnavailableError(Exception):
    """The server answered that it has no engine, or no room, at present."""


class Outcome(NamedTuple):
    """How one conversation went."""

    kind: str
    ending: Ending
    seconds: float
    first_s: float = math.nan
    """To a stream's first token."""


class Answer(NamedTuple):
    """What came back over one connection."""

    status: int
    body: bytes
    first_s: float

    @property
    def fields(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream."""
        lines = self.body.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class MixedClient:
    """Draws and sends requests to one server, and compares answers that must be equal."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._known = [make_picture(random.Random(seed)) for seed in range(NUM_KNOWN)]
        self._texts: dict[int, str] = {}
        """What was answered about a known picture the first time."""
        self._kinds_to_come = list(KINDS)
        """So that each occurs, however short a run is."""

    async def send_any(self, rng: random.Random) -> Outcome:
        """Have one conversation: of each kind one, and then of random kinds."""
        if self._kinds_to_come:
            kind = self._kinds_to_come.pop()
        else:
            weights = [weight for weight, _ in KINDS.values()]
            (kind,) = rng.choices(list(KINDS), weights)
        start = time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                ending, first_s = await KINDS[kind][1](self, rng)
        except TimeoutError:
            raise WrongAnswerError(f"{kind}: no end within {TIMEOUT_S:.0f} s") from None
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise WrongAnswerError(f"{kind}: {type(error).__name__}") from error
        except WrongAnswerError as error:
            raise WrongAnswerError(f"{kind}: {error}") from error
        return Outcome(kind, ending, time.perf_counter() - start, first_s)

    async def exchange(self, method: str, path: str, body: Any = None) -> Answer:
        """Send one request, and read its answer to the end."""
        data = body if isinstance(body, bytes) else b"" if body is None else _encode(body)
        start, first_s = time.perf_counter(), math.nan
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        try:
            writer.write(make_head(self._port, data, method=method, path=path) + data)
            status = await read_status(reader)
            chunks = []
            async for chunk in read_chunks(reader):
                first_s = time.perf_counter() - start if not chunks else first_s
                chunks.append(chunk)
        finally:
            writer.transport.abort()
        return Answer(status, b"".join(chunks), first_s)

    async def expect_200(self, method: str, path: str, body: Any = None) -> Answer:
        """Send one request that is right; raises where it is not answered whole."""
        answer = await self.exchange(method, path, body)
        if answer.status in (429, 503):
            raise UnavailableError(answer.body.decode())
        if answer.status != 200:
            raise WrongAnswerError(f"{answer.status} {answer.body.decode()[:300]}")
        return answer

    def check_known(self, number: int, text: str) -> None:
        """Raise unless a known picture was answered as it was the first time."""
        expected = self._texts.setdefault(number, text)
        if text != expected:
            raise WrongAnswerError(f"known picture {number}: {text!r}, before {expected!r}")

    # ---- kinds of conversations -----------------------------------------------------------------

    async def ask_about_new_picture(self, rng: random.Random) -> tuple[Ending, float]:
        """Ask about one that nobody has seen."""
        await self.expect_200("POST", _CHAT, chat_about([make_picture(rng)]))
        return "answered", math.nan

    async def ask_about_known_picture(self, rng: random.Random) -> tuple[Ending, float]:
        """Ask what was asked before: the answer must be the same."""
        number = rng.randrange(NUM_KNOWN)
        answer = await self.expect_200("POST", _CHAT, chat_about([self._known[number]]))
        self.check_known(number, answer.fields["choices"][0]["message"]["content"])
        return "answered", math.nan

    async def stream(self, rng: random.Random) -> tuple[Ending, float]:
        """Read a stream about a new or a known picture to its end."""
        picture = rng.choice([make_picture(rng), rng.choice(self._known)])
        body = chat_about([picture], stream=True, ignore_eos=True, max_tokens=rng.randint(4, 48))
        answer = await self.expect_200("POST", _CHAT, body)
        events = answer.events
        errors = [event["error"] for event in events if "error" in event]
        if errors and errors[0]["type"] == "server_error" and errors[0]["code"] != "internal_error":
            raise UnavailableError(errors[0]["message"])
        reasons = [one["finish_reason"] for event in events for one in event.get("choices", [])]
        if errors or reasons[-1:] != ["length"]:
            raise WrongAnswerError(f"a stream ended with {events[-1:]}")
        return "answered", answer.first_s

    async def ask_about_several(self, rng: random.Random) -> tuple[Ending, float]:
        """Ask for several answers about several pictures."""
        pictures = [rng.choice([make_picture(rng), *self._known]) for _ in range(rng.randint(2, 4))]
        body = chat_about(pictures, n=2, temperature=1.0, seed=rng.randrange(2**31))
        answer = await self.expect_200("POST", _CHAT, body)
        if len(answer.fields["choices"]) != 2:
            raise WrongAnswerError("`n` is 2, and there are not two answers")
        return "answered", math.nan

    async def choose(self, rng: random.Random) -> tuple[Ending, float]:
        """Ask for one of a few words."""
        words = rng.sample(_COLORS, 3)
        body = chat_about([rng.choice(self._known)], structured_outputs={"choice": words})
        answer = await self.expect_200("POST", _CHAT, body)
        text = answer.fields["choices"][0]["message"]["content"]
        if text not in words:
            raise WrongAnswerError(f"{text!r} is none of {words}")
        return "answered", math.nan

    async def keep_a_response(self, rng: random.Random) -> tuple[Ending, float]:
        """Have a response stored, read it again, and delete it now and then."""
        picture = make_picture(rng)
        content = [
            {"type": "input_image", "image_url": picture},
            {"type": "input_text", "text": _QUESTION},
        ]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8}
        made = (await self.expect_200("POST", "/v1/responses", body)).fields
        path = f"/v1/responses/{made['id']}"
        read = (await self.expect_200("GET", path)).fields
        if read["output"] != made["output"]:
            raise WrongAnswerError("a stored response is another one")
        if rng.random() < 0.5:
            await self.expect_200("DELETE", path)
        return "answered", math.nan

    async def send_bad_input(self, rng: random.Random) -> tuple[Ending, float]:
        """Send something that must be refused."""
        path, body = rng.choice(_BAD_INPUTS)(rng)
        answer = await self.exchange("POST", path, body)
        if answer.status in (429, 503):
            raise UnavailableError(answer.body.decode())
        if not 400 <= answer.status < 500 or "message" not in answer.fields["error"]:
            raise WrongAnswerError(f"{answer.status} for {body!r:.200}")
        return "refused", math.nan

    async def leave_early(self, rng: random.Random) -> tuple[Ending, float]:
        """Be a client that leaves, at any stage."""
        picture = rng.choice([make_picture(rng), rng.choice(self._known)])
        body = chat_about([picture], stream=True, ignore_eos=True, max_tokens=200)
        await leave(self._port, rng.choice([*STAGES]), _encode(body), rng)
        return "left", math.nan

    async def look_on(self, rng: random.Random) -> tuple[Ending, float]:
        """Ask for what operators and pages ask for."""
        path = rng.choice(["/metrics", "/v1/models", "/version", "/"])
        await self.expect_200("GET", path)
        return "answered", math.nan


Kind = Callable[[MixedClient, random.Random], Awaitable[tuple[Ending, float]]]

KINDS: Mapping[str, tuple[float, Kind]] = {
    "new picture": (20, MixedClient.ask_about_new_picture),
    "known picture": (20, MixedClient.ask_about_known_picture),
    "stream": (15, MixedClient.stream),
    "several": (5, MixedClient.ask_about_several),
    "choice": (5, MixedClient.choose),
    "response": (5, MixedClient.keep_a_response),
    "bad input": (12, MixedClient.send_bad_input),
    "leaves": (15, MixedClient.leave_early),
    "looks on": (3, MixedClient.look_on),
}
"""Name -> how often it is drawn, and what it does."""


def chat_about(pictures: Sequence[str], **fields: Any) -> dict[str, Any]:
    """Return a chat request about pictures, which are data URLs."""
    content = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    content.append({"type": "text", "text": _QUESTION})
    message = {"role": "user", "content": content}
    return {"messages": [message], "temperature": 0, "max_tokens": 8, **fields}


def make_picture(rng: random.Random) -> str:
    """Return a picture of a circle, of random size, as a data URL; no two are equal."""
    width, height = rng.randint(40, 400), rng.randint(40, 400)
    image = Image.new("RGB", (width, height), rng.choice(["white", "black", "gray"]))
    side = rng.randint(20, min(width, height))
    ImageDraw.Draw(image).ellipse((2, 2, side, side), fill=rng.choice(_COLORS))
    for x in range(8):
        image.putpixel((x, height - 1), tuple(rng.randbytes(3)))
    file = io.BytesIO()
    image.save(file, "PNG")
    return _to_url(file.getvalue())


def _to_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _encode(body: Any) -> bytes:
    return json.dumps(body).encode()


# ---- what must be refused ------------------------------------------------------------------------


def _damaged_picture(rng: random.Random) -> tuple[str, Any]:
    data = base64.b64decode(make_picture(rng).partition(",")[2])
    return _CHAT, chat_about([_to_url(data[: rng.randrange(20, len(data) // 2)])])


def _huge_picture(rng: random.Random) -> tuple[str, Any]:
    """Claim 60,000 x 60,000 pixels in a few bytes."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    return _CHAT, chat_about([_to_url(data + struct.pack(">I", zlib.crc32(chunk)))])


def _no_json(rng: random.Random) -> tuple[str, Any]:
    return _CHAT, b'{"messages": [' * rng.randint(1, 2000)


def _private_address(rng: random.Random) -> tuple[str, Any]:
    return _CHAT, chat_about([f"http://127.0.0.1:{rng.randint(1, 65535)}/picture.png"])


def _wrong_field(rng: random.Random) -> tuple[str, Any]:
    wrong: list[dict[str, Any]] = [
        {"n": 10**9},
        {"temperature": "hot"},
        {"max_tokens": -1},
        {"no_such_field": 1},
        {"model": "another"},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"json": {"type": "nothing"}}},
        {"messages": 3},
    ]
    return _CHAT, {**chat_about([]), **rng.choice(wrong)}


def _long_prompt(rng: random.Random) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": "red circle " * rng.randint(5_000, 20_000)}


def _wrong_ids(rng: random.Random) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": [rng.choice([-1, 10**6, 2**40])]}


_BAD_INPUTS: Sequence[Callable[[random.Random], tuple[str, Any]]] = (
    _damaged_picture,
    _huge_picture,
    _no_json,
    _private_address,
    _wrong_field,
    _long_prompt,
    _wrong_ids,
)
