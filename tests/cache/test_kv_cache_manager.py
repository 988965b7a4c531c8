"""Block tables grow by need, and every block returns."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmjax.cache.kv.kv_cache_manager import KVCacheManager


def make_manager(num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=4, max_model_len=18)


def block_ids_of(manager: KVCacheManager, request_id: str) -> list[int]:
    return list(manager._block_ids[request_id])


def test_a_table_holds_as_many_blocks_as_the_tokens_need() -> None:
    manager = make_manager()
    assert manager.start("a") == 0
    for num_tokens, num_blocks in [(1, 1), (4, 1), (5, 2), (5, 2), (16, 4)]:
        assert manager.allocate_slots("a", num_tokens)
        assert len(block_ids_of(manager, "a")) == num_blocks
    table = manager.get_block_table("a")
    assert table.dtype == np.int32
    assert table.tolist() == [*block_ids_of(manager, "a"), 0]


def test_too_few_blocks_change_nothing() -> None:
    manager = make_manager(num_blocks=3)
    manager.start("a")
    manager.start("b")
    assert manager.allocate_slots("a", 8)
    assert not manager.has_room("b", 8)
    assert not manager.allocate_slots("b", 8)
    assert block_ids_of(manager, "b") == []
    assert manager.num_free_blocks == 1
    manager.free("a")
    assert manager.allocate_slots("b", 8)


def test_the_beginning_of_a_request_is_evicted_last() -> None:
    manager = make_manager(num_blocks=3)
    manager.start("a")
    manager.allocate_slots("a", 12)
    block_ids = block_ids_of(manager, "a")
    manager.free("a")
    manager.start("b")
    manager.allocate_slots("b", 12)
    assert block_ids_of(manager, "b") == block_ids[::-1]


HASHES = [bytes([number]) for number in range(4)]


def test_a_prefix_is_found_shared_and_kept_after_its_holder() -> None:
    manager = make_manager()
    manager.start("a")
    manager.allocate_slots("a", 14)
    manager.cache_blocks("a", HASHES[:3], 9)
    assert (
        manager.count_cached_tokens("other", HASHES, 16) == 8
    )  # the third block is not computed yet
    manager.cache_blocks("a", HASHES[:3], 14)
    assert manager.count_cached_tokens("other", HASHES, 16) == 12
    blocks = block_ids_of(manager, "a")
    assert manager.start("b", HASHES) == 12
    assert block_ids_of(manager, "b") == blocks[:3]
    assert manager.get_block_table("b").tolist() == [*blocks[:3], 0, 0]
    manager.free("a")
    manager.free("b")
    assert manager.num_free_blocks == 8
    assert manager.start("c", HASHES[:2]) == 8
    assert block_ids_of(manager, "c") == blocks[:2]


def test_the_last_token_is_always_computed() -> None:
    manager = make_manager()
    manager.start("a")
    manager.allocate_slots("a", 12)
    manager.cache_blocks("a", HASHES[:3], 12)
    assert manager.count_cached_tokens("other", HASHES[:3], 12) == 8
    assert manager.count_cached_tokens("other", HASHES[:3], 13) == 12
    assert manager.count_cached_tokens("other", HASHES[:3], 1) == 0


def test_shared_blocks_leave_room_for_what_is_new() -> None:
    manager = make_manager(num_blocks=4)
    manager.start("a")
    manager.allocate_slots("a", 8)
    manager.cache_blocks("a", HASHES[:2], 8)
    assert manager.start("b", HASHES[:2]) == 8
    assert manager.has_room("b", 16)
    assert not manager.has_room("b", 17)
    assert manager.allocate_slots("b", 16)
    manager.free("b")
    assert manager.num_free_blocks == 2


def test_nothing_is_found_after_a_reset() -> None:
    manager = make_manager()
    manager.start("a")
    manager.allocate_slots("a", 8)
    manager.cache_blocks("a", HASHES[:2], 8)
    manager.reset_prefix_cache()
    assert manager.count_cached_tokens("other", HASHES, 16) == 0
    manager.free("a")
    assert manager.num_free_blocks == 8


def make_encoder_decoder(num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=4, max_model_len=18, max_encoder_len=12)


def test_an_encoders_states_have_a_table_of_their_own() -> None:
    manager = make_encoder_decoder()
    manager.start("a")
    assert manager.get_encoder_block_table("a").tolist() == [0, 0, 0]
    assert manager.start_encoder("a", 7)
    assert manager.allocate_slots("a", 9)
    own, encoder = block_ids_of(manager, "a"), manager.get_encoder_block_table("a")
    assert encoder.dtype == np.int32
    assert encoder[2] == 0
    assert not set(own) & set(encoder[:2].tolist())
    assert manager.num_free_blocks == 3
    manager.free("a")
    assert manager.num_free_blocks == 8
    manager.start("a")
    assert manager.start_encoder("a", 12), "a preempted request starts anew"


def test_too_little_room_for_an_encoder_changes_nothing() -> None:
    manager = make_encoder_decoder(num_blocks=3)
    manager.start("a")
    manager.start("b")
    assert manager.start_encoder("a", 8)
    assert not manager.start_encoder("b", 5)
    assert manager.num_free_blocks == 1
    assert manager.start_encoder("b", 4)


def test_an_encoders_states_are_never_shared() -> None:
    """They depend on the picture and the text together; the prompt's hashes say nothing of them."""
    manager = make_encoder_decoder()
    for name in "ab":
        manager.start(name, HASHES[:2])
        assert manager.start_encoder(name, 8)
        manager.allocate_slots(name, 8)
        manager.cache_blocks(name, HASHES[:2], 8)
    first, second = (set(manager.get_encoder_block_table(name)[:2].tolist()) for name in "ab")
    assert not first & second
    assert block_ids_of(manager, "a") == block_ids_of(manager, "b")
    manager.free("a")
    manager.free("b")
    manager.start("c", HASHES[:2])
    assert not set(block_ids_of(manager, "c")) & (first | second)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 18)), max_size=40))
def test_all_blocks_return(steps: list[tuple[str, int]]) -> None:
    """A request grows to a length; length 0 frees it."""
    manager = make_manager()
    live: set[str] = set()
    for request_id, num_tokens in steps:
        if num_tokens == 0:
            manager.free(request_id)
            live.discard(request_id)
            continue
        if request_id not in live:
            manager.start(request_id)
            live.add(request_id)
        manager.allocate_slots(request_id, num_tokens)
        held = [block_id for name in live for block_id in block_ids_of(manager, name)]
        assert len(held) == len(set(held)) == 8 - manager.num_free_blocks
    for request_id in live:
        manager.free(request_id)
    assert manager.num_free_blocks == 8
    assert manager.usage == 0
