"""A slot has one adapter, nobody loses one that it runs with, and everybody gets one in the end."""

from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.cache.adapter_slots import AdapterSlots

NUM_SLOTS = 3


def test_an_idle_adapter_keeps_its_slot_until_another_needs_it() -> None:
    slots = AdapterSlots(2)
    first, is_new = slots.acquire("a")
    assert is_new
    slots.release("a")
    assert slots.acquire("a") == (first, False)
    slots.acquire("b")
    slots.release("a")
    assert slots.may_start("c", set())
    assert slots.acquire("c") == (first, True)
    assert "a" not in slots


def test_the_least_recently_used_goes_first() -> None:
    slots = AdapterSlots(3)
    for key in "abca":
        slots.acquire(key)
        slots.release(key)
    slots.acquire("d")
    assert [key for key in "abcd" if key in slots] == ["a", "c", "d"]


def test_who_waits_does_not_wait_for_ever() -> None:
    """Requests of the adapters that run keep coming; one of another's comes once."""
    slots, draining = AdapterSlots(2), set[Hashable]()
    slots.acquire("a")
    slots.acquire("b")
    assert not slots.may_start("c", draining)
    assert draining == {"a"}
    assert not slots.may_start("a", draining), "behind the one that waits for its slot"
    assert slots.may_start("b", draining)
    slots.release("a")
    assert slots.may_start("c", set())


def test_the_slot_of_a_forgotten_adapter_is_free() -> None:
    slots = AdapterSlots(1)
    slots.acquire("a")
    slots.forget("a")
    assert "a" in slots, "somebody runs with it"
    slots.release("a")
    slots.forget("a")
    assert "a" not in slots
    slots.forget("a")
    assert slots.acquire("b") == (0, True)


class Model:
    """A device whose slots hold what was last loaded, and requests in the order of a queue."""

    def __init__(self) -> None:
        self.slots = AdapterSlots(NUM_SLOTS)
        self.device: dict[int, str] = {}
        self.waiting: list[str] = []
        self.running: list[tuple[str, int]] = []

    def admit(self) -> None:
        draining: set[Hashable] = set()
        for key in list(self.waiting):
            if self.slots.may_start(key, draining):
                self.waiting.remove(key)
                slot, is_new = self.slots.acquire(key)
                if is_new:
                    assert all(slot != used for _, used in self.running)
                    self.device[slot] = key
                self.running.append((key, slot))
        for key, slot in self.running:
            assert self.device[slot] == key, "another adapter's answer"

    def end(self, number: int) -> None:
        if self.running:
            key, _ = self.running.pop(number % len(self.running))
            self.slots.release(key)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abcdefg")),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("forget"), st.sampled_from("abcdefg")),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(OPERATIONS)
def test_any_requests_get_their_own_adapter_and_all_slots_come_back(
    operations: list[tuple[str, str | int]],
) -> None:
    model = Model()
    for kind, value in operations:
        if kind == "ask":
            model.waiting.append(str(value))
        elif kind == "end":
            model.end(int(value))
        elif kind == "forget":
            model.slots.forget(value)
        elif not model.running:
            model.slots.reset()
        model.admit()
        assert len(model.slots._slots) + len(model.slots._free) == NUM_SLOTS
    for _ in range(len(model.waiting) + len(model.running)):
        model.end(0)
        model.admit()
    assert not model.waiting
    assert model.slots.num_running == 0
