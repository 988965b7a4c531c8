"""P1's half of the cache in shared memory: what is read, given back, missed and refused."""

import gc
import time
from dataclasses import fields, replace

import numpy as np
import pytest

from mmjax.cache import MultiModalCacheMissError
from mmjax.cache.media.shm.handle import ShmHandleError
from mmjax.cache.media.shm.receiver import MIN_NUM_LEASES, ShmObjectStoreReceiverCache
from mmjax.cache.media.shm.segment import HEADER, PAGE
from mmjax.cache.media.shm.sender import ShmObjectStoreSenderCache
from mmjax.errors import MMJaxError
from mmjax.processing import MultiModalFieldElem, MultiModalKwargsItem
from mmjax.processing.tensors.fields import MultiModalBatchedField
from mmjax.processing.tensors.shared_item import SharedItem
from tests.cache.shm_kit import UPDATES, feature, forge, make_item, over_the_bridge, put, read

# ---- the cache in P1 ---------------------------------------------------------------------------


def test_any_view_keeps_its_object(sender, receiver):
    got = read(receiver, put(sender, "a"))
    view = memoryview(got["x"].data[5:10].reshape(5, 1))
    del got
    assert sender.num_in_use == 1
    assert bytes(view) == b"\7" * 5
    del view
    assert sender.num_in_use == 0


def test_two_readings_of_one_object_are_given_back_by_themselves(sender, receiver):
    first = read(receiver, put(sender, "a"))
    second = read(receiver, sender.get_and_update_item(None, "a")[0])
    del first
    assert sender.num_in_use == 1
    del second
    assert sender.num_in_use == 0


def test_handles_may_come_in_any_order(sender, receiver):
    handles = [put(sender, "a") for _ in range(5)]
    for index in (3, 1, 4, 0):
        read(receiver, handles[index])
    assert sender.num_in_use == 1
    read(receiver, handles[2])
    assert sender.num_in_use == 0


def test_garbage_may_be_collected_while_the_lock_is_held(sender, receiver):
    got = read(receiver, put(sender, "a"))
    cycle = [got]
    cycle.append(cycle)  # pyright: ignore[reportArgumentType]  # a cycle has no type
    del got, cycle
    with receiver._lock:
        gc.collect()
    assert sender.num_in_use == 1
    kept = read(receiver, put(sender, "b"))
    assert sender.num_in_use == 1
    assert kept == make_item()


def test_a_feature_without_tensors_has_those_of_an_earlier_one(sender, receiver):
    features = [feature(put(sender, "a"), "a"), feature(make_item(value=1), None)]
    features += [feature(None, "a"), feature(None, None)]
    features[1].identifier = features[3].identifier = "plain"
    receiver.get_and_update_features(features)
    assert features[2].data is features[0].data
    assert features[3].data is features[1].data


def test_all_misses_come_at_once_and_the_rest_is_filled_in(sender, receiver):
    gone, here = put(sender, "gone"), put(sender, "here")
    sender.reset_readers()
    here, _ = sender.get_and_update_item(None, "here")
    features = [feature(None, "x"), feature(gone, "gone"), feature(here, "here")]
    features += [feature(None, "gone"), feature(None, "y")]
    with pytest.raises(MultiModalCacheMissError) as caught:
        receiver.get_and_update_features(features)
    assert caught.value.mm_hashes == ["x", "gone", "y"]
    assert [one.data is None for one in features] == [True, True, False, True, True]
    assert features[2].data == make_item()


def test_a_handle_of_what_was_evicted_is_a_miss(sender, receiver):
    stale = put(sender, "a")
    sender.withdraw(stale)
    for name in "bcde":
        read(receiver, put(sender, name))
    with pytest.raises(MultiModalCacheMissError):
        read(receiver, stale)


def test_a_handle_counts_once(sender, receiver):
    handle = put(sender, "a")
    live = read(receiver, handle)
    for _ in range(3):
        with pytest.raises(MultiModalCacheMissError):
            read(receiver, over_the_bridge(handle))
    assert sender.num_in_use == 1
    del live
    put(sender, "a")
    with pytest.raises(MultiModalCacheMissError):
        read(receiver, handle)
    assert sender.num_in_use == 1


def test_records_of_what_is_gone_are_dropped(sender, receiver):
    live = read(receiver, put(sender, "live"))
    for number in range(2 * MIN_NUM_LEASES):
        read(receiver, put(sender, str(number), num_bytes=1))
    assert len(receiver._leases) <= MIN_NUM_LEASES
    del live
    assert sender.num_in_use == 0


def test_a_new_reader_has_all_that_is_held(sender, receiver, tmp_path):
    put(sender, "on its way")
    live = read(receiver, put(sender, "a"))
    sender.reset_readers()
    assert sender.num_in_use == 0
    assert sender.is_cached(["a", "on its way"]) == [True, True]
    new = ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
    got = read(new, sender.get_and_update_item(None, "a")[0])
    del live  # too late
    assert sender.num_in_use == 1
    assert got == make_item()
    del got
    assert sender.num_in_use == 0
    new.close()


def test_a_reader_may_be_taken_for_a_new_one(sender, receiver):
    live = read(receiver, put(sender, "a"))
    sender.reset_readers()
    again, third = (read(receiver, put(sender, "a")) for _ in range(2))
    del live, again  # the first does not count
    assert sender.num_in_use == 1
    del third
    assert sender.num_in_use == 0


def test_views_outlive_both_halves(sender, receiver):
    live = read(receiver, put(sender, "a"))
    for half in (receiver, sender, receiver, sender):
        half.close()
    assert live == make_item()
    assert put(sender, "a") == make_item()
    assert not sender.is_cached_item("a")
    with pytest.raises(MultiModalCacheMissError):
        sender.get_and_update_item(None, "a")
    sender.reset_readers()
    sender.clear_cache()
    assert sender.num_in_use == 0


# ---- what is refused ---------------------------------------------------------------------------


FIELDS = [field.name for field in fields(SharedItem)]


@pytest.mark.parametrize("name", FIELDS)
def test_a_handle_that_was_changed_is_refused(sender, receiver, name):
    handle = put(sender, "a")
    with pytest.raises(ShmHandleError, match="SHM handle signature does not match") as caught:
        read(receiver, over_the_bridge(forge(handle, name)))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MMJaxError)
    assert read(receiver, handle) == make_item()


def test_bytes_cannot_move_from_one_field_to_another(sender, receiver):
    handle = put(sender, "ab")
    assert isinstance(handle, SharedItem)
    moved = replace(handle, mm_hash="a", layout=b"b" + handle.layout)
    with pytest.raises(ShmHandleError, match="SHM handle signature does not match"):
        read(receiver, moved)


@pytest.mark.parametrize("value", [-1, 2**64], ids=repr)
def test_a_handle_of_impossible_numbers_is_refused(sender, receiver, value):
    handle = put(sender, "a")
    assert isinstance(handle, SharedItem)
    handle = replace(handle, address=value)
    with pytest.raises(ShmHandleError, match="SHM handle signature cannot be checked"):
        read(receiver, handle)


def test_a_handle_is_good_for_its_own_item_alone(sender, receiver):
    """Else what is read of item a would be kept, and found again, under the name of item b."""
    handle = put(sender, "a")
    features = [feature(over_the_bridge(handle), "b"), feature(put(sender, "c", value=9), "c")]
    with pytest.raises(ShmHandleError, match="handle of item a stands in the place of item b"):
        receiver.get_and_update_features(features)
    assert [one.data for one in features] == [None, make_item(value=9)]
    assert read(receiver, handle) == make_item()


def test_a_tensor_may_have_any_name(receiver):
    elem = make_item()["x"]
    item = MultiModalKwargsItem({"address": elem, "monotonic_id": elem})
    assert read(receiver, over_the_bridge(item)) == item


def test_another_segments_handle_is_refused(sender, receiver, tmp_path):
    other = ShmObjectStoreSenderCache(4 * PAGE, directory=tmp_path)
    with pytest.raises(ShmHandleError, match="SHM handle signature"):
        read(receiver, put(other, "a"))
    other.close()


def test_beside_a_forgery_the_others_are_given_back(sender, receiver):
    features = [feature(put(sender, "a")), feature(forge(put(sender, "b"), "address"), "b")]
    features.append(feature(put(sender, "c"), "c"))
    with pytest.raises(ShmHandleError):
        receiver.get_and_update_features(features)
    features.clear()
    assert sender.num_in_use == 1  # b's true handle is still on its way


def test_a_picture_cannot_pretend_to_be_a_header(sender, receiver):
    """A stale handle, and on its address bytes that look like the object that it names."""
    handle = put(sender, "a", num_bytes=2 * PAGE - HEADER)
    stale = sender.get_and_update_item(None, "a")[0]
    read(receiver, handle)
    sender.withdraw(stale)
    object_id = stale.object_id
    drawn = np.tile(np.array([0, object_id, 2 * PAGE, 0, 0, 0, 0, 0], np.uint64), PAGE // 32)
    item = MultiModalKwargsItem({"x": MultiModalFieldElem(drawn, MultiModalBatchedField())})
    sender.clear_cache()
    sender.get_and_update_item((item, UPDATES), "b")
    with pytest.raises(MultiModalCacheMissError):
        read(receiver, stale)


# ---- speed -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_round_trip_costs_no_more_than_two_copies():
    """64 MB into shared memory and every byte in view again: at least half of memcpy's speed."""
    sender = ShmObjectStoreSenderCache(256 * 2**20)
    receiver = ShmObjectStoreReceiverCache(sender.name)
    item = make_item(num_bytes=64 * 2**20)
    source, target = item["x"].data, np.zeros(64 * 2**20, np.uint8)
    copies, trips = [], []
    for number in range(12):
        start = time.perf_counter()
        np.copyto(target, source)
        middle = time.perf_counter()
        handle, _ = sender.get_and_update_item((item, UPDATES), str(number))
        got = read(receiver, handle)
        copies.append(middle - start)
        trips.append(time.perf_counter() - middle)
        assert got["x"].data[-1] == 7
        del got
    sender.close()
    receiver.close()
    # From the fifth on the ring's pages are warm.
    assert min(trips[4:]) <= 2 * min(copies)
