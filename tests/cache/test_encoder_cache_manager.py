"""Accounting of encoder outputs: references, freeable entries, eviction in the order of freeing."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mmjax.cache.encoder_cache_manager import EncoderCacheManager


def filled() -> EncoderCacheManager:
    """10 slots: `x` takes 4 for request a, `y` takes 4 for request b."""
    manager = EncoderCacheManager(10)
    for request_id, identifier in [("a", "x"), ("b", "y")]:
        assert manager.can_allocate(4, compute_budget=10)
        manager.allocate(request_id, identifier, 4)
    return manager


def test_a_hit_adds_a_reference() -> None:
    manager = filled()
    assert manager.check_and_update_cache("b", "x")
    assert "b" in manager.cached["x"]
    assert not manager.check_and_update_cache("b", "z")


def test_nothing_referenced_is_evicted() -> None:
    manager = filled()
    assert not manager.can_allocate(4, compute_budget=10)
    assert manager.get_freed_mm_hashes() == []
    assert manager.num_free_slots == manager.num_freeable_slots == 2


def test_the_oldest_freeable_entry_goes_first() -> None:
    manager = filled()
    manager.free_encoder_input("b", "y")
    manager.free_encoder_input("a", "x")
    assert (manager.num_free_slots, manager.num_freeable_slots) == (2, 10)
    assert manager.can_allocate(4, compute_budget=10)
    assert manager.get_freed_mm_hashes() == ["y"]
    assert (manager.num_free_slots, manager.num_freeable_slots) == (6, 10)
    assert manager.get_freed_mm_hashes() == []


def test_an_entry_that_is_asked_for_again_is_not_freeable() -> None:
    manager = filled()
    manager.free_encoder_input("a", "x")
    assert manager.check_and_update_cache("c", "x")
    assert manager.num_freeable_slots == 2
    assert not manager.can_allocate(4, compute_budget=10)


def test_an_item_may_not_pass_the_compute_budget_or_what_is_promised() -> None:
    manager = EncoderCacheManager(10)
    assert not manager.can_allocate(4, compute_budget=3)
    assert manager.can_allocate(4, compute_budget=10, num_scheduled=6)
    assert not manager.can_allocate(4, compute_budget=10, num_scheduled=7)


def test_what_was_allocated_again_is_not_reported_as_freed() -> None:
    manager = filled()
    manager.free_encoder_input("a", "x")
    assert manager.can_allocate(6, compute_budget=10)
    manager.allocate("c", "x", 4)
    assert manager.get_freed_mm_hashes() == []


def test_freeing_is_idempotent() -> None:
    manager = filled()
    for _ in range(2):
        manager.free_encoder_input("a", "x")
        manager.free("b")
        manager.free_encoder_input("b", "unknown")
    assert manager.num_freeable_slots == 10
    assert list(manager.freeable) == ["x", "y"]


def test_reset_forgets_everything() -> None:
    manager = filled()
    manager.reset()
    assert manager.cached == {}
    assert manager.num_free_slots == manager.num_freeable_slots == 10


REQUESTS = st.sampled_from("abc")
ITEMS = st.sampled_from("uvwxyz")


class EncoderMachine(RuleBasedStateMachine):
    """The counters always agree with the entries."""

    SIZE = 10

    def __init__(self) -> None:
        super().__init__()
        self.manager = EncoderCacheManager(self.SIZE)

    @rule(request_id=REQUESTS, identifier=ITEMS)
    def need(self, request_id: str, identifier: str) -> None:
        num_embeds = 1 + ord(identifier) % 5
        if self.manager.check_and_update_cache(request_id, identifier):
            return
        if self.manager.can_allocate(num_embeds, compute_budget=self.SIZE):
            self.manager.allocate(request_id, identifier, num_embeds)

    @rule(request_id=REQUESTS, identifier=ITEMS)
    def free_one(self, request_id: str, identifier: str) -> None:
        self.manager.free_encoder_input(request_id, identifier)

    @rule(request_id=REQUESTS)
    def free(self, request_id: str) -> None:
        self.manager.free(request_id)
        assert all(request_id not in holders for holders in self.manager.cached.values())

    @invariant()
    def slots_add_up(self) -> None:
        manager = self.manager
        sizes = {name: 1 + ord(name) % 5 for name in manager.cached}
        assert manager.num_free_slots == self.SIZE - sum(sizes.values())
        unreferenced = {name for name, holders in manager.cached.items() if not holders}
        assert unreferenced == set(manager.freeable)
        freeable = sum(sizes[name] for name in unreferenced)
        assert manager.num_freeable_slots == manager.num_free_slots + freeable


TestEncoderMachine = EncoderMachine.TestCase
TestEncoderMachine.settings = settings(max_examples=50, stateful_step_count=30)
