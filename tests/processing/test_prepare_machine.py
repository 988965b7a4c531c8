"""Requests prepared, committed out of turn, dropped: the engine always gets each item's tensors."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmjax.cache import MultiModalProcessorSenderCache, MultiModalReceiverCache
from mmjax.errors import MultiModalCacheMissError, RequestValueError
from mmjax.processing import PreparedInputs
from tests.kit import draw
from tests.processing.test_processor import SOFT, Processor, ids, make

ITEM_BYTES = 8
requests = st.lists(st.sampled_from("abcdef"), max_size=5).map("".join)


class Requests(RuleBasedStateMachine):
    """One processor, a sender's cache beside it, and the receiver's behind the bridge."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[str, str, PreparedInputs]] = []
        self.sent: set[str] = set()

    @initialize(capacity=st.integers(0, 6))
    def start(self, capacity: int) -> None:
        # An item weighs 8 bytes; the odd ones leave room for none more.
        self.sender = MultiModalProcessorSenderCache(capacity * ITEM_BYTES + 3)
        self.receiver = MultiModalReceiverCache(capacity * ITEM_BYTES + 3)
        self.processor: Processor = make(self.sender, mm={"limit_mm_per_prompt": {"image": 5}})

    @rule(names=requests, without_data=requests)
    def prepare(self, names: str, without_data: str) -> None:
        order = self.sender.order
        images = [None if name in without_data else draw(ord(name), 1) for name in names]
        is_lacking = any(n in without_data and n not in order for n in names)
        with pytest.raises(RequestValueError) if is_lacking else nullcontext():
            prepared = self.processor.prepare(
                "[img]" * len(names), {"image": images}, mm_uuids={"image": list(names)}
            )
            self.pending.append((names, without_data, prepared))
        assert self.sender.order == order

    @rule(choose=st.integers(0, 99))
    def commit(self, choose: int) -> None:
        self._with_one(choose, self._commit)

    @rule(choose=st.integers(0, 99))
    def drop(self, choose: int) -> None:
        self._with_one(choose, lambda *_: None)

    @rule(name=st.sampled_from("abcdef"))
    def lose(self, name: str) -> None:
        """The engine lacks an item, and says so."""
        self.receiver._cache.pop(name, None)
        self.sender.invalidate(name)

    @rule()
    def restart(self) -> None:
        self.receiver.clear_cache()
        self.sender.clear_cache()

    def _with_one(self, choose: int, act: Callable[[str, str, PreparedInputs], None]) -> None:
        if self.pending:
            act(*self.pending.pop(choose % len(self.pending)))

    def _commit(self, names: str, without_data: str, prepared: PreparedInputs) -> None:
        order = self.sender.order
        lacking = [n for n in dict.fromkeys(names) if n not in order and n not in prepared.fresh]
        if lacking:
            with pytest.raises(MultiModalCacheMissError) as caught:
                self.processor.commit(prepared)
            assert (caught.value.mm_hashes, self.sender.order) == (lacking, order)
            if set(lacking) & set(without_data):
                with pytest.raises(RequestValueError, match="but data is not provided"):
                    self.processor.rebuild(prepared, lacking)
                return
            prepared = self.processor.rebuild(prepared, lacking)
        inputs = self.processor.commit(prepared)
        features = inputs.to_features()
        carried = [feature.mm_hash for feature in features if feature.data is not None]
        assert not set(carried) & set(order)
        if self.sender.order:  # an item that fits is carried once
            assert len(carried) == len(set(carried))
        resolved = self.receiver.get_and_update_features(features)
        assert inputs.prompt_token_ids == [*ids(""), *[SOFT] * 2 * len(names)]
        assert [self._width(feature.data) for feature in resolved] == [ord(name) for name in names]

    def _width(self, item: Any) -> int:
        return int(item["width"].data[0])

    @invariant()
    def both_sides_agree(self) -> None:
        if hasattr(self, "sender"):
            assert self.sender.order == self.receiver.order


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
