"""The mirrored caches under random events of two processes.

P0 prepares requests against a cache that others change meanwhile, commits them later or never;
messages wait in a channel; P1 rejects some, is restarted, loses entries. Yet every request gets its
items, and no client sees a cache miss.
"""

import logging
import random
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mmjax.cache import (
    MultiModalCacheMissError,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from mmjax.processing import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
    PromptReplacement,
)
from mmjax.processing.prompt_updates.updates import ResolvedPromptUpdate
from mmjax.processing.tensors.fields import MultiModalBatchedField

ROOT = Path(__file__).parents[2]
CAPACITY = 100
NUM_HASHES = 10
OVERSIZE = 3 * CAPACITY
MAX_HEALS = 2
"""The second time, P0 sends every item of the request: nothing is left that could be missing."""

Fresh = dict[str, tuple[MultiModalKwargsItem, list[ResolvedPromptUpdate]]]


@pytest.fixture(autouse=True)
def _no_notices(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "mmjax.cache.media.processor_cache")


@dataclass
class Request:
    """One request as P0 knows it."""

    number: int
    hashes: list[str]
    fresh: Fresh
    invalid: list[str] = field(default_factory=list)
    """What P1 lacked: P0 forgets it whenever it commits the request again."""
    num_heals: int = 0
    is_aborted: bool = False
    is_done: bool = False
    """Served, or rejected by P1: P0 needs nothing more for it."""


@dataclass
class Message:
    """One request on its way to P1."""

    request: Request
    features: list[MultiModalFeatureSpec]


class World:
    """P0, a channel, P1, and the replies."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = {f"h{index}": size for index, size in enumerate(sizes)}
        self.sender = MultiModalProcessorSenderCache(CAPACITY)
        self.receiver = MultiModalReceiverCache(CAPACITY)
        self.requests: list[Request] = []
        self.prepared: list[Request] = []
        self.channel: deque[Message] = deque()
        self.misses: deque[tuple[Request, list[str]]] = deque()
        self.is_disturbed = False
        self.must_clear = False
        self.num_served = self.num_heals = self.num_left_out = 0

    # ---- P0 ------------------------------------------------------------------------------------

    def process(self, mm_hash: str) -> tuple[MultiModalKwargsItem, list[ResolvedPromptUpdate]]:
        value = int(mm_hash[1:])
        data = np.full(self.sizes[mm_hash], value, np.uint8)
        elem = MultiModalFieldElem(data, MultiModalBatchedField())
        update = PromptReplacement("image", [1], [2, value]).resolve(0)
        return MultiModalKwargsItem({"pixel_values": elem}), [update]

    def prepare(self, hashes: list[str]) -> None:
        """A thread looks at the cache, and processes what it lacks now."""
        fresh: Fresh = {}
        for mm_hash in hashes:
            updates = self.sender.peek_prompt_updates(mm_hash)
            assert (updates is not None) == self.sender.is_cached_item(mm_hash)
            if updates is None:
                fresh[mm_hash] = self.process(mm_hash)
            else:
                assert updates[0].content.full == [2, int(mm_hash[1:])]
        request = Request(len(self.requests), hashes, fresh)
        self.requests.append(request)
        self.prepared.append(request)

    def commit(self, index: int) -> None:
        """Some thread's turn: bring its request to the cache and to the channel, as one."""
        request = self.prepared.pop(index % len(self.prepared))
        if request.is_aborted:
            return
        for mm_hash in request.invalid:
            self.sender.invalidate(mm_hash)
        items = [request.fresh.get(mm_hash) for mm_hash in request.hashes]
        lacking = [
            mm_hash
            for mm_hash in dict.fromkeys(request.hashes)
            if not (mm_hash in request.fresh or self.sender.is_cached_item(mm_hash))
        ]
        if lacking:
            before = self.sender.order, self.sender.make_stats()
            with pytest.raises(MultiModalCacheMissError) as caught:
                self.sender.get_and_update(items, request.hashes)
            assert caught.value.mm_hashes == lacking
            assert before == (self.sender.order, self.sender.make_stats())
            self.rebuild(request, lacking)
            return
        sent = self.sender.get_and_update(items, request.hashes)
        features = [
            MultiModalFeatureSpec(
                data=item,
                modality="image",
                identifier=f"adapter:{mm_hash}",
                mm_position=PlaceholderRange(offset, 1),
                mm_hash=mm_hash,
            )
            for offset, (mm_hash, (item, _)) in enumerate(zip(request.hashes, sent, strict=True))
        ]
        self.num_left_out += sum(feature.data is None for feature in features)
        self.channel.append(Message(request, features))

    def rebuild(self, request: Request, hashes: list[str]) -> None:
        """Process items again; the thread will want to commit once more."""
        request.fresh = request.fresh | {mm_hash: self.process(mm_hash) for mm_hash in hashes}
        self.prepared.append(request)

    def abort(self, index: int) -> None:
        request = self.requests[index % len(self.requests)]
        request.is_aborted = True

    def receive_miss(self) -> None:
        request, missing = self.misses.popleft()
        request.num_heals += 1
        self.num_heals += 1
        assert request.num_heals <= MAX_HEALS
        request.invalid = missing if request.num_heals < MAX_HEALS else request.hashes
        self.rebuild(request, request.invalid)

    # ---- P1 ------------------------------------------------------------------------------------

    def deliver(self, *, is_rejected: bool = False) -> None:
        """P1 takes a message: resolves its features first, whatever becomes of the request."""
        message = self.channel.popleft()
        request = message.request
        # As decoded: the features are P1's own.
        features = [replace(feature) for feature in message.features]
        own = {f.mm_hash for f in features if f.data is not None}
        held = self.receiver.order
        lacking = [f.mm_hash for f in features if f.mm_hash not in own and f.mm_hash not in held]
        if lacking:
            assert self.is_disturbed, lacking
            with pytest.raises(MultiModalCacheMissError) as caught:
                self.receiver.get_and_update_features(features)
            assert caught.value.mm_hashes == list(dict.fromkeys(lacking))
            if not (request.is_aborted or is_rejected):
                self.misses.append((request, caught.value.mm_hashes))
        else:
            assert self.receiver.get_and_update_features(features) == features
            self.num_served += 1
        request.is_done |= is_rejected or not lacking
        for sent, feature in zip(message.features, features, strict=True):
            assert sent.data is None or feature.data is sent.data
            assert feature.mm_hash is not None
            expected = None if feature.mm_hash in lacking else self.process(feature.mm_hash)[0]
            assert feature.data == expected

    # ---- disturbances --------------------------------------------------------------------------

    def restart(self, *, is_drained: bool) -> None:
        """P1 dies with all that it holds; P0 learns of it later, and sends meanwhile."""
        self.is_disturbed = self.must_clear = True
        self.receiver = MultiModalReceiverCache(CAPACITY)
        if is_drained:
            for message in self.channel:
                self.prepared.append(message.request)  # to be sent again, as nobody answered it
            self.channel.clear()

    def clear_sender(self) -> None:
        """P0 learns of the restart."""
        self.must_clear = False
        self.sender.reset_readers()

    def drop(self, mm_hash: str, *, from_sender: bool) -> None:
        """One side loses an entry, by an unknown bug."""
        self.is_disturbed = True
        if from_sender:
            self.sender.invalidate(mm_hash)
        else:
            self.receiver._cache.pop(mm_hash, None)

    # ---- what must hold ------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everybody finish; then every request has its end, and undisturbed halves agree."""
        while self.prepared or self.channel or self.misses:
            while self.prepared:
                self.commit(0)
            while self.channel:
                self.deliver()
            while self.misses:
                self.receive_miss()
        for request in self.requests:
            assert request.is_done or request.is_aborted, request
        self.requests.clear()
        if not self.is_disturbed:
            assert self.sender.order == self.receiver.order
            assert self.sender.currsize == self.receiver.currsize

    def agree_anew(self) -> None:
        """Both sides forget all, with nothing under way: from here on they agree again."""
        self.settle()
        self.sender.clear_cache()
        self.receiver.clear_cache()
        self.is_disturbed = self.must_clear = False

    def check_capacity(self) -> None:
        for cache in (self.sender, self.receiver):
            assert cache.currsize <= CAPACITY
            assert cache.currsize == sum(self.sizes[mm_hash] for mm_hash in cache.order)


class MirroredMachine(RuleBasedStateMachine):
    """Chooses what happens, and looks for the shortest way to break it."""

    hashes = st.sampled_from([f"h{index}" for index in range(NUM_HASHES)])
    numbers = st.integers(0, 20)

    @initialize(
        sizes=st.lists(
            st.one_of(st.integers(0, CAPACITY), st.just(OVERSIZE)),
            min_size=NUM_HASHES,
            max_size=NUM_HASHES,
        )
    )
    def begin(self, sizes: list[int]) -> None:
        self.world = World(sizes)

    @rule(items=st.lists(hashes, min_size=1, max_size=4))
    def prepare(self, items: list[str]) -> None:
        self.world.prepare(items)

    @precondition(lambda self: self.world.prepared)
    @rule(index=numbers)
    def commit(self, index: int) -> None:
        self.world.commit(index)

    @precondition(lambda self: self.world.requests)
    @rule(index=numbers)
    def abort(self, index: int) -> None:
        self.world.abort(index)

    @precondition(lambda self: self.world.channel)
    @rule(is_rejected=st.booleans())
    def deliver(self, is_rejected: bool) -> None:
        self.world.deliver(is_rejected=is_rejected)

    @precondition(lambda self: self.world.misses)
    @rule()
    def receive_miss(self) -> None:
        self.world.receive_miss()

    @rule(is_drained=st.booleans())
    def restart(self, is_drained: bool) -> None:
        self.world.restart(is_drained=is_drained)

    @precondition(lambda self: self.world.must_clear)
    @rule()
    def clear_sender(self) -> None:
        self.world.clear_sender()

    @rule(mm_hash=hashes, from_sender=st.booleans())
    def drop(self, mm_hash: str, from_sender: bool) -> None:
        self.world.drop(mm_hash, from_sender=from_sender)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule()
    def agree_anew(self) -> None:
        self.world.agree_anew()

    @invariant()
    def capacity_is_kept(self) -> None:
        if hasattr(self, "world"):
            self.world.check_capacity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


class CalmMachine(MirroredMachine):
    """The same without what makes the halves differ: here no miss may happen at all."""

    restart = clear_sender = drop = None  # pyrefly: ignore[bad-override]  # rules removed


TestMirroredMachine = MirroredMachine.TestCase
TestMirroredMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCalmMachine = CalmMachine.TestCase
TestCalmMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


CALM = {"prepare": 30, "commit": 28, "deliver": 28, "receive_miss": 20, "abort": 3, "settle": 1}
STORMY = CALM | {"restart": 1, "clear_sender": 2, "drop": 4, "agree_anew": 1}


def drive(seed: int, num_operations: int, weights: dict[str, int]) -> World:
    """Make random operations; those that cannot happen now are not counted."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 5, 10, 20, 40, CAPACITY, OVERSIZE]) for _ in range(NUM_HASHES)]
    world, names, counts = World(sizes), list(weights), list(weights.values())
    done = 0
    while done < num_operations:
        if apply_operation(world, rng.choices(names, counts)[0], rng):
            world.check_capacity()
            done += 1
    world.settle()
    return world


def apply_operation(world: World, name: str, rng: random.Random) -> bool:
    """Apply one operation; False where it cannot happen."""
    number = rng.randrange(1000)
    hashes = [f"h{rng.randrange(NUM_HASHES)}" for _ in range(rng.randint(1, 4))]
    match name:
        case "prepare" if len(world.prepared) < 8:
            world.prepare(hashes)
        case "commit" if world.prepared:
            world.commit(number)
        case "deliver" if world.channel:
            world.deliver(is_rejected=number < 50)
        case "receive_miss" if world.misses:
            world.receive_miss()
        case "abort" if world.requests:
            world.abort(-1 - number % 10)
        case "settle" if number < 100:
            world.settle()
        case "restart":
            world.restart(is_drained=number % 2 == 0)
        case "clear_sender" if world.must_clear:
            world.clear_sender()
        case "drop":
            world.drop(hashes[0], from_sender=number % 2 == 0)
        case "agree_anew" if number < 100:
            world.agree_anew()
        case _:
            return False
    return True


def test_calm_halves_never_miss():
    world = drive(seed=0, num_operations=5_000, weights=CALM)
    assert not world.is_disturbed
    assert world.num_heals == 0
    assert world.num_served > 1_200
    assert world.num_left_out > 1_200  # and hits there were


def test_every_request_is_served_whatever_happens():
    world = drive(seed=1, num_operations=5_000, weights=STORMY)
    assert world.num_served > 1_000
    assert world.num_heals > 50  # the storm was one


def drive_apart(seeds: range, num_operations: int) -> None:
    """Make so many operations for each seed, in a process where no types are checked at run time.

    That takes a tenth of the time; the shorter runs above have the checks.
    """
    code = (
        "import sys; from tests.cache.test_mirrored_machine import CALM, STORMY, drive\n"
        "*bounds, count = map(int, sys.argv[1:])\n"
        "for seed in range(*bounds):\n"
        "    drive(seed, count, CALM)\n"
        "    drive(seed, count, STORMY)\n"
    )
    numbers = [str(seeds.start), str(seeds.stop), str(num_operations // 2)]
    done = subprocess.run(
        [sys.executable, "-c", code, *numbers],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]


def test_thirty_thousand_operations():
    drive_apart(range(1), 30_000)


@pytest.mark.slow
def test_a_million_operations():
    drive_apart(range(10), 100_000)
