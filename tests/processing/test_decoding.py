"""Pictures are decoded within budgets, batch by batch, and no longer than somebody waits."""

import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmjax.cache import MultiModalProcessorOnlyCache
from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import ConfigError, RequestCancelledError, RequestValueError
from mmjax.processing import MediaLimits, processor
from mmjax.processing.media import encoded
from mmjax.processing.media.decode_budget import (
    Cancellation,
    DecodeBudget,
    split_by_bytes,
)
from mmjax.processing.media.encoded import EncodedImage
from tests.families import FAMILIES, gemma3
from tests.families.default_run import ASKED, mark
from tests.kit import draw
from tests.processing.test_media import encode, png_header
from tests.processing.test_processor import make

ROOT = Path(__file__).parents[2]
TINY = 16 * 16 * 4
"""The decoded bytes of a 16x16 picture."""


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the files that were decoded."""
    calls: list[int] = []
    load = encoded.decode_image

    def note(data: bytes, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(data))
        return load(data, *args, **kwargs)

    monkeypatch.setattr(encoded, "decode_image", note)
    return calls


def pictures(count: int) -> list[EncodedImage]:
    return [
        EncodedImage(encode(draw(16, 16, seed=seed)), MediaLimits(), f"part[{seed}]")
        for seed in range(count)
    ]


def set_batch_bytes(monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> None:
    def split(sizes: Any) -> Any:
        return split_by_bytes(sizes, max_bytes)

    monkeypatch.setattr(processor, "split_by_bytes", split)


def test_batches_keep_the_order_and_the_bound():
    sizes = [("a", 3), ("b", 4), ("c", 9), ("d", 1), ("e", 0)]
    assert split_by_bytes(sizes, 8) == [(["a", "b"], 7), (["c"], 9), (["d", "e"], 1)]
    assert split_by_bytes([], 8) == []


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("batch_bytes", [1, TINY, 2 * TINY])
def test_batches_give_what_one_batch_gives(
    monkeypatch: pytest.MonkeyPatch, is_cached: bool, batch_bytes: int
):
    images = [draw(16, 16, seed=0), draw(60, 9, seed=1), draw(5, 40, seed=2), draw(16, 16, seed=3)]
    prompt = "<start_of_image> and <start_of_image><start_of_image> or <start_of_image> what?"
    data = {"image": [encode(image) for image in images]}
    kwargs = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 4}

    def process() -> Any:
        processor = gemma3.make_processor(processor_cache=make_cache() if is_cached else None)
        return processor.apply(prompt, data, kwargs)

    def make_cache() -> MultiModalProcessorOnlyCache:
        return MultiModalProcessorOnlyCache(10**9)

    whole = process()
    set_batch_bytes(monkeypatch, batch_bytes)
    parts = process()
    assert parts.prompt_token_ids == whole.prompt_token_ids
    assert parts.mm_placeholders == whole.mm_placeholders
    assert parts.mm_hashes == whole.mm_hashes
    for one, other in zip(parts.mm_kwargs["image"], whole.mm_kwargs["image"], strict=True):
        assert one is not None
        assert other is not None
        assert one == other
        np.testing.assert_array_equal(one["pixel_values"].data, other["pixel_values"].data)


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_looks_at_an_items_neighbours(
    monkeypatch: pytest.MonkeyPatch, name: str, is_cached: bool
):
    """One by one, bit for bit what one batch of all gives; the caches rest on that as well."""
    family = FAMILIES[name]
    sizes = [(60, 60), (90, 40), (41, 75)][: family.max_images]
    data = {"image": [encode(draw(*size, seed=seed)) for seed, size in enumerate(sizes)]}
    prompt = family.placeholder * len(sizes) + "what"

    def process() -> Any:
        cache = MultiModalProcessorOnlyCache(10**9) if is_cached else None
        return family.make_processor(processor_cache=cache).apply(prompt, data)

    whole = process()
    set_batch_bytes(monkeypatch, 1)
    parts = process()
    assert family.prompt_ids(parts) == family.prompt_ids(whole)
    assert parts.mm_placeholders == whole.mm_placeholders
    for one, other in zip(parts.mm_kwargs["image"], whole.mm_kwargs["image"], strict=True):
        assert one is not None
        assert one == other


RESIZED_ONCE = sorted(ASKED["pictures decoded side by side"])
SIDE_BY_SIDE = [
    *((name, Image.Image, "resize") for name in RESIZED_ONCE),
    *(
        pytest.param(
            name,
            encoded,
            "decode_image",
            marks=mark("pictures decoded side by side", name),
        )
        for name, family in FAMILIES.items()
        if family.max_images > 1
    ),
]


@pytest.mark.parametrize(("name", "owner", "attribute"), SIDE_BY_SIDE)
def test_pictures_are_decoded_and_resized_side_by_side(
    name: str, owner: Any, attribute: str, monkeypatch: pytest.MonkeyPatch
):
    """Each waits for the other: one after the other, neither would come to its end."""
    family, original, both = FAMILIES[name], getattr(owner, attribute), threading.Barrier(2)

    def meet(*args: Any, **kwargs: Any) -> Any:
        both.wait(timeout=20)
        return original(*args, **kwargs)

    data = [encode(draw(90 + i, 70, seed=i)) for i in range(2)]
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    processor = family.make_processor()
    processor.info.get_hf_processor()  # which tries a picture of its own
    monkeypatch.setattr(owner, attribute, meet)
    processor.apply(family.placeholder * 2, {"image": data})


def test_one_picture_is_there_at_a_time(monkeypatch: pytest.MonkeyPatch, decoded: list[int]):
    items = pictures(5)
    alive: list[int] = []
    load = encoded.decode_image

    def count(*args: Any, **kwargs: Any) -> Any:
        alive.append(sum(item._media is not None for item in items))
        return load(*args, **kwargs)

    monkeypatch.setattr(encoded, "decode_image", count)
    set_batch_bytes(monkeypatch, TINY)
    processor = make(MultiModalProcessorOnlyCache(10**6))
    processor.prepare("[img]" * 5, {"image": items})
    assert alive == [0] * 5
    assert len(decoded) == 5


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_request_over_its_budget_is_refused_from_the_headers(decoded: list[int], is_cached: bool):
    cache = MultiModalProcessorOnlyCache(10**6) if is_cached else None
    processor = gemma3.make_processor(
        processor_cache=cache, max_media_request_decode_bytes=3 * TINY - 1
    )
    with pytest.raises(RequestValueError, match="--max-media-request-decode-bytes") as caught:
        processor.prepare("<start_of_image>" * 4, {"image": pictures(4)})
    assert caught.value.param == "part[2]"
    assert caught.value.status == 400
    assert f"take {3 * TINY} bytes" in caught.value.message
    assert decoded == []
    processor.prepare("<start_of_image>" * 2, {"image": pictures(2)})
    assert len(decoded) == 2


def test_what_is_cached_takes_nothing_of_the_budget(decoded: list[int]):
    processor = gemma3.make_processor(
        processor_cache=MultiModalProcessorOnlyCache(10**9), max_media_request_decode_bytes=2 * TINY
    )
    processor.apply("<start_of_image>" * 2, {"image": pictures(2)})
    processor.apply("<start_of_image>" * 4, {"image": pictures(4)})
    assert len(decoded) == 4


def test_a_budget_of_nothing_is_refused():
    for name in ("max_media_request_decode_bytes", "max_media_decode_bytes"):
        fields: dict[str, Any] = {name: 0}
        with pytest.raises(ConfigError, match=f"`{name}` is 0; expected an integer of at least 1"):
            MultiModalConfig(**fields)


def test_a_cancelled_request_decodes_no_further_picture(
    monkeypatch: pytest.MonkeyPatch, decoded: list[int]
):
    set_batch_bytes(monkeypatch, TINY)
    cancellation = Cancellation()
    load = encoded.decode_image

    def leave_at_the_second(*args: Any, **kwargs: Any) -> Any:
        if len(decoded) == 1:
            cancellation.set()
        return load(*args, **kwargs)

    monkeypatch.setattr(encoded, "decode_image", leave_at_the_second)
    processor = make(MultiModalProcessorOnlyCache(10**6))
    with pytest.raises(RequestCancelledError):
        processor.prepare("[img]" * 5, {"image": pictures(5)}, cancellation=cancellation)
    assert len(decoded) == 2
    assert processor.decode_budget.num_bytes == 0


def test_a_broken_picture_takes_no_id():
    processor = make(MultiModalProcessorOnlyCache(10**6))
    whole = encode(draw(16, 16))
    names: Any = {"mm_uuids": {"image": ["x"]}, "id_domain": "d"}
    with pytest.raises(RequestValueError, match="Failed to load image"):
        processor.prepare("[img]", {"image": [whole[:-30]]}, **names)
    processor.prepare("[img]", {"image": [whole]}, **names)


class TestBudget:
    @pytest.fixture
    def start(self) -> Iterator[Callable[[Callable[[], None]], threading.Thread]]:
        threads: list[threading.Thread] = []

        def start(work: Callable[[], None]) -> threading.Thread:
            threads.append(threading.Thread(target=work))
            threads[-1].start()
            return threads[-1]

        yield start
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    def test_who_comes_first_is_served_first(self, start: Any):
        budget = DecodeBudget(10)
        order: list[str] = []

        def take(name: str, num_bytes: int) -> None:
            with budget.hold(num_bytes, Cancellation()):
                order.append(name)

        with budget.hold(6, Cancellation()):
            start(lambda: take("large", 8))
            until(lambda: budget.num_waiting == 1)
            start(lambda: take("small", 1))  # it would fit, and waits for its turn
            until(lambda: budget.num_waiting == 2)
            assert order == []
            take("nothing", 0)
        until(lambda: len(order) == 3)
        assert order == ["nothing", "large", "small"]
        assert budget.num_bytes == 0

    def test_who_is_larger_than_all_of_it_goes_alone(self):
        budget = DecodeBudget(10)
        with budget.hold(1000, Cancellation()):
            assert budget.num_bytes == 10
        assert budget.num_bytes == 0

    def test_who_is_cancelled_waits_no_longer(self, start: Any):
        budget = DecodeBudget(10)
        cancellation = Cancellation()
        ended: list[str] = []

        def take() -> None:
            with pytest.raises(RequestCancelledError), budget.hold(5, cancellation):
                pass
            ended.append("cancelled")

        with budget.hold(10, Cancellation()):
            thread = start(take)
            until(lambda: budget.num_waiting == 1)
            cancellation.set()
            thread.join(30)
            assert ended == ["cancelled"]
        assert (budget.num_bytes, budget.num_waiting) == (0, 0)


def until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    while not condition():
        event.wait(0.005)


def tiled_tiff(side: int) -> bytes:
    """Return a TIFF of 4x4 grey pixels in one tile of `side` by `side`."""
    tags = {256: 4, 257: 4, 258: 8, 259: 1, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: 16}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    ifd = struct.pack("<H", len(tags)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8) + ifd


def test_the_tile_of_a_tiff_counts_too():
    assert EncodedImage(tiled_tiff(16), MediaLimits()).read_header().num_decoded_bytes == 64
    with pytest.raises(RequestValueError, match="20000x20000"):
        EncodedImage(tiled_tiff(20_000), MediaLimits()).read_header()


def test_headers_are_read_without_pixels(decoded: list[int]):
    header = EncodedImage(png_header(5000, 2000), MediaLimits()).read_header()
    assert header.num_decoded_bytes == 5000 * 2000 * 4
    assert decoded == []


def test_memory_goes_back_to_the_system():
    """Four bitmaps of 48 MB each, made and freed, leave next to nothing behind."""
    script = textwrap.dedent("""
        import io
        from PIL import Image
        from mmjax.system.allocator import return_large_blocks
        from tests.families import gemma3

        def rss():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) // 1024 for line in status if "VmRSS" in line)

        def peak():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) // 1024 for line in status if "VmHWM" in line)

        assert return_large_blocks()
        processor = gemma3.make_processor()
        files = []
        for seed in range(4):
            stream = io.BytesIO()
            Image.new("RGB", (4000, 3000), (seed, 0, 0)).save(stream, "PNG", compress_level=1)
            files.append(stream.getvalue())
        processor.apply("<start_of_image>", {"image": [files[0]]})
        start = rss()
        processor.apply("<start_of_image>" * 4, {"image": files})
        print(rss() - start, peak() - start)
    """)
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    kept, peak = map(int, run.stdout.split())
    assert kept < 60
    assert peak < 4 * 48  # all at once take more than that before HF's processor has begun
