"""The cache in shared memory under whatever can happen to P0, to P1 and to what is between them.

An array's bytes follow from its hash. Requests wait in a channel, are read, held, dropped in any
order; the reader is killed and started anew; handles are sent twice, forged, taken back. Yet no
byte is ever wrong, nothing that is being read is overwritten, and nothing stays in use for ever.
"""

import logging
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mmjax.cache.media.processor_cache import ProcessedItem
from mmjax.cache.media.shm.handle import ShmHandleError
from mmjax.cache.media.shm.receiver import ShmObjectStoreReceiverCache
from mmjax.cache.media.shm.segment import HEADER, PAGE
from mmjax.cache.media.shm.sender import ShmObjectStoreSenderCache
from mmjax.errors import MultiModalCacheMissError
from mmjax.processing import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
    PromptReplacement,
)
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalSharedField
from mmjax.processing.tensors.inputs import ItemData
from mmjax.processing.tensors.shared_item import SharedItem

CAPACITY = 12 * PAGE
MAX_OBJECT_BYTES = 6 * PAGE
NUM_HASHES = 16
HANDLE_FIELDS = tuple(one.name for one in fields(SharedItem))
OVERSIZE = "15"
"""The item with this hash is larger than an object may be."""


@pytest.fixture(autouse=True)
def _no_notices(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "mmjax.cache.media.shm.sender")


def num_bytes(mm_hash: str) -> int:
    number = int(mm_hash)
    return MAX_OBJECT_BYTES if mm_hash == OVERSIZE else number**2 * PAGE // 60 + number


def make_item(mm_hash: str) -> MultiModalKwargsItem:
    values = np.random.default_rng(int(mm_hash)).integers(0, 256, num_bytes(mm_hash), np.uint8)
    name = MultiModalFieldElem(np.array([int(mm_hash)]), MultiModalSharedField(batch_size=1))
    return MultiModalKwargsItem(
        {"pixel_values": MultiModalFieldElem(values, MultiModalBatchedField()), "name": name}
    )


ITEMS = {str(number): make_item(str(number)) for number in range(NUM_HASHES)}
UPDATES = {h: [PromptReplacement("image", [1], [int(h)]).resolve(0)] for h in ITEMS}


@dataclass
class Message:
    """One request on its way to P1, or there."""

    hashes: list[str]
    features: list[MultiModalFeatureSpec]
    epoch: int
    handles: list[SharedItem] = field(default_factory=list)


class World:
    """Two processes' halves in one, and what a correct pair would do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sender = ShmObjectStoreSenderCache(
            CAPACITY, max_object_bytes=MAX_OBJECT_BYTES, directory=directory
        )
        self.channel: deque[Message] = deque()
        self.live: list[Message] = []
        self.ghosts: list[Message] = []
        """What a killed reader held, and gives back late."""
        self.last: list[Message] = []
        """Read some time ago; their handles are used up."""
        self.epoch = 0
        self.counts: Counter[str] = Counter()
        self.receivers = [self.attach()]

    def attach(self) -> ShmObjectStoreReceiverCache:
        return ShmObjectStoreReceiverCache(self.sender.name, directory=self.directory)

    # ---- what happens --------------------------------------------------------------------------

    def commit(self, hashes: Sequence[str], is_in_one_step: bool = True) -> None:
        """P0 processes what it does not hold, and sends a request."""
        held = self.sender.is_cached(hashes)
        items: list[ProcessedItem | None] = [
            None if is_held else (ITEMS[h], UPDATES[h])
            for h, is_held in zip(hashes, held, strict=True)
        ]
        if is_in_one_step:
            sent = self.sender.get_and_update(items, hashes)
        else:  # as one that has every item at hand, and asks for each alone
            fresh = [(ITEMS[h], UPDATES[h]) for h in hashes]
            sent = [
                self.sender.get_and_update_item(*one) for one in zip(fresh, hashes, strict=True)
            ]
        features = []
        for (item, updates), mm_hash in zip(sent, hashes, strict=True):
            assert updates is UPDATES[mm_hash]
            assert item is not None
            if not isinstance(item, SharedItem):
                self.counts["inline"] += 1
                assert item is ITEMS[mm_hash]
            features.append(self.feature(mm_hash, item))
        handles = [item for item, _ in sent if item is not None and isinstance(item, SharedItem)]
        self.channel.append(Message(list(hashes), features, self.epoch, handles))
        self.counts["commit"] += 1

    @staticmethod
    def feature(mm_hash: str, item: ItemData | None) -> MultiModalFeatureSpec:
        return MultiModalFeatureSpec(
            data=item,
            modality="image",
            identifier=mm_hash,
            mm_position=PlaceholderRange(offset=0, length=1),
            mm_hash=mm_hash,
        )

    def deliver(self, index: int) -> None:
        """P1 reads a request; what was sent to a reader that died is a miss."""
        message = self.channel[index]
        del self.channel[index]
        missing = self.read(message.features)
        stale = {
            feature.mm_hash
            for feature, handle in zip(message.features, self.as_sent(message), strict=True)
            if isinstance(handle, SharedItem) and message.epoch != self.epoch
        }
        assert set(missing) == stale
        if missing:
            self.counts["miss"] += 1
            for mm_hash in missing:
                self.sender.invalidate(mm_hash)
            self.commit(message.hashes)
        else:
            self.live.append(message)
            self.check(message)

    def as_sent(self, message: Message) -> Iterator[ItemData]:
        handles = iter(message.handles)
        for feature in message.features:
            data = feature.data
            is_inline = data is not None and data is ITEMS[str(feature.mm_hash)]
            yield data if data is not None and is_inline else next(handles)

    def read(self, features: list[MultiModalFeatureSpec]) -> list[str]:
        try:
            self.receivers[-1].get_and_update_features(features)
        except MultiModalCacheMissError as error:
            return error.mm_hashes
        return []

    def drop(self, index: int) -> None:
        """P1 is done with a request."""
        self.check(self.live[index])
        self.last = [*self.last[-3:], replace(self.live[index], features=[])]
        del self.live[index]

    def repeat(self, index: int) -> None:
        """A message comes a second time, during its request or after it."""
        message = [*self.live, *self.last][index]
        for handle in message.handles:
            assert self.read([self.feature(handle.mm_hash, handle)])
        self.counts["repeat"] += 1

    def forge(self, index: int, name: str, position: int) -> None:
        """Somebody changes a handle on its way; the true one then comes too."""
        item = self.channel[index].handles[0]
        value = getattr(item, name)
        if isinstance(value, bytes):
            raw = bytearray(value)
            raw[position % len(raw)] ^= 1 + position % 255
            value = bytes(raw)
        elif isinstance(value, int):
            value ^= 1 << position % 64
        else:
            value += chr(ord("a") + position % 26)
        forged = replace(item, **{name: value})
        with pytest.raises(ShmHandleError, match="SHM handle signature"):
            self.receivers[-1].get_and_update_features([self.feature(forged.mm_hash, forged)])
        self.counts["forge"] += 1

    def withdraw(self) -> None:
        """P0 takes back the newest request, which was not sent."""
        for item in self.channel.pop().handles * 2:
            self.sender.withdraw(item)

    def kill_reader(self) -> None:
        """P1 dies with what it held; another takes its place."""
        self.ghosts += self.live
        self.live = []
        self.epoch += 1
        self.sender.reset_readers()
        self.receivers.append(self.attach())
        self.counts["kill"] += 1

    def renew(self) -> None:
        """P0 voids what it made for a reader that has got nothing yet."""
        if not self.live:
            self.epoch += 1
            self.sender.reset_readers()
            self.counts["renew"] += 1

    def bury(self) -> None:
        """What a dead reader held is given back, too late to count."""
        self.ghosts.clear()
        for receiver in self.receivers[:-1]:
            receiver.close()
        del self.receivers[:-1]

    # ---- what must hold ------------------------------------------------------------------------

    def check(self, message: Message) -> None:
        for feature in message.features:
            assert feature.data == ITEMS[str(feature.mm_hash)]
            assert isinstance(feature.data, MultiModalKwargsItem)
            array = feature.data["pixel_values"].data
            if feature.data is not ITEMS[str(feature.mm_hash)]:
                assert not array.flags.writeable

    def check_all(self) -> None:
        for message in self.live:
            self.check(message)
        assert self.sender.currsize <= CAPACITY
        present = [one for one in (*self.live, *self.channel) if one.epoch == self.epoch]
        ids = {h.object_id for one in present for h in one.handles}
        assert self.sender.num_in_use == len(ids)
        assert not self.sender.is_cached_item(OVERSIZE)
        for mm_hash, updates in UPDATES.items():
            is_held = self.sender.is_cached_item(mm_hash)
            assert (self.sender.peek_prompt_updates(mm_hash) is updates) == is_held

    def end(self) -> None:
        """After the last request, all room can be had again."""
        while self.channel:
            self.deliver(0)
        while self.live:
            self.drop(0)
        self.check_all()
        assert self.sender.num_in_use == 0
        page = MultiModalKwargsItem.dummy(PAGE - HEADER)
        for number in range(CAPACITY // PAGE):
            item, _ = self.sender.get_and_update_item((page, []), f"page {number}")
            assert item is not None
            assert isinstance(item, SharedItem)
        assert self.sender.currsize == CAPACITY
        self.bury()
        self.receivers[-1].close()
        self.sender.close()
        assert not list(self.directory.iterdir())


class SharedMemory(RuleBasedStateMachine):
    """Hypothesis finds the shortest story that goes wrong."""

    indices = st.integers(0, 2**16)

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory(dir=Path("/dev/shm"))
        self.world = World(Path(self.folder.name))

    @rule(
        numbers=st.lists(st.integers(0, NUM_HASHES - 1), min_size=1, max_size=4), one=st.booleans()
    )
    def commit(self, numbers: list[int], one: bool) -> None:
        self.world.commit([str(number) for number in numbers], one)

    @rule(index=indices, is_in_order=st.booleans())
    def deliver(self, index: int, is_in_order: bool) -> None:
        if self.world.channel:
            self.world.deliver(0 if is_in_order else index % len(self.world.channel))

    @rule(index=indices)
    def drop(self, index: int) -> None:
        if self.world.live:
            self.world.drop(index % len(self.world.live))

    @rule(index=indices)
    def repeat(self, index: int) -> None:
        if self.world.live or self.world.last:
            self.world.repeat(index % (len(self.world.live) + len(self.world.last)))

    @rule(
        index=indices,
        name=st.sampled_from(HANDLE_FIELDS),
        position=indices,
    )
    def forge(self, index: int, name: str, position: int) -> None:
        channel = self.world.channel
        if channel and channel[index % len(channel)].handles:
            self.world.forge(index % len(channel), name, position)

    @rule()
    def withdraw(self) -> None:
        if self.world.channel:
            self.world.withdraw()

    @rule()
    def kill_reader(self) -> None:
        self.world.kill_reader()

    @rule()
    def renew(self) -> None:
        self.world.renew()

    @rule()
    def bury(self) -> None:
        self.world.bury()

    @rule(number=st.integers(0, NUM_HASHES - 1))
    def invalidate(self, number: int) -> None:
        self.world.sender.invalidate(str(number))

    @rule(number=st.integers(0, NUM_HASHES - 1))
    def touch(self, number: int) -> None:
        self.world.sender.touch_sender_cache_item(str(number))

    @rule()
    def clear(self) -> None:
        self.world.sender.clear_cache()

    @invariant()
    def holds(self) -> None:
        self.world.check_all()

    def teardown(self) -> None:
        self.world.end()
        self.folder.cleanup()


SharedMemory.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
class TestSharedMemory(SharedMemory.TestCase):
    pass


def act(world: World, rng: random.Random) -> None:
    """Do one thing; the common ones much more often than the rare."""
    (action,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    if action == "commit" and len(world.channel) < 6:
        # Small pictures most of the time; now and then all sizes.
        top = NUM_HASHES - 1 if rng.random() < 0.3 else NUM_HASHES // 2
        hashes = [str(rng.randint(0, top)) for _ in range(rng.randint(1, 3))]
        world.commit(hashes, rng.random() < 0.5)
    elif action == "deliver" and world.channel:
        world.deliver(0)
    elif action in ("drop", "repeat") and world.live:
        getattr(world, action)(rng.randrange(len(world.live)))
    elif action == "withdraw" and world.channel:
        world.withdraw()
    elif action == "forge" and world.channel and world.channel[-1].handles:
        world.forge(len(world.channel) - 1, rng.choice(HANDLE_FIELDS), rng.getrandbits(16))
    elif action == "invalidate":
        world.sender.invalidate(str(rng.randrange(NUM_HASHES)))
    elif action == "clear":
        world.sender.clear_cache()
    elif action in ("kill_reader", "bury", "renew"):
        getattr(world, action)()


WEIGHTS = {
    **{"commit": 300, "deliver": 300, "drop": 350, "withdraw": 10, "forge": 5, "repeat": 5},
    **{"invalidate": 10, "clear": 1, "kill_reader": 1, "renew": 2, "bury": 3},
}


def drive(world: World, rng: random.Random, num_operations: int) -> None:
    for number in range(num_operations):
        act(world, rng)
        if number % 50 == 0:
            world.check_all()


@pytest.mark.parametrize("num_operations", [8_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_operations(tmp_path: Path, num_operations: int):
    world = World(tmp_path)
    drive(world, random.Random(num_operations), num_operations)
    assert min(world.counts[name] for name in ("commit", "inline", "miss", "kill", "forge")) > 5
    world.end()
