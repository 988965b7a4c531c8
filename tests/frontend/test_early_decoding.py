"""A picture is decoded when its own file is there, not when those of the whole request are."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import MediaError
from mmjax.frontend.media.connector import MediaConnector
from mmjax.processing.hashing.item_hashes import ItemHasher
from mmjax.processing.items.parse import MultiModalDataParser
from mmjax.processing.media.decode_budget import Cancellation, DecodeBudget
from mmjax.processing.media.encoded import EncodedImage, PixelRange
from tests.kit import draw
from tests.processing.test_media import encode
from tests.threats.network import PUBLIC, Network, answer, connected

FIRST, SECOND = encode(draw(40, 30)), encode(draw(20, 30))
NUM_BYTES = 40 * 30 * 4
"""Of the first picture, decoded."""


class Kit:
    """A connector, and a site whose second picture is withheld until `release` is set."""

    def __init__(self, *, first: bytes = FIRST, budget: int = 2**20, request: int = 2**20) -> None:
        self.release = asyncio.Event()
        self.budget = DecodeBudget(budget)
        self.hasher, self.cached = ItemHasher("tiny"), set[str]()
        mm = MultiModalConfig(max_media_request_decode_bytes=request)
        self.connector = MediaConnector(mm, budget=self.budget, is_cached=self.is_cached)
        self.network = _Site({"site.example": [[PUBLIC]]}, lambda head: [])
        self.network.pictures = {"/first": first, "/second": SECOND}
        self.network.asked = []
        self.network.release = self.release

    def is_cached(self, modality: str, item: Any, cache_salt: str | None) -> bool:
        return not self.cached.isdisjoint(self.hasher.find_names(modality, item, cache_salt))

    def pending(self, *paths: str) -> list[Any]:
        return [self.connector.open_image(f"http://site.example{path}", path) for path in paths]


class _Site(Network):
    """Sends what is in `pictures`, and notes what was asked for."""

    pictures: dict[str, bytes]
    asked: list[str]
    release: asyncio.Event

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.append(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        self.asked.append(path)
        if path == "/second":
            await self.release.wait()
        writer.write(answer(self.pictures[path]))
        await writer.drain()
        writer.close()


def run(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[Kit], Awaitable[None]], **settings: Any
) -> None:
    async def start() -> None:
        kit = Kit(**settings)
        with monkeypatch.context() as patch, _closing(kit):
            patch.setattr("mmjax.frontend.media.http.socket.getaddrinfo", kit.network.look_up)
            async with asyncio.timeout(60), connected(kit.network, kit.connector):
                try:
                    await use(kit)
                finally:
                    kit.release.set()

    asyncio.run(start())


@contextmanager
def _closing(kit: Kit) -> Iterator[None]:
    try:
        yield
    finally:
        kit.connector.close()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


async def fetch(kit: Kit, then: Callable[[list[Any]], None], **prompt: Any) -> None:
    """Fetch both pictures; `then` gets them while they are held."""
    data: Any = {"multi_modal_data": {"image": kit.pending("/first", "/second")}, **prompt}
    async with kit.connector.fetched(data) as whole:
        assert isinstance(whole, dict)
        then((whole.get("multi_modal_data") or {})["image"])


def test_the_first_picture_is_decoded_before_the_second_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[EncodedImage] = []
    load = EncodedImage._load

    def note(image: EncodedImage) -> Any:
        media = load(image)
        decoded.append(image)
        return media

    monkeypatch.setattr(EncodedImage, "_load", note)

    def process(images: list[EncodedImage]) -> None:
        assert [image.original_bytes for image in decoded] == [FIRST, SECOND]
        assert [image.decode().media.size for image in images] == [(40, 30), (20, 30)]
        assert decoded == images, "what was decoded ahead is not decoded again"

    async def use(kit: Kit) -> None:
        task = asyncio.create_task(fetch(kit, process))
        await until(lambda: bool(decoded))
        assert not kit.release.is_set()
        assert kit.budget.num_bytes == NUM_BYTES, "it counts as decoded"
        kit.release.set()
        await task
        await until(lambda: kit.budget.num_bytes == 0)

    run(monkeypatch, use)


def test_a_broken_picture_is_refused_before_the_others_have_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(kit: Kit) -> None:
        with pytest.raises(MediaError, match="/first"):
            await fetch(kit, lambda images: None)
        assert not kit.release.is_set()
        await until(lambda: kit.budget.num_bytes == 0)

    run(monkeypatch, use, first=FIRST[:200])


@pytest.mark.parametrize(
    "settings",
    [{"budget": 2 * NUM_BYTES - 2}, {"request": NUM_BYTES - 1}],
    ids=["half of the budget", "the request's own"],
)
def test_what_has_no_room_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    def process(images: list[EncodedImage]) -> None:
        assert images[0]._media is None
        assert images[1]._media is not None, "there is room for a smaller one"

    async def use(kit: Kit) -> None:
        kit.release.set()
        await fetch(kit, process)

    run(monkeypatch, use, **settings)


@pytest.mark.parametrize("salt", [None, "mine", "theirs"])
@pytest.mark.parametrize("first_salt", [None, "mine"])
def test_what_was_seen_before_is_decoded_only_for_those_who_share_no_cache(
    monkeypatch: pytest.MonkeyPatch, salt: str | None, first_salt: str | None
) -> None:
    """By the time that an answer takes nobody learns what a client with another salt has sent."""

    def process(images: list[EncodedImage]) -> None:
        assert (images[0]._media is None) == (salt == first_salt)

    async def use(kit: Kit) -> None:
        seen = MultiModalDataParser().parse_mm_data({"image": [FIRST]})
        named = kit.hasher.identify(seen, {}, {}, id_domain="others", cache_salt=first_salt)
        kit.cached.update(named.by_modality["image"])
        kit.release.set()
        await fetch(kit, process, **({} if salt is None else {"cache_salt": salt}))

    run(monkeypatch, use)


def test_who_leaves_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(kit: Kit) -> None:
        task = asyncio.create_task(fetch(kit, lambda images: None))
        await until(lambda: kit.budget.num_bytes > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: kit.budget.num_bytes == 0)

    run(monkeypatch, use)


def test_who_has_to_wait_gives_back_what_was_decoded_ahead() -> None:
    """Else a request waits for bytes that it holds itself."""
    budget = DecodeBudget(2 * NUM_BYTES)
    image = EncodedImage(FIRST, MultiModalDataParser().limits)
    image.decode_early(budget)
    assert budget.num_bytes == NUM_BYTES == image.num_bytes_to_decode
    with budget.hold(2 * NUM_BYTES, Cancellation(), on_wait=image.drop_pixels):
        assert budget.num_bytes == 2 * NUM_BYTES
    assert budget.num_bytes == 0
    assert image.decode().media.size == (40, 30)
    assert image.num_bytes_to_decode == 0


def test_a_url_that_comes_twice_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what each is scaled to."""
    url = "http://site.example/first"
    ranges = (None, PixelRange(most=300), None)

    async def use(kit: Kit) -> None:
        images = [kit.connector.open_image(url, f"[{i}]", one) for i, one in enumerate(ranges)]
        async with kit.connector.fetched({"multi_modal_data": {"image": images}}) as prompt:
            assert isinstance(prompt, dict)
            given = (prompt.get("multi_modal_data") or {})["image"]
            assert [image.decode().media.size for image in given] == [(40, 30), (20, 15), (40, 30)]
            assert kit.network.asked == ["/first"] * 2
            assert kit.connector.num_held_bytes == 2 * len(FIRST)

    run(monkeypatch, use)
