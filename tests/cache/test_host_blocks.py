"""Blocks in host memory: what is found, what goes first, and what is copied where."""

import random
from concurrent.futures import wait
from unittest.mock import patch

import pytest

from mmjax.cache.kv import block_reader
from mmjax.cache.kv.block_reader import BlockReader
from mmjax.cache.kv.host_blocks import HostBlocks
from mmjax.cache.kv.kv_cache_manager import BlockCopy, KVCacheManager

HASHES = [bytes([number]) for number in range(8)]


def test_what_was_kept_is_found() -> None:
    host = HostBlocks(4)
    slots = {name: host.keep(name) for name in HASHES[:2] + HASHES[3:4]}
    assert {name: host.find(name) for name in slots} == slots
    assert host.find(HASHES[2]) is None
    assert host.keep(HASHES[0]) is None
    assert host.num_used == 3


def test_the_least_recently_used_goes_first_and_of_a_prefix_its_end() -> None:
    host = HostBlocks(3)
    slots = [host.keep(name) for name in HASHES[:3]]
    host.touch(HASHES[:2])
    assert host.keep(HASHES[4]) == slots[2]
    assert host.keep(HASHES[5]) == slots[1]
    assert host.keep(HASHES[6]) == slots[0]


def test_random_uses_stay_within_the_slots() -> None:
    rng, host = random.Random(0), HostBlocks(3)
    held: dict[bytes, int] = {}
    for _ in range(500):
        name = rng.choice(HASHES)
        slot = host.keep(name)
        if slot is not None:
            held = {other: place for other, place in held.items() if place != slot}
            held[name] = slot
        assert {one for one in HASHES if one in host} == set(held)
        assert all(host.find(one) == place for one, place in held.items())
        assert host.num_used == len(set(held.values())) <= 3
    host.forget_all()
    assert host.find(HASHES[0]) is None
    assert {host.keep(name) for name in HASHES[:3]} == {0, 1, 2}


# ---- with block tables ---------------------------------------------------------------------------


def fill(manager: KVCacheManager, request_id: str, hashes: list[bytes]) -> list[BlockCopy]:
    """Compute a request whose blocks have these hashes, and end it; return what was copied."""
    manager.start(request_id, hashes)
    assert manager.allocate_slots(request_id, 4 * len(hashes))
    manager.restore_blocks(request_id, 4 * len(hashes))
    copied = manager.pop_copied()
    manager.cache_blocks(request_id, hashes, 4 * len(hashes))
    manager.free(request_id)
    return copied


def make_manager(num_slots: int, reader: BlockReader | None = None) -> KVCacheManager:
    host = HostBlocks(num_slots)
    return KVCacheManager(num_blocks=3, block_size=4, max_model_len=12, host=host, reader=reader)


def test_evicted_blocks_are_copied_and_found_behind_those_of_the_device() -> None:
    manager = make_manager(8)
    assert fill(manager, "a", HASHES[:3]) == []
    copied = fill(manager, "b", HASHES[5:7])
    assert len(copied) == 2  # the end of the first one's prefix
    assert manager.count_cached_tokens("other", HASHES, 13) == 12
    assert manager.start("c", HASHES[:3]) == 12
    assert manager.allocate_slots("c", 12)
    restored = manager.restore_blocks("c", 13)
    table = manager.get_block_table("c").tolist()
    slot_of = {one.block_id: one.slot for one in copied}
    # The last block was evicted first, into the first slot.
    assert [block for _, block in restored] == table[1:]
    assert {slot for slot, _ in restored} == set(slot_of.values())
    assert restored[0][0] == list(slot_of.values())[1]
    assert manager.host_info == (8, 12 + 8 + 13 - 4)
    # They are found on the device by the next one, in the same step.
    manager.start("d", HASHES[:3])
    assert manager.restore_blocks("d", 13) == []


def test_what_a_step_evicts_is_found_by_later_ones() -> None:
    manager = make_manager(8)
    fill(manager, "a", HASHES[:3])
    manager.start("b", [])
    manager.allocate_slots("b", 12)
    assert manager.count_cached_tokens("other", HASHES, 13) == 0
    assert len(manager.pop_copied()) == 3
    assert manager.count_cached_tokens("other", HASHES, 13) == 12
    assert manager.pop_copied() == []


def test_what_is_restored_stays_in_its_slot_for_the_step() -> None:
    manager = make_manager(2)
    fill(manager, "a", HASHES[:2])
    assert len(fill(manager, "b", HASHES[4:7])) == 2
    manager.start("c", HASHES[:2])
    manager.allocate_slots("c", 12)
    restored = manager.restore_blocks("c", 12)
    assert len(restored) == 2
    assert manager.pop_copied() == []  # though three blocks were evicted
    assert manager.host is not None
    assert [manager.host.find(name) for name in HASHES[:2]] == [slot for slot, _ in restored]


@pytest.mark.parametrize("is_idle", [False, True])
@pytest.mark.parametrize("idle_s", [block_reader._MAX_IDLE_S, -1.0])
def test_what_is_read_for_a_request_is_copied_from_there_and_gets_no_slot(
    is_idle: bool, idle_s: float
) -> None:
    files = {name: memoryview(name) for name in HASHES[:3]}
    reader = BlockReader(
        lambda name, memory: files.get(name), block_bytes=1, max_blocks=2, max_requests=1
    )
    manager = make_manager(8, reader)
    fill(manager, "a", HASHES[:1])
    with patch.object(block_reader, "_MAX_IDLE_S", idle_s):
        is_read = manager.is_read("b", HASHES[:4], 16, is_idle=is_idle)
    assert is_read or not is_idle or idle_s < 0
    while not manager.is_read("b", HASHES[:4], 16):
        wait(manager.pending, 1.0)
    assert manager.count_cached_tokens("b", HASHES[:4], 16) == 12
    assert manager.count_cached_tokens("other", HASHES[:4], 16) == 4
    assert manager.start("b", HASHES[:3]) == 12
    assert manager.allocate_slots("b", 12)
    table = manager.get_block_table("b").tolist()
    restored = manager.restore_blocks("b", 16)
    assert restored == [(files[HASHES[1]], table[1]), (files[HASHES[2]], table[2])]
    assert reader.get("b") == {}
    assert manager.host is not None
    assert [manager.host.find(name) for name in HASHES[1:3]] == [None, None]
    assert manager.is_read("b", HASHES[:4], 16)  # once, also where it is preempted
    manager.leave_directory()


def test_a_request_that_does_not_start_leaves_nothing_behind() -> None:
    manager = make_manager(8)
    fill(manager, "a", HASHES[:3])
    fill(manager, "b", HASHES[5:8])
    manager.start("c", HASHES[:3])
    manager.free("c")
    assert manager._to_restore == {}
    assert manager.host_info.hits == 0
    manager.reset_prefix_cache(keeps_host=True)
    assert manager.count_cached_tokens("other", HASHES, 13) == 12
    manager.reset_prefix_cache()
    assert manager.count_cached_tokens("other", HASHES, 13) == 0
