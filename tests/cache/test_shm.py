"""P0's half of the cache in shared memory: what is kept, what goes, what goes by message."""

import logging
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mmjax.cache import CacheInfo, MultiModalCacheMissError
from mmjax.cache.media.shm.handle import ShmHandleError
from mmjax.cache.media.shm.layout import ALIGNMENT
from mmjax.cache.media.shm.receiver import ShmObjectStoreReceiverCache
from mmjax.cache.media.shm.segment import HEADER, PAGE, Segment
from mmjax.cache.media.shm.sender import ShmObjectStoreSenderCache
from mmjax.errors import ConfigError
from mmjax.processing import MultiModalFieldElem, MultiModalKwargsItem, ProcessorCache
from mmjax.processing.tensors.fields import (
    MultiModalBatchedField,
    MultiModalFlatField,
    MultiModalSharedField,
)
from mmjax.processing.tensors.shared_item import SharedItem
from tests.cache.shm_kit import UPDATES, feature, forge, make_item, over_the_bridge, put, read

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")

# ---- items -------------------------------------------------------------------------------------

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
FIELDS = [
    MultiModalBatchedField(),
    MultiModalBatchedField(keep_on_cpu=True),
    MultiModalSharedField(batch_size=3),
    MultiModalFlatField(slices=[slice(0, 2), slice(2, None)], keep_on_cpu=True),
    MultiModalFlatField(slices=[(slice(None), slice(0, 2)), (slice(None), slice(2, 9, 3))], dim=1),
]


def arrays() -> st.SearchStrategy[np.ndarray]:
    return st.sampled_from(DTYPES).flatmap(
        lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, min_side=0, max_side=5))
    )


def data() -> st.SearchStrategy[Any]:
    leaves = (
        arrays() | arrays().map(lambda a: a.T) | arrays().map(lambda a: a[::-1] if a.ndim else a)
    )
    return leaves | st.none() | st.lists(leaves | st.lists(leaves, max_size=2), max_size=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    sender = ShmObjectStoreSenderCache(64 * PAGE, directory=directory)
    yield sender, ShmObjectStoreReceiverCache(sender.name, directory=directory)
    sender.close()


@settings(max_examples=100, deadline=None)
@given(item=st.dictionaries(st.text(max_size=5), st.tuples(data(), st.sampled_from(FIELDS))))
def test_an_item_comes_as_it_went(pair, item):
    sender, receiver = pair
    sent = MultiModalKwargsItem({k: MultiModalFieldElem(d, f) for k, (d, f) in item.items()})
    sender.clear_cache()
    handle, _ = sender.get_and_update_item((sent, UPDATES), "a")
    assert isinstance(handle, SharedItem)
    got = read(receiver, over_the_bridge(handle))
    assert list(got) == list(sent)
    for key, elem in got.items():
        assert repr(elem.field) == repr(sent[key].field)
        for a, b in zip(leaves_of(elem.data), leaves_of(sent[key].data), strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
            assert not a.flags.writeable
            assert a.ctypes.data % ALIGNMENT == 0


def leaves_of(value: Any) -> list[np.ndarray]:
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves_of(part)]
    return [] if value is None else [value]


def test_odd_arrays_come_as_plain_ones(sender, receiver):
    values = {
        "bfloat16": np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3),
        "swapped": np.arange(4, dtype=">i4"),
        "number": 3.5,
    }
    field = MultiModalBatchedField()
    item = MultiModalKwargsItem({k: MultiModalFieldElem(v, field) for k, v in values.items()})
    handle, _ = sender.get_and_update_item((item, UPDATES), "a")
    got = read(receiver, handle).get_data()
    np.testing.assert_array_equal(got["bfloat16"], values["bfloat16"], strict=True)
    np.testing.assert_array_equal(got["swapped"], np.arange(4, dtype=np.int32), strict=True)
    np.testing.assert_array_equal(got["number"], np.array(3.5), strict=True)


@pytest.mark.parametrize(
    "value", ["text", np.array([object()]), [np.array(["u"])], np.zeros(2, "c8")]
)
def test_what_shared_memory_cannot_hold_goes_as_it_is(sender, receiver, value):
    item = MultiModalKwargsItem({"x": MultiModalFieldElem(value, MultiModalBatchedField())})
    sent, _ = sender.get_and_update_item((item, UPDATES), "a")
    assert sent is item
    assert read(receiver, sent) is item
    assert not sender.is_cached_item("a")


def test_nobody_can_write_to_what_was_read(sender, receiver):
    array = read(receiver, put(sender, "a"))["x"].data
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


# ---- the cache in P0 ---------------------------------------------------------------------------


def test_it_is_what_a_processor_asks_for(sender):
    assert isinstance(sender, ProcessorCache)


def test_hits_misses_and_statistics(sender):
    with pytest.raises(MultiModalCacheMissError) as caught:
        sender.get_and_update_item(None, "a")
    assert caught.value.mm_hashes == ["a"]
    first = put(sender, "a")
    assert isinstance(first, SharedItem)
    again, updates = sender.get_and_update_item(None, "a")
    assert isinstance(again, SharedItem)
    assert updates is UPDATES
    assert again != first  # each is given back by itself
    assert sender.is_cached(["a", "b"]) == [True, False]
    assert sender.peek_prompt_updates("a") is UPDATES
    assert sender.peek_prompt_updates("b") is None
    sender.touch_sender_cache_item("b")
    assert sender.make_stats() == CacheInfo(1, 3)
    assert sender.make_stats(delta=True) == CacheInfo(1, 3)
    assert sender.make_stats(delta=True) == CacheInfo(0, 0)
    assert (sender.currsize, sender.capacity) == (PAGE, 4 * PAGE)


def test_a_request_is_committed_as_a_whole(sender, receiver):
    put(sender, "held")
    fresh = (make_item(value=9), UPDATES)
    with pytest.raises(MultiModalCacheMissError) as caught:
        sender.get_and_update([None, fresh, None, None], ["x", "new", "held", "y"])
    assert caught.value.mm_hashes == ["x", "y"]
    assert sender.num_in_use == 1
    assert not sender.is_cached_item("new")
    names = ["new", "held", "new", "new", "held"]
    sent = sender.get_and_update([fresh, None, None, fresh, None], names)
    features = [feature(item, name) for (item, _), name in zip(sent, names, strict=True)]
    got = [one.data["x"].data[0] for one in receiver.get_and_update_features(features)]
    assert got == [9, 7, 9, 9, 7]
    assert all(updates is UPDATES for _, updates in sent)


def test_the_oldest_go_and_their_prompt_updates_with_them(sender, receiver):
    for name in "abcdef":
        read(receiver, put(sender, name))
    assert sender.is_cached("abcdef") == [False, False, True, True, True, True]
    assert [sender.peek_prompt_updates(name) is None for name in "abc"] == [True, True, False]
    assert sender.currsize == sender.capacity


def test_what_is_on_its_way_or_read_stays(sender, receiver):
    handles = {name: put(sender, name) for name in "abcd"}
    live = read(receiver, handles["a"])
    assert put(sender, "e") == make_item()  # no room: by message
    assert not sender.is_cached_item("e")
    del live
    assert isinstance(put(sender, "e"), SharedItem)
    assert sender.is_cached("abcde") == [False, True, True, True, True]
    got = [read(receiver, handles[name]) for name in "bcd"]
    assert got == [make_item()] * 3
    assert sender.num_in_use == 4


def test_one_that_is_always_read_holds_up_no_other(sender, receiver):
    popular = read(receiver, put(sender, "popular", value=1))
    for number in range(20):
        assert read(receiver, put(sender, str(number), value=number))["x"].data[0] == number
    assert sender.is_cached(["popular", "19", "18", "17", "16"]) == [True, True, True, True, False]
    assert popular == make_item(value=1)


def test_a_touched_item_is_spared_while_there_is_other_room(sender, receiver):
    for name in "abcd":
        read(receiver, put(sender, name))
    sender.touch_sender_cache_item("a")
    read(receiver, put(sender, "e"))
    assert sender.is_cached("ab") == [True, False]
    for name in "acde":
        sender.touch_sender_cache_item(name)
    read(receiver, put(sender, "f"))
    assert sender.is_cached_item("f")


def test_too_large_an_item_goes_by_message(sender, receiver, caplog):
    put(sender, "a", num_bytes=3 * PAGE - HEADER)
    with caplog.at_level(logging.WARNING):
        for name in "bc":
            item = put(sender, name, num_bytes=3 * PAGE - HEADER + 1)
            assert read(receiver, item) is item
    (record,) = caplog.records
    assert "`--mm-shm-cache-max-object-size-mb`" in record.message
    assert sender.is_cached("abc") == [True, False, False]


def test_an_item_larger_than_the_ring_goes_by_message(tmp_path, caplog):
    sender = ShmObjectStoreSenderCache(2 * PAGE + 1, directory=tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not isinstance(put(sender, "a", num_bytes=2 * PAGE), SharedItem)
    assert "`--mm-processor-cache-gb`" in caplog.text
    assert isinstance(put(sender, "b", num_bytes=2 * PAGE - HEADER), SharedItem)
    sender.close()


def test_what_is_invalidated_is_still_read_to_its_end(sender, receiver):
    handle = put(sender, "a")
    sender.invalidate("a")
    sender.invalidate("a")
    assert not sender.is_cached_item("a")
    live = read(receiver, handle)
    assert live == make_item()
    assert isinstance(put(sender, "a", value=8), SharedItem)
    sender.clear_cache()
    assert sender.currsize == 2 * PAGE
    assert isinstance(put(sender, "b", num_bytes=2 * PAGE - HEADER), SharedItem)
    assert live == make_item()
    assert sender.is_cached("ab") == [False, True]


def test_a_handle_that_was_not_sent_is_taken_back(sender):
    handles = [put(sender, name) for name in "abcd"]
    assert put(sender, "e") == make_item()
    for _ in range(2):
        sender.withdraw(handles[0])
    sender.withdraw(make_item())  # went by message: nothing to take back
    assert sender.num_in_use == 3
    assert isinstance(put(sender, "e"), SharedItem)
    with pytest.raises(ShmHandleError):
        sender.withdraw(forge(handles[1], "object_id"))


def test_where_memory_ends_the_ring_ends(tmp_path, monkeypatch, caplog):
    limit = 2 * PAGE
    backed = Segment.back_with_memory

    def back(self: Segment, address: int, size: int) -> None:
        if address + size > limit:
            raise OSError(28, "No space left on device")
        backed(self, address, size)

    monkeypatch.setattr(Segment, "back_with_memory", back)
    sender = ShmObjectStoreSenderCache(8 * PAGE, directory=tmp_path)
    receiver = ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
    with caplog.at_level(logging.WARNING):
        assert put(sender, "large", num_bytes=4 * PAGE) == make_item(num_bytes=4 * PAGE)
        for number in range(10):
            assert read(receiver, put(sender, str(number), value=number))["x"].data[0] == number
    assert "no more shared memory" in caplog.text
    assert len(caplog.records) == 1
    assert sender.capacity == limit
    assert sender.is_cached(["7", "8", "9"]) == [False, True, True]
    sender.close()


def test_a_copy_that_fails_leaves_its_room(sender, monkeypatch):
    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", fail)
        with pytest.raises(MemoryError):
            put(sender, "a")
    assert (sender.num_in_use, sender.currsize) == (0, 0)
    assert isinstance(put(sender, "a"), SharedItem)


def test_threads_may_store_and_look_up_at_once(tmp_path):
    sender = ShmObjectStoreSenderCache(16 * PAGE, directory=tmp_path)
    receiver = ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
    problems: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in rng.integers(0, 24, 150).tolist():
            given = make_item(num_bytes=number * 400 + 1, value=number)
            item, _ = sender.get_and_update_item((given, UPDATES), str(number))
            if read(receiver, item) != given:
                problems.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert sender.num_in_use == 0
    assert sender.make_stats().total == 900
    sender.close()


@pytest.mark.parametrize("capacity", [-1, 0, PAGE - 1])
def test_a_ring_without_a_page_is_refused(tmp_path, capacity):
    with pytest.raises(ConfigError, match="mm_processor_cache_gb"):
        ShmObjectStoreSenderCache(capacity, directory=tmp_path)
