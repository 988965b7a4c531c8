"""Identities of items: contents, trusted uuids, claims of clients, names of requests."""

import threading
import uuid
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from mmjax.cache import MultiModalProcessorOnlyCache
from mmjax.errors import MediaError, MediaIdConflictError, RequestError
from mmjax.processing import (
    ImageProcessorItems,
    MediaLimits,
    MediaWithBytes,
    MultiModalDataItems,
    MultiModalHasher,
    VideoProcessorItems,
)
from mmjax.processing.hashing.hasher import _ALGORITHMS
from mmjax.processing.hashing.item_hashes import ItemHasher, MediaId, scope_mm_kwargs
from mmjax.processing.media.encoded import EncodedImage
from tests.kit import draw
from tests.processing.test_media import encode
from tests.processing.test_processor import Processor, make

LIMITS = MediaLimits()
FILES = [encode(draw(4, 4, seed=seed)) for seed in range(4)]


def images(*items: Any) -> MultiModalDataItems:
    """Items of a request; bytes are encoded pictures."""
    return MultiModalDataItems(
        image=ImageProcessorItems(
            [EncodedImage(item, LIMITS) if isinstance(item, bytes) else item for item in items]
        )
    )


def hash_items(
    hasher: ItemHasher, items: MultiModalDataItems, mm_uuids: Any = None, **kwargs: Any
) -> dict[str, list[str]]:
    hashed = hasher.identify(items, mm_uuids or {}, kwargs.pop("mm_kwargs", {}), **kwargs)
    hasher.bind(hashed)
    return hashed.by_modality


def hash_images(
    hasher: ItemHasher,
    *items: Any,
    uuids: list[str | None] | None = None,
    mm_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[str]:
    mm_uuids = {} if uuids is None else {"image": uuids}
    return hash_items(hasher, images(*items), mm_uuids, mm_kwargs=mm_kwargs or {}, **kwargs)[
        "image"
    ]


@pytest.fixture
def hasher() -> ItemHasher:
    return ItemHasher("model")


class Decoded(BaseException):
    """Pillow was asked for a picture (nobody may catch this)."""


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise Decoded

    monkeypatch.setattr(Image, "open", fail)


class TestContents:
    def test_the_hash_is_of_model_item_and_factors(self, hasher: ItemHasher) -> None:
        plain = MultiModalHasher()
        picture, kwargs = draw(3, 3), {"size": 4}
        media = MediaWithBytes(draw(4, 4), FILES[0])
        assert hash_images(hasher, picture, FILES[0]) == [
            plain.hash_kwargs(model_id="model", image=picture),
            plain.hash_kwargs(model_id="model", image=media),
        ]
        assert hash_images(hasher, picture, mm_kwargs=kwargs) == [
            plain.hash_kwargs(model_id="model", image=picture, mm_processor_kwargs=kwargs)
        ]
        assert hash_images(ItemHasher("other"), picture) != hash_images(hasher, picture)

    @pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
    def test_every_algorithm(self, algorithm: str) -> None:
        hasher = ItemHasher("model", algorithm)
        assert hash_images(hasher, FILES[0]) == [
            MultiModalHasher(algorithm).hash_kwargs(
                model_id="model", image=EncodedImage(FILES[0], LIMITS)
            )
        ]

    def test_modalities_are_apart(self, hasher: ItemHasher) -> None:
        frames = np.zeros((2, 4, 4, 3), np.uint8)
        items = MultiModalDataItems(
            image=ImageProcessorItems([frames]), video=VideoProcessorItems([frames])
        )
        hashes = hash_items(hasher, items)
        assert hashes["image"] != hashes["video"]

    def test_a_videos_metadata_counts(self, hasher: ItemHasher) -> None:
        frames = MediaWithBytes(np.zeros((2, 4, 4, 3), np.uint8), b"mp4")

        def hash_video(metadata: Any) -> list[str]:
            items = MultiModalDataItems(video=VideoProcessorItems([frames], metadata))
            return hash_items(hasher, items)["video"]

        known = [hash_video(metadata) for metadata in (None, {"fps": 1}, {"fps": 2})]
        assert len({mm_hash for (mm_hash,) in known}) == 3

    def test_a_repeated_file_is_not_decoded(
        self, hasher: ItemHasher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = hash_images(hasher, FILES[0], FILES[1])
        with_kwargs = hash_images(hasher, FILES[0], mm_kwargs={"a": 1})
        forbid_decoding(monkeypatch)
        assert hash_images(hasher, FILES[0], FILES[1], FILES[0]) == [*first, first[0]]
        assert hash_images(hasher, FILES[0], mm_kwargs={"a": 1}) == with_kwargs
        with pytest.raises(Decoded):
            hash_images(hasher, FILES[2])

    def test_only_so_much_is_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hasher = ItemHasher("model", max_remembered=2)
        first = hash_images(hasher, *FILES[:3])
        forbid_decoding(monkeypatch)
        assert hash_images(hasher, FILES[1], FILES[2]) == first[1:]
        with pytest.raises(Decoded):
            hash_images(hasher, FILES[0])

    def test_what_cannot_be_decoded_is_not_remembered(self, hasher: ItemHasher) -> None:
        for _ in range(2):
            with pytest.raises(MediaError):
                hash_images(hasher, b"no picture")

    def test_what_cannot_be_hashed_is_named(self, hasher: ItemHasher) -> None:
        with pytest.raises(TypeError, match="cannot hash") as caught:
            hash_images(hasher, draw(2, 2), object())
        assert isinstance(caught.value, RequestError)
        assert caught.value.param == "multi_modal_data.image[1]"
        with pytest.raises(TypeError, match="cannot hash") as caught:
            hash_images(hasher, draw(2, 2), mm_kwargs={"a": object()})
        assert isinstance(caught.value, RequestError)
        assert caught.value.param == "mm_processor_kwargs"

    def test_threads_agree(self, hasher: ItemHasher) -> None:
        seen: list[list[str]] = []
        barrier = threading.Barrier(6)

        def run() -> None:
            barrier.wait()
            seen.extend(hash_images(hasher, *FILES) for _ in range(20))

        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 120
        assert all(hashes == seen[0] for hashes in seen)


class TestFactors:
    def test_other_modalities_kwargs_do_not_count(self, hasher: ItemHasher) -> None:
        plain = hash_images(hasher, FILES[0])
        for kwargs in (
            {"videos_kwargs": {"fps": 1}},
            {"audio_kwargs": {"a": 1}, "images_kwargs": {}},
            {"text_kwargs": {}},
        ):
            assert hash_images(hasher, FILES[0], mm_kwargs=kwargs) == plain
        for kwargs in ({"images_kwargs": {"a": 1}}, {"a": 1}, {"text_kwargs": {"a": 1}}):
            assert hash_images(hasher, FILES[0], mm_kwargs=kwargs) != plain

    @pytest.mark.parametrize("make_inner", [lambda x: {"a": x}, lambda x: [x]])
    def test_endless_kwargs_are_refused(self, hasher: ItemHasher, make_inner: Any) -> None:
        kwargs: Any = {}
        for _ in range(5000):
            kwargs = make_inner(kwargs)
        with pytest.raises(ValueError, match="nested") as caught:
            hash_images(hasher, FILES[0], mm_kwargs={"a": kwargs})
        assert isinstance(caught.value, RequestError)
        assert caught.value.param == "mm_processor_kwargs"

    def test_every_modality_has_its_own(self) -> None:
        kwargs = {"b": 1, "videos_kwargs": {"c": 2}, "images_kwargs": {"a": 3}}
        assert scope_mm_kwargs("image", kwargs) == {"b": 1, "images_kwargs": {"a": 3}}
        assert scope_mm_kwargs("video", kwargs) == {"b": 1, "videos_kwargs": {"c": 2}}
        assert scope_mm_kwargs("audio", kwargs) == {"b": 1}
        assert scope_mm_kwargs("vision_chunk", kwargs) == kwargs

    @given(st.permutations([("a", 1), ("b", {"y": 1, "x": {"q": 1, "p": 2}}), ("c", [1, 2])]))
    def test_the_order_of_kwargs_does_not_count(self, pairs: list[tuple[str, Any]]) -> None:
        scoped: Any = scope_mm_kwargs("image", dict(pairs))
        assert list(scoped) == ["a", "b", "c"]
        assert list(scoped["b"]) == ["x", "y"]
        assert scoped["c"] == [1, 2]


class TestTrustedIds:
    def test_a_uuid_is_the_identity(self, hasher: ItemHasher) -> None:
        assert hash_images(hasher, None, FILES[0], uuids=["x", "y"]) == ["x", "y"]
        long = "x" * 1000
        assert hash_images(hasher, None, uuids=[long]) == [long]
        placed = hash_images(hasher, None, uuids=[MediaId("x", "there")])
        assert [type(mm_hash) for mm_hash in placed] == [str]

    def test_a_uuid_with_factors_is_hashed(self, hasher: ItemHasher) -> None:
        expected = MultiModalHasher().hash_kwargs(
            model_id="model", image="x", mm_processor_kwargs={"a": 1}
        )
        assert hash_images(hasher, None, uuids=["x"], mm_kwargs={"a": 1}) == [expected]
        assert hash_images(hasher, FILES[0], uuids=["x"], mm_kwargs={"a": 1}) == [expected]
        assert hash_images(hasher, None, uuids=["x"], mm_kwargs={"videos_kwargs": {"a": 1}}) == [
            "x"
        ]

    def test_nothing_is_decoded_for_a_uuid(
        self, hasher: ItemHasher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forbid_decoding(monkeypatch)
        assert hash_images(hasher, b"no picture", uuids=["x"]) == ["x"]

    def test_an_empty_uuid_is_refused(self, hasher: ItemHasher) -> None:
        for domain in (None, "d"):
            with pytest.raises(ValueError, match="at least one character"):
                hash_images(hasher, FILES[0], uuids=[""], id_domain=domain)

    def test_what_cannot_be_written_is_refused(self, hasher: ItemHasher) -> None:
        with pytest.raises(ValueError, match=r"lone surrogate .* at character 1"):
            hash_images(hasher, FILES[0], uuids=["a\ud800"])

    def test_a_picture_may_bring_its_own_id(self, hasher: ItemHasher) -> None:
        picture = draw(3, 3)
        picture.getexif()[ExifTags.Base.ImageID] = uuid.UUID(int=1)
        other = draw(5, 5)
        other.getexif()[ExifTags.Base.ImageID] = uuid.UUID(int=1)
        trusted = hash_images(hasher, picture, other)
        assert trusted[0] == trusted[1]
        claimed = hash_images(hasher, picture, other, id_domain="d")
        assert claimed[0] != claimed[1]
        assert claimed == hash_images(hasher, draw(3, 3), draw(5, 5))


def test_a_new_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is known by: to the server, to its caches, and on disk."""
    lengths: list[int] = []

    def count(data: bytes = b"") -> Any:
        lengths.append(len(data))
        return blake3(data)

    monkeypatch.setitem(_ALGORITHMS, "blake3", count)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    file = encode(Image.fromarray(noise))
    items = images(file)
    names = hash_items(hasher := ItemHasher("model"), items)
    hasher.name_on_disk(names["image"][0], items["image"].get_item_for_hash(0))
    assert lengths.count(len(file)) == 1


class TestNames:
    def test_items_are_named_where_nothing_is_kept(
        self, hasher: ItemHasher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forbid_decoding(monkeypatch)
        monkeypatch.setattr(MultiModalHasher, "hash_kwargs", None)
        monkeypatch.setattr(MultiModalHasher, "digest_file", None)
        for domain in (None, "d"):
            assert hash_images(hasher, FILES[0], FILES[0], request_id="r", id_domain=domain) == [
                "r-image-0",
                "r-image-1",
            ]
        assert hash_images(hasher, FILES[0], FILES[1], uuids=["x", None], request_id="r") == [
            "x",
            "r-image-1",
        ]

    def test_claims_are_held_to_their_contents_all_the_same(self, hasher: ItemHasher) -> None:
        (content,) = hash_images(hasher, FILES[0])
        assert hash_images(
            hasher, FILES[0], FILES[1], uuids=["x", None], request_id="r", id_domain="d"
        ) == [content, "r-image-1"]
        with pytest.raises(MediaIdConflictError):
            hash_images(hasher, FILES[1], uuids=["x"], request_id="r", id_domain="d")


class TestWarmRequests:
    def prepare(self, processor: Processor, *items: Any, **kwargs: Any) -> Any:
        prepared = processor.prepare("[img]" * len(items), {"image": list(items)}, **kwargs)
        processor.commit(prepared)
        return prepared

    def test_a_known_picture_is_never_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = MultiModalProcessorOnlyCache(10**6)
        processor = make(cache)
        cold = self.prepare(processor, *FILES[:2])
        forbid_decoding(monkeypatch)
        warm = self.prepare(processor, *FILES[:2], FILES[0])
        assert warm.fresh == {}
        assert warm.mm_hashes["image"] == [*cold.mm_hashes["image"], cold.mm_hashes["image"][0]]
        with pytest.raises(Decoded):
            self.prepare(processor, FILES[2])

    def test_a_prepared_request_holds_no_pixels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        processor = make(MultiModalProcessorOnlyCache(10**6))
        pictures = [EncodedImage(data, LIMITS) for data in FILES]
        prepared = self.prepare(processor, *pictures)
        assert len(prepared.fresh) == len(FILES)
        again = processor.rebuild(replace(prepared, fresh={}), prepared.mm_hashes["image"])
        assert set(again.fresh) == set(prepared.fresh)
        forbid_decoding(monkeypatch)
        for picture in pictures:
            with pytest.raises(Decoded):
                picture.decode()

    def test_a_claimed_picture_is_not_decoded_either(self, monkeypatch: pytest.MonkeyPatch) -> None:
        processor = make(MultiModalProcessorOnlyCache(10**6))
        uuids = {"image": ["x"]}
        cold = self.prepare(processor, FILES[0], mm_uuids=uuids, id_domain="d")
        forbid_decoding(monkeypatch)
        for item in (FILES[0], None):
            warm = self.prepare(processor, item, mm_uuids=uuids, id_domain="d")
            assert warm.mm_hashes == cold.mm_hashes
        with pytest.raises(ValueError, match="Cache miss for image at index 0"):
            self.prepare(processor, None, mm_uuids=uuids, id_domain="e")

    def test_an_evicted_one_is_decoded_again(self) -> None:
        cache = MultiModalProcessorOnlyCache(10**6)
        processor = make(cache)
        cold = self.prepare(processor, FILES[0], mm_uuids={"image": ["x"]}, id_domain="d")
        cache.clear_cache()
        with pytest.raises(ValueError, match="Cache miss for image at index 0") as caught:
            self.prepare(processor, None, mm_uuids={"image": ["x"]}, id_domain="d")
        assert isinstance(caught.value, RequestError)
        again = self.prepare(processor, FILES[0], mm_uuids={"image": ["x"]}, id_domain="d")
        assert again.mm_hashes == cold.mm_hashes
        assert set(again.fresh) == set(cold.fresh)

    def test_a_named_request_is_processed(self) -> None:
        processor = make(None)
        prepared = self.prepare(processor, FILES[0], FILES[0], request_id="r")
        assert prepared.mm_hashes == {"image": ["r-image-0", "r-image-1"]}

    def test_a_bad_picture_is_named(self) -> None:
        processor = make(MultiModalProcessorOnlyCache(10**6))
        with pytest.raises(MediaError, match="Failed to load image") as caught:
            self.prepare(processor, FILES[0], b"no picture")
        assert caught.value.param == "multi_modal_data.image[1]"
