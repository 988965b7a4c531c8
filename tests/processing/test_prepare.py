"""A request in two steps: `prepare` changes no cache, `commit` does, in one fixed order."""

from typing import Any

import pytest

from mmjax.cache import BaseMultiModalProcessorCache
from mmjax.errors import MultiModalCacheMissError, RequestValueError
from mmjax.processing import MultiModalInputs, PreparedInputs
from mmjax.processing.encoder_budget import MultiModalProfiler
from tests.kit import draw
from tests.processing.test_processor import SOFT, Processor, ids, make


class RecordingCache(BaseMultiModalProcessorCache):
    """A sender's cache that never evicts by itself, and writes down what is asked of it."""

    def __init__(self, *, has_tensors: bool = False, can_store: bool = True) -> None:
        super().__init__(1)
        self.items: dict[str, Any] = {}
        self.calls: list[tuple[str, str]] = []
        self.has_tensors = has_tensors
        self.can_store = can_store

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.items

    def peek_prompt_updates(self, mm_hash: str) -> Any:
        return self.items[mm_hash][1] if mm_hash in self.items else None

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        self.calls.append(("touch", mm_hash))

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        if mm_hash in self.items:
            self.calls.append(("hit", mm_hash))
            item, updates = self.items[mm_hash]
            return (item if self.has_tensors else None), updates
        return self._store(mm_item, mm_hash)

    def _store(self, mm_item: Any, mm_hash: str) -> Any:
        self.calls.append(("store", mm_hash))
        if self.can_store:
            self.items[mm_hash] = mm_item
        return mm_item

    def reset_readers(self) -> None:
        """Do nothing."""


def prepare(processor: Processor, names: str, *, without_data: str = "") -> PreparedInputs:
    """Prepare a prompt with one picture for each letter; its uuid is the letter."""
    images = [None if name in without_data else draw(ord(name), 2) for name in names]
    return processor.prepare(
        "[img]" * len(names), {"image": images}, mm_uuids={"image": list(names)}
    )


def widths(inputs: MultiModalInputs) -> str:
    """Name each item by its tensors; `-` where it has none."""
    return "".join(
        "-" if item is None else chr(int(item["width"].data[0]))
        for item in inputs.mm_kwargs["image"]
    )


def run(processor: Processor, names: str) -> str:
    return widths(processor.commit(prepare(processor, names)))


def test_prepare_changes_nothing_and_commit_keeps_the_order():
    cache = RecordingCache()
    processor = make(cache)
    assert run(processor, "ab") == "ab"
    cache.calls.clear()

    prepared = prepare(processor, "cbda")
    assert cache.calls == []
    assert list(prepared.fresh) == ["c", "d"]
    assert prepared.prompt_token_ids == [*ids(""), *[SOFT] * 8]
    assert [one.offset for one in prepared.mm_placeholders["image"]] == [1, 3, 5, 7]

    assert widths(processor.commit(prepared)) == "c-d-"
    assert cache.calls == [
        *(("touch", name) for name in "cbda"),
        *(("hit", name) for name in "ba"),
        *(("store", name) for name in "cd"),
    ]


def test_the_order_is_that_of_the_prompt_over_all_modalities():
    """Not of the dict: the engine sees one list of features, sorted by their place."""
    cache = RecordingCache()
    processor = make(cache)
    prepared = prepare(processor, "ab")
    first, second = prepared.mm_placeholders["image"]
    object.__setattr__(prepared, "mm_placeholders", {"image": [second, first]})
    processor.commit(prepared)
    assert cache.calls == [("touch", "b"), ("touch", "a"), ("store", "b"), ("store", "a")]


class TestRepeats:
    def test_an_item_is_processed_and_stored_once(self):
        cache = RecordingCache()
        processor = make(cache)
        assert run(processor, "aba") == "ab-"
        assert [call for call in cache.calls if call[0] == "store"] == [
            ("store", "a"),
            ("store", "b"),
        ]
        assert run(processor, "aab") == "---"

    @pytest.mark.parametrize("cache", [None, RecordingCache(has_tensors=True)])
    def test_every_occurrence_has_its_tensors_where_the_engine_holds_none(self, cache: Any):
        processor = make(cache)
        assert [run(processor, "aba") for _ in range(2)] == ["aba", "aba"]

    def test_what_is_too_large_for_the_cache_is_sent_whole(self):
        processor = make(RecordingCache(can_store=False))
        assert [run(processor, "aba") for _ in range(2)] == ["aba", "aba"]


class TestMisses:
    def test_every_missing_hash_is_named_before_any_change(self):
        cache = RecordingCache()
        processor = make(cache)
        run(processor, "abc")
        prepared = prepare(processor, "cbda")
        cache.items.clear()
        cache.calls.clear()
        with pytest.raises(MultiModalCacheMissError) as caught:
            processor.commit(prepared)
        assert caught.value.mm_hashes == ["c", "b", "a"]
        assert cache.calls == []

    def test_rebuilding_makes_them_fresh_in_one_batch(self, monkeypatch: pytest.MonkeyPatch):
        cache = RecordingCache()
        processor = make(cache)
        run(processor, "abc")
        prepared = prepare(processor, "cbdac")
        cache.items.clear()
        batches = []
        call_hf = processor._call_hf_processor

        def count(prompt: Any, mm_data: Any, *rest: Any) -> Any:
            batches.append([image.width for image in mm_data["images"]])
            return call_hf(prompt, mm_data, *rest)

        monkeypatch.setattr(processor, "_call_hf_processor", count)
        rebuilt = processor.rebuild(prepared, ["d", "c", "a", "b", "not of this request"])
        assert batches == [[ord("c"), ord("b"), ord("a")]]  # `d` was fresh still
        assert widths(processor.commit(rebuilt)) == "cbda-"
        assert rebuilt.prompt_token_ids == prepared.prompt_token_ids
        assert processor.rebuild(rebuilt, ["a"]).fresh == rebuilt.fresh

    def test_an_item_without_data_cannot_be_rebuilt(self):
        cache = RecordingCache()
        processor = make(cache)
        run(processor, "ab")
        prepared = prepare(processor, "ab", without_data="b")
        cache.items.clear()
        assert list(processor.rebuild(prepared, ["a"]).fresh) == ["a"]
        with pytest.raises(RequestValueError, match="Cache miss for image at index 1 but data"):
            processor.rebuild(prepared, ["a", "b"])

    def test_apply_heals_what_is_evicted_in_between(self, monkeypatch: pytest.MonkeyPatch):
        cache = RecordingCache()
        processor = make(cache)
        run(processor, "ab")
        original, evicted = processor.commit, iter("ba")

        def commit(prepared: PreparedInputs) -> MultiModalInputs:
            cache.items.pop(next(evicted, ""), None)
            return original(prepared)

        monkeypatch.setattr(processor, "commit", commit)
        images = [draw(ord(name), 2) for name in "ab"]
        inputs = processor.apply("[img][img]", {"image": images}, mm_uuids={"image": ["a", "b"]})
        assert widths(inputs) == "ab"

    def test_an_item_that_came_in_the_meantime_is_a_hit(self):
        cache = RecordingCache()
        processor = make(cache)
        first, second = prepare(processor, "ab"), prepare(processor, "a")
        assert widths(processor.commit(first)) == "ab"
        assert widths(processor.commit(second)) == "-"


def test_measuring_leaves_the_cache_as_it_was():
    """The engine never gets the dummies: stored here, they would set the two sides apart."""
    cache = RecordingCache()
    assert MultiModalProfiler(make(cache)).get_mm_max_tokens_per_item() == {"image": 2}
    assert cache.calls == []


def test_a_decoder_prompt_needs_an_encoder():
    with pytest.raises(RequestValueError, match="this model has no encoder") as caught:
        make().apply("hello", decoder_prompt="x")
    assert caught.value.param == "decoder_prompt"
