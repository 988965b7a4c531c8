"""The cache in shared memory: what is kept, what goes, what goes by message, what P1 reads."""

import logging
import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace

from mmjax.cache import CacheInfo, MultiModalCacheMissError
from mmjax.cache.media.shared_cache import (
    ALIGNMENT,
    ShmHandleError,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
)
from mmjax.cache.media.shared_directory import SharedDirectory
from mmjax.errors import ConfigError
from mmjax.processing import MultiModalFieldElem, MultiModalKwargsItem
from mmjax.processing.tensors.fields import (
    MultiModalBatchedField,
    MultiModalFlatField,
    MultiModalSharedField,
)
from mmjax.processing.tensors.inputs import ItemData, SharedItem
from tests.cache.logs import find_records
from tests.cache.shm_kit import PAGE, UPDATES, feature, make_item, over_the_bridge, put, read

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
    MultiModalFlatField(slices=[], keep_on_cpu=True),
    MultiModalFlatField(slices=[], dim=1),
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
    # Without a byte there is nothing to share.
    has_bytes = any(leaf.size for elem in sent.values() for leaf in leaves_of(elem.data))
    assert isinstance(handle, SharedItem) or not has_bytes
    got = read(receiver, over_the_bridge(handle))
    assert list(got) == list(sent)
    for key, elem in got.items():
        assert repr(elem.field) == repr(sent[key].field)
        for a, b in zip(leaves_of(elem.data), leaves_of(sent[key].data), strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
            assert a.flags.writeable is not has_bytes or not a.size
            assert not has_bytes or a.ctypes.data % ALIGNMENT == 0


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


def test_hits_misses_and_statistics(sender):
    with pytest.raises(MultiModalCacheMissError) as caught:
        sender.get_and_update_item(None, "a")
    assert caught.value.mm_hashes == ["a"]
    first = put(sender, "a")
    assert isinstance(first, SharedItem)
    again, updates = sender.get_and_update_item(None, "a")
    assert again == first
    assert updates is UPDATES
    assert sender.is_cached(["a", "b"]) == [True, False]
    assert sender.peek_prompt_updates("a") is UPDATES
    assert sender.peek_prompt_updates("b") is None
    sender.touch_sender_cache_item("b")
    assert sender.make_stats() == CacheInfo(1, 3)
    assert sender.make_stats(delta=True) == CacheInfo(1, 3)
    assert sender.make_stats(delta=True) == CacheInfo(0, 0)
    assert sender.currsize == PAGE


def test_a_request_is_committed_as_a_whole(sender, receiver):
    put(sender, "held")
    fresh = (make_item(value=9), UPDATES)
    with pytest.raises(MultiModalCacheMissError) as caught:
        sender.get_and_update([None, fresh, None, None], ["x", "new", "held", "y"])
    assert caught.value.mm_hashes == ["x", "y"]
    assert not sender.is_cached_item("new")
    names = ["new", "held", "new", "new", "held"]
    sent = sender.get_and_update([fresh, None, None, fresh, None], names)
    features = [feature(item, name) for (item, _), name in zip(sent, names, strict=True)]
    got = [one.data["x"].data[0] for one in receiver.get_and_update_features(features)]
    assert got == [9, 7, 9, 9, 7]
    assert all(updates is UPDATES for _, updates in sent)


def test_the_least_recently_used_go_and_their_prompt_updates_with_them(sender):
    for name in "abcd":
        put(sender, name)
    sender.touch_sender_cache_item("a")
    for name in "ef":
        put(sender, name)
    assert sender.is_cached("abcdef") == [True, False, False, True, True, True]
    assert sender.peek_prompt_updates("b") is None
    assert sender.currsize == 4 * PAGE == sum(file.stat().st_size for file in files_of(sender))


def files_of(sender: ShmObjectStoreSenderCache) -> list[Path]:
    return list(sender.path.iterdir())


def test_too_large_an_item_goes_by_message(sender, receiver, caplog):
    put(sender, "a", num_bytes=3 * PAGE)
    with caplog.at_level(logging.WARNING):
        for name in "bc":
            item = put(sender, name, num_bytes=3 * PAGE + 1)
            assert read(receiver, item) is item
    (record,) = find_records(caplog)
    assert "`--mm-shm-cache-max-object-size-mb`" in record.message
    assert sender.is_cached("abc") == [True, False, False]


def test_an_item_larger_than_the_cache_goes_by_message(tmp_path, caplog):
    sender = ShmObjectStoreSenderCache(2 * PAGE + 1, directory=tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not isinstance(put(sender, "a", num_bytes=2 * PAGE + 1), SharedItem)
    assert "`--mm-processor-cache-gb`" in caplog.text
    assert isinstance(put(sender, "b", num_bytes=2 * PAGE), SharedItem)
    sender.close()


@pytest.mark.parametrize("what", ["evicted", "invalidated", "cleared", "closed"])
def test_what_is_read_outlives_its_file(sender, receiver, what):
    live = read(receiver, put(sender, "a"))
    view = memoryview(live["x"].data[5:10].reshape(5, 1))
    if what == "evicted":
        for name in "bcde":
            put(sender, name, value=8)
    elif what == "invalidated":
        sender.invalidate("a")
        sender.invalidate("a")
    elif what == "cleared":
        sender.clear_cache()
    else:
        for half in (receiver, sender, receiver, sender):
            half.close()
    assert not sender.is_cached_item("a")
    assert live == make_item()
    del live
    assert bytes(view) == b"\7" * 5


def test_after_its_end_items_go_by_message(sender):
    put(sender, "a")
    sender.close()
    assert put(sender, "a") == make_item()
    with pytest.raises(MultiModalCacheMissError):
        sender.get_and_update_item(None, "a")


def test_where_memory_ends_others_make_room(tmp_path, monkeypatch, caplog):
    """A directory that has room for two pages, where more are allowed."""
    write = SharedDirectory.write

    def write_if_there_is_room(self, number, size, arrays):
        used = sum(file.stat().st_size for file in self.path.iterdir())
        if used + size > 2 * PAGE:
            raise OSError(28, "No space left on device")
        write(self, number, size, arrays)

    monkeypatch.setattr(SharedDirectory, "write", write_if_there_is_room)
    sender = ShmObjectStoreSenderCache(8 * PAGE, directory=tmp_path)
    receiver = ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            assert read(receiver, put(sender, str(number), value=number))["x"].data[0] == number
        assert sender.is_cached("789") == [False, True, True]
        assert put(sender, "large", num_bytes=4 * PAGE) == make_item(num_bytes=4 * PAGE)
    assert "no more shared memory" in caplog.text
    assert len(find_records(caplog)) == 1
    sender.close()


def test_others_do_not_go_in_vain(sender, monkeypatch):
    """Where someone else has taken the memory, one page that is not there costs one page."""
    for name in "abc":
        put(sender, name)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SharedDirectory, "write", fail)
    assert put(sender, "d") == make_item()
    assert sender.is_cached("abcd") == [False, True, True, False]


def test_a_copy_that_fails_leaves_no_file(sender, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        assert put(sender, "a") == make_item()
    assert (sender.currsize, files_of(sender)) == (0, [])
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
            # Another thread may have evicted it by now.
            with suppress(MultiModalCacheMissError):
                if read(receiver, item) != given:
                    problems.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert sender.make_stats().total == 900
    sender.close()


@pytest.mark.parametrize("capacity", [-1, 0, PAGE - 1])
def test_a_cache_without_a_page_is_refused(tmp_path, capacity):
    with pytest.raises(ConfigError, match="mm_processor_cache_gb"):
        ShmObjectStoreSenderCache(capacity, directory=tmp_path)


# ---- the cache in P1 ---------------------------------------------------------------------------


def test_a_feature_without_tensors_has_those_of_an_earlier_one(sender, receiver):
    features = [feature(put(sender, "a"), "a"), feature(make_item(value=1), None)]
    features += [feature(None, "a"), feature(None, None)]
    features[1].identifier = features[3].identifier = "plain"
    receiver.get_and_update_features(features)
    assert features[2].data is features[0].data
    assert features[3].data is features[1].data


def test_all_misses_come_at_once_and_the_rest_is_filled_in(sender, receiver):
    gone, here = put(sender, "gone"), put(sender, "here")
    sender.invalidate("gone")
    features = [feature(None, "x"), feature(gone, "gone"), feature(here, "here")]
    features += [feature(None, "gone"), feature(None, "y")]
    with pytest.raises(MultiModalCacheMissError) as caught:
        receiver.get_and_update_features(features)
    assert caught.value.mm_hashes == ["x", "gone", "y"]
    assert [one.data is None for one in features] == [True, True, False, True, True]
    assert features[2].data == make_item()


def test_a_new_reader_has_all_that_is_held(sender, receiver, tmp_path):
    handle = put(sender, "a")
    live = read(receiver, handle)
    sender.reset_readers()
    new = ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
    assert read(new, handle) == live == make_item()
    new.close()
    with pytest.raises(MultiModalCacheMissError):
        read(new, handle)


def test_a_handle_is_good_for_its_own_item_alone(sender, receiver):
    """Else what is read of item a would be kept, and found again, under the name of item b."""
    handle = put(sender, "a")
    with pytest.raises(ShmHandleError, match="handle of item a stands in the place of item b"):
        receiver.get_and_update_features([feature(over_the_bridge(handle), "b")])
    assert read(receiver, handle) == make_item()


@pytest.mark.parametrize("layout", [b"", b"\1", b"large"])
def test_a_layout_that_does_not_fit_its_file_is_refused(sender, receiver, layout):
    handle, large = put(sender, "a"), put(sender, "b", num_bytes=2 * PAGE)
    assert isinstance(handle, SharedItem)
    assert isinstance(large, SharedItem)
    layout = large.layout if layout == b"large" else layout
    with pytest.raises(ShmHandleError, match="does not fit"):
        read(receiver, replace(handle, layout=layout))


@pytest.mark.parametrize("number", [-1, 2**64, 17])
def test_a_handle_of_no_file_is_a_miss(sender, receiver, number):
    handle = put(sender, "a")
    assert isinstance(handle, SharedItem)
    with pytest.raises(MultiModalCacheMissError):
        read(receiver, replace(handle, number=number))


def test_a_tensor_may_have_any_name(receiver):
    elem = make_item()["x"]
    item = MultiModalKwargsItem({"number": elem, "layout": elem})
    assert read(receiver, over_the_bridge(item)) == item


@pytest.mark.parametrize("seed", range(4))
def test_no_byte_is_ever_wrong(tmp_path, seed):
    """Messages wait, are read, held and dropped in any order, while P0 evicts and P1 is replaced.

    A handle gives the bytes of its own item, or a miss if P0 has evicted it; what is held never
    changes; and the files are those of the items that P0 holds.
    """
    rng = random.Random(seed)
    sender = ShmObjectStoreSenderCache(12 * PAGE, max_object_bytes=6 * PAGE, directory=tmp_path)
    receiver = ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
    waiting: list[tuple[str, ItemData | None]] = []
    held: list[tuple[str, MultiModalKwargsItem]] = []
    items = {str(n): make_item(num_bytes=1 + n * n * 97, value=n) for n in range(16)}
    for _ in range(1500):
        match rng.choices(["send", "read", "drop", "invalidate", "kill"], [9, 9, 6, 1, 0.2])[0]:
            case "send":
                name = rng.choice([*items])
                waiting.append((name, sender.get_and_update_item((items[name], []), name)[0]))
            case "read" if waiting:
                name, sent = waiting.pop(rng.randrange(len(waiting)))
                try:
                    (one,) = receiver.get_and_update_features([feature(sent, name)])
                    assert one.tensors is not None
                    held.append((name, one.tensors))
                except MultiModalCacheMissError:
                    assert isinstance(sent, SharedItem)
                    assert not (sender.path / str(sent.number)).exists()
            case "drop" if held:
                held.pop(rng.randrange(len(held)))
            case "invalidate":
                sender.invalidate(rng.choice([*items]))
            case "kill":
                waiting.clear()
                receiver.close()
                sender.reset_readers()
                receiver = ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
        assert all(item == items[name] for name, item in held[-3:])
        assert len(files_of(sender)) == len(sender.list_hashes())
        assert sender.currsize <= 12 * PAGE
    assert all(item == items[name] for name, item in held)
    sender.close()
