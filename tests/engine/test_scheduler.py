"""Laws of the scheduler, in milliseconds: no device, tokens invented."""

import random
from collections import Counter, defaultdict
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from mmjax.cache.awaited_rows import AwaitedRows
from mmjax.cache.media.lru import CacheInfo
from mmjax.engine.scheduling.buckets import Buckets
from mmjax.engine.scheduling.outputs import SampledToken, SchedulerOutput
from mmjax.engine.scheduling.request import EncoderItem, Request
from mmjax.engine.scheduling.scheduler import Scheduler
from mmjax.errors import CapacityError, MediaIdConflictError, RequestValueError
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.rounding import cdiv
from tests.engine.steps import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    encoded,
    make_scheduler,
    step,
    windows,
)


def make_item(
    offset: int, length: int, identifier: str = "", mask: list[int] | None = None
) -> EncoderItem:
    is_embed = None if mask is None else np.array(mask, bool)
    position = PlaceholderRange(offset, length, is_embed)
    return EncoderItem(identifier=identifier or f"item at {offset}", mm_position=position)


def make_request(
    request_id: str,
    num_tokens: int,
    items: tuple[EncoderItem, ...] = (),
    *,
    max_tokens: int = 2,
    priority: int = 0,
    max_model_len: int = MAX_MODEL_LEN,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[3] * num_tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_model_len=max_model_len,
        items=items,
        priority=priority,
    )


# ---- token budget --------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_beside_others() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("long", 40))
    scheduler.add_request(make_request("short", 3))
    assert windows(step(scheduler)) == {"long": (0, 16)}
    # One token is kept for nobody yet: `short` waits until a step has room.
    assert windows(step(scheduler)) == {"long": (16, 32)}
    assert windows(step(scheduler)) == {"long": (32, 40), "short": (0, 3)}
    assert windows(step(scheduler)) == {"long": (40, 41), "short": (3, 4)}
    assert not scheduler.has_unfinished()


def test_running_requests_get_a_token_even_behind_a_long_prompt() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add_request(make_request("talker", 3, max_tokens=20))
    step(scheduler)
    scheduler.add_request(make_request("long", 40, priority=-1))
    for _ in range(3):
        assert "talker" in windows(step(scheduler))


def test_no_more_run_than_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add_request(make_request(name, 2))
    assert set(windows(step(scheduler))) == {"a", "b"}
    assert set(windows(step(scheduler))) == {"a", "b"}
    assert set(windows(step(scheduler))) == {"c"}


def test_priority_goes_before_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in [("late", 1), ("first", 0), ("second", 0)]:
        scheduler.add_request(make_request(name, 2, priority=priority, max_tokens=1))
    order = [next(iter(windows(step(scheduler)))) for _ in range(3)]
    assert order == ["first", "second", "late"]


# ---- items ---------------------------------------------------------------------------------------


def test_without_chunks_a_prompt_waits_for_a_step_of_its_own() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False)
    scheduler.add_request(make_request("small", 6, max_tokens=3))
    scheduler.add_request(make_request("large", 16))
    scheduler.add_request(make_request("behind", 2))
    assert windows(step(scheduler)) == {"small": (0, 6)}
    # Its 16 tokens do not fit beside a running request's one; nobody overtakes it.
    assert windows(step(scheduler)) == {"small": (6, 7)}
    assert windows(step(scheduler)) == {"small": (7, 8)}
    assert windows(step(scheduler)) == {"large": (0, 16)}
    assert windows(step(scheduler)) == {"large": (16, 17), "behind": (0, 2)}


def test_without_chunks_a_refused_start_holds_nothing() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_encoder_input_tokens=8)
    scheduler.add_request(make_request("first", 8, (make_item(0, 8),), max_tokens=2))
    scheduler.add_request(make_request("second", 8, (make_item(0, 4, "a"), make_item(4, 4, "b"))))
    assert encoded(step(scheduler)) == ["item at 0"]
    assert scheduler.encoder_cache.num_freeable_slots == 64
    assert encoded(step(scheduler)) == ["a", "b"]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_large_request_is_not_starved_by_small_ones_behind_it(chunked: bool) -> None:
    """Small requests come every step, for ever: who came first is served first."""
    scheduler = make_scheduler(num_blocks=16, enable_chunked_prefill=chunked)
    for number in range(4):
        scheduler.add_request(make_request(f"early {number}", 12, max_tokens=4))
    scheduler.add_request(make_request("large", 16, max_tokens=40))
    starts: dict[str, int] = {}
    for number in range(60):
        scheduler.add_request(make_request(f"late {number}", 2))
        for name in windows(step(scheduler)):
            starts.setdefault(name, number)
        if "large" not in scheduler.request_ids:
            break
    assert "large" not in scheduler.request_ids
    late = [first for name, first in starts.items() if name.startswith("late")]
    assert starts["large"] <= min(late)


def test_an_item_is_encoded_whole_when_its_first_embedding_comes() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 30, (make_item(10, 12),)))
    first = step(scheduler)
    assert windows(first) == {"a": (0, 16)}
    assert encoded(first) == ["item at 10"]
    assert scheduler.encoder_cache.cached == {"item at 10": {"a"}}
    second = step(scheduler)
    assert windows(second) == {"a": (16, 30)}
    assert encoded(second) == []
    assert not any(scheduler.encoder_cache.cached.values())


def test_a_span_in_both_directions_is_never_cut() -> None:
    scheduler = make_scheduler(keeps_runs_whole=True)
    scheduler.add_request(make_request("a", 30, (make_item(10, 12),)))
    first = step(scheduler)
    assert windows(first) == {"a": (0, 10)}
    assert encoded(first) == []
    second = step(scheduler)
    assert windows(second) == {"a": (10, 26)}
    assert encoded(second) == ["item at 10"]


def test_marks_around_a_span_may_go_in_other_steps() -> None:
    scheduler = make_scheduler(keeps_runs_whole=True)
    mask = [0] * 3 + [1] * 16 + [0] * 2
    scheduler.add_request(make_request("a", 30, (make_item(6, 21, mask=mask),)))
    outputs = [step(scheduler) for _ in range(3)]
    assert [windows(output)["a"] for output in outputs] == [(0, 9), (9, 25), (25, 30)]
    assert [encoded(output) for output in outputs] == [[], ["item at 6"], []]
    assert not any(scheduler.encoder_cache.cached.values())


def test_an_item_is_cut_between_its_spans() -> None:
    scheduler = make_scheduler(
        keeps_runs_whole=True, encoder_cache_size=24, max_num_encoder_input_tokens=24
    )
    mask = [0, *[1] * 7, 0] * 3
    scheduler.add_request(make_request("a", 36, (make_item(4, 27, mask=mask),)))
    outputs = [step(scheduler) for _ in range(3)]
    assert [windows(output)["a"] for output in outputs] == [(0, 14), (14, 30), (30, 36)]
    assert [encoded(output) for output in outputs] == [["item at 4"], [], []]


def test_places_without_embeddings_encode_nothing() -> None:
    scheduler = make_scheduler()
    mask = [0] * 8 + [1] * 4
    scheduler.add_request(make_request("a", 30, (make_item(10, 12, mask=mask),)))
    assert encoded(step(scheduler)) == []
    assert encoded(step(scheduler)) == ["item at 10"]


def test_an_item_beyond_the_encoder_budget_waits_behind_its_text() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, max_num_encoder_input_tokens=8)
    items = (make_item(2, 6, "x"), make_item(10, 6, "y"))
    scheduler.add_request(make_request("a", 20, items))
    first = step(scheduler)
    assert (windows(first), encoded(first)) == ({"a": (0, 10)}, ["x"])
    second = step(scheduler)
    assert (windows(second), encoded(second)) == ({"a": (10, 20)}, ["y"])


def test_one_picture_is_encoded_once_for_many_requests() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    for name in "ab":
        scheduler.add_request(make_request(name, 10, (make_item(2, 6, "same"),)))
    output = step(scheduler)
    assert set(windows(output)) == {"a", "b"}
    assert encoded(output) == ["same"]
    scheduler.add_request(make_request("c", 10, (make_item(1, 6, "same"),)))
    assert encoded(step(scheduler)) == []


def test_a_picture_twice_in_a_prompt_is_encoded_once_where_there_is_room() -> None:
    scheduler = make_scheduler()
    items = (make_item(0, 6, "same"), make_item(12, 6, "same"))
    scheduler.add_request(make_request("a", 30, items))
    assert encoded(step(scheduler)) == ["same"]
    assert scheduler.encoder_cache.cached == {"same": {"a"}}
    assert encoded(step(scheduler)) == []
    assert not any(scheduler.encoder_cache.cached.values())


def test_a_picture_that_comes_again_does_not_lock_out_the_one_between() -> None:
    scheduler = make_scheduler(encoder_cache_size=10, max_num_batched_tokens=8)
    items = (make_item(0, 6, "same"), make_item(8, 8, "large"), make_item(16, 6, "same"))
    scheduler.add_request(make_request("a", 24, items))
    outputs = [step(scheduler) for _ in range(3)]
    assert [encoded(output) for output in outputs] == [["same"], ["large"], ["same"]]
    assert [list(output.freed_identifiers) for output in outputs] == [[], ["same"], ["large"]]


def test_pictures_that_share_a_token_do_not_lock_out_each_other() -> None:
    """As Gemma 3's, whose line breaks merge into one token, which ends one and begins the next."""
    scheduler = make_scheduler(encoder_cache_size=8)
    marked = [0, 1, 1, 1, 1, 1, 1, 0]
    items = (make_item(0, 8, "one", marked), make_item(7, 8, "two", marked))
    scheduler.add_request(make_request("a", 18, items))
    outputs = [step(scheduler) for _ in range(3)]
    assert [encoded(output) for output in outputs] == [["one"], ["two"], []]
    assert [windows(output) for output in outputs] == [
        {"a": (0, 7)},
        {"a": (7, 18)},
        {"a": (18, 19)},
    ]


def test_evicted_outputs_are_reported_to_the_runner() -> None:
    scheduler = make_scheduler(encoder_cache_size=8)
    scheduler.add_request(make_request("a", 10, (make_item(0, 6, "x"),), max_tokens=1))
    assert encoded(step(scheduler)) == ["x"]
    scheduler.add_request(make_request("b", 10, (make_item(0, 6, "y"),), max_tokens=1))
    output = step(scheduler)
    assert (list(output.freed_identifiers), encoded(output)) == (["x"], ["y"])


def test_an_item_that_got_no_room_in_a_full_step_goes_first_in_the_next() -> None:
    scheduler = make_scheduler(keeps_runs_whole=True, max_num_seqs=3)
    scheduler.add_request(make_request("talker", 1, max_tokens=30))
    step(scheduler)
    # 16 places fill a whole step, and `talker` takes one of it every time.
    scheduler.add_request(make_request("picture", 20, (make_item(2, 16),)))
    assert windows(step(scheduler)) == {"talker": (1, 2), "picture": (0, 2)}
    assert windows(step(scheduler)) == {"talker": (2, 3)}
    assert windows(step(scheduler)) == {"picture": (2, 18)}
    assert windows(step(scheduler)) == {"talker": (3, 4), "picture": (18, 20)}


# ---- blocks --------------------------------------------------------------------------------------


def test_the_youngest_gives_way_and_computes_all_its_tokens_again() -> None:
    scheduler = make_scheduler(num_blocks=4)
    for name in "ab":
        scheduler.add_request(make_request(name, 7, max_tokens=6))
    assert windows(step(scheduler)) == {"a": (0, 7), "b": (0, 7)}
    assert windows(step(scheduler)) == {"a": (7, 8), "b": (7, 8)}
    output = step(scheduler)
    assert windows(output) == {"a": (8, 9)}
    assert output.num_preempted == 1
    while "b" not in (now := windows(step(scheduler))):
        pass
    assert now == {"b": (0, 9)}  # the prompt, and the two tokens it had sampled
    while scheduler.has_unfinished():
        step(scheduler)
    assert scheduler.kv_cache.num_free_blocks == 4


def test_a_prompt_is_let_in_only_when_all_of_it_fits() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 16))
    scheduler.add_request(make_request("b", 20))
    step(scheduler)
    for _ in range(2):
        assert list(windows(step(scheduler))) == ["a"]
    assert "b" in windows(step(scheduler))


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add_request(make_request("a", 15, max_tokens=4))
    scheduler.add_request(make_request("large", 24, max_tokens=1))
    scheduler.add_request(make_request("small", 1, max_tokens=1))
    started = []
    while scheduler.has_unfinished():
        started += [s.request.request_id for s in step(scheduler).requests if s.start == 0]
    assert started == ["a", "large", "small"]


# ---- taking in and abort -------------------------------------------------------------------------


def test_a_request_id_is_used_once_at_a_time() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 2))
    with pytest.raises(RequestValueError, match="in use"):
        scheduler.add_request(make_request("a", 2))


def test_all_that_may_run_and_wait_are_taken_at_once() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_queued_reqs=4)
    for number in range(6):
        scheduler.add_request(make_request(f"{number}", 2))
    with pytest.raises(CapacityError, match="0 requests run and 6 wait already"):
        scheduler.add_request(make_request("b", 2))
    scheduler.schedule()
    with pytest.raises(CapacityError, match="2 requests run and 4 wait already"):
        scheduler.add_request(make_request("b", 2))
    scheduler.abort(["0", "5"])
    scheduler.add_request(make_request("c", 2))
    scheduler.add_request(make_request("d", 2))
    with pytest.raises(CapacityError, match="wait already"):
        scheduler.add_request(make_request("e", 2))


def test_a_request_that_gets_no_blocks_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 2))
    with monkeypatch.context() as patched:
        patched.setattr(scheduler.kv_cache, "allocate_slots", lambda *_: False)
        assert windows(step(scheduler)) == {}
    assert (len(scheduler.running), len(scheduler.waiting)) == (0, 1)
    assert scheduler.kv_cache.usage == 0.0
    assert windows(step(scheduler)) == {"a": (0, 2)}


def test_tokens_and_found_items_are_counted_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=1)
    for name in "ab":
        items = (make_item(0, 6, "x"), make_item(6, 6, "y"), make_item(14, 2, name))
        scheduler.add_request(make_request(name, 20, items, max_tokens=3))
    num_tokens = 0
    while scheduler.has_unfinished():
        num_tokens += sum(s.samples for s in step(scheduler).requests)
    assert scheduler.encoder_cache.info == CacheInfo(hits=2, total=6)
    assert (scheduler.num_prompt_tokens, scheduler.num_generation_tokens) == (40, 6)
    assert num_tokens == 6


def test_one_identifier_cannot_stand_for_two_sizes() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 10, (make_item(0, 6, "x"),)))
    with pytest.raises(MediaIdConflictError, match="6 embeddings elsewhere and for 5"):
        scheduler.add_request(make_request("b", 10, (make_item(0, 5, "x"),)))
    with pytest.raises(MediaIdConflictError, match="2 embeddings elsewhere and for 3"):
        scheduler.add_request(make_request("c", 10, (make_item(0, 2, "y"), make_item(2, 3, "y"))))
    while scheduler.has_unfinished():
        step(scheduler)
    with pytest.raises(MediaIdConflictError, match="before"):
        scheduler.add_request(make_request("d", 10, (make_item(0, 5, "x"),)))


def test_who_waits_for_rows_keeps_no_suspect_from_asking_again() -> None:
    """After a failed step the requests in it need their rows anew, and nobody else may run."""
    jobs: defaultdict[str, Future[Any]] = defaultdict(Future)
    awaited = AwaitedRows(lambda item: jobs[item.identifier], max_requests=1)
    scheduler = make_scheduler(awaited=awaited)
    rows = np.zeros((4, 8), np.float32)
    for name in "ab":
        jobs[name].set_result(rows)
    for name in "abc":
        scheduler.add_request(make_request(name, 5, (make_item(0, 4, name),)))
    output = scheduler.schedule()
    assert windows(output).keys() == {"a", "b"}
    assert scheduler.begin_again([output]) == []
    jobs["c"].set_result(rows)
    for _ in range(9):
        step(scheduler)
    assert not scheduler.has_unfinished()
    assert awaited.may_ask("d")


def test_a_failed_step_ends_nobody_who_was_in_it_beside_one_that_has_left() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add_request(make_request(name, 5))
    output = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.begin_again([output]) == []
    assert scheduler.begin_again([scheduler.schedule()]) == ["b"], "alone"
    assert_all_returned(scheduler)


@pytest.mark.parametrize("num_steps", range(5))
def test_abort_at_every_stage_returns_everything(num_steps: int) -> None:
    scheduler = make_scheduler(num_blocks=8)
    for name in "ab":
        scheduler.add_request(make_request(name, 20, (make_item(4, 14, "x"),), max_tokens=4))
    for _ in range(num_steps):
        step(scheduler)
    scheduler.abort(["a", "b", "unknown"])
    assert not scheduler.has_unfinished()
    assert_all_returned(scheduler)
    scheduler.add_request(make_request("a", 2))
    assert windows(step(scheduler)) == {"a": (0, 2)}


def assert_all_returned(scheduler: Scheduler) -> None:
    assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_blocks
    cache = scheduler.encoder_cache
    assert cache.num_freeable_slots == cache.cache_size
    assert not any(cache.cached.values())
    assert not scheduler.running
    assert not scheduler.waiting


# ---- random workloads ----------------------------------------------------------------------------


def random_request(rng: random.Random, number: int) -> Request:
    items = []
    offset = rng.randrange(6)
    for _ in range(rng.randrange(4)):
        length, kind = rng.randint(2, 10), rng.randrange(3)
        # Few identifiers, so that requests share; the size is a function of the identifier.
        mask = [int(place % (2 + length // 2) != kind) for place in range(length)] if kind else None
        items.append(make_item(offset, length, f"{length}-{kind}", mask))
        offset += length + rng.randrange(4)
    num_tokens = min(offset + rng.randint(1, 12), MAX_MODEL_LEN - 8)
    return make_request(
        f"request {number}",
        num_tokens,
        tuple(item for item in items if item.end <= num_tokens),
        max_tokens=rng.randint(1, 8),
        priority=rng.randrange(2),
    )


class Watcher:
    """Checks every step against the laws, and counts what each request was computed."""

    def __init__(self, scheduler: Scheduler, settings: dict[str, Any]) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.computed: dict[str, int] = {}
        self.in_pool: dict[str, int] = {}
        self.sampled: Counter[str] = Counter()

    def step(self) -> None:
        output = self.scheduler.schedule()
        assert output.num_tokens <= self.settings["max_num_batched_tokens"]
        assert len(output.requests) <= self.settings["max_num_seqs"]
        assert output.requests, "someone waits, and nothing is computed"
        self._check_items(output)
        blocks = [self._check_window(scheduled) for scheduled in output.requests]
        used = [block for table in blocks for block in table]
        assert len(used) == len(set(used)), "a block belongs to two requests"
        sampled = {s.request.request_id: [SampledToken(7)] for s in output.requests if s.samples}
        self.sampled.update(sampled.keys())
        self.scheduler.update_from_output(output, sampled)

    def _check_items(self, output: SchedulerOutput) -> None:
        for identifier in output.freed_identifiers:
            del self.in_pool[identifier]
        sizes = {item.identifier: item.num_embeds for item in output.encoder_items}
        assert len(sizes) == len(output.encoder_items), "an item is encoded twice in a step"
        assert sum(sizes.values()) <= self.settings["max_num_encoder_input_tokens"]
        self.in_pool.update(sizes)
        assert sum(self.in_pool.values()) <= self.scheduler.encoder_cache.cache_size

    def _check_window(self, scheduled: Any) -> list[int]:
        request = scheduled.request
        expected = self.computed.get(request.request_id, 0)
        assert scheduled.start in (0, expected), "a place is skipped"
        self.computed[request.request_id] = scheduled.end
        for item in request.items_between(scheduled.start, scheduled.end):
            for first, last in item.mm_position.extract_embeds_range():
                if first >= scheduled.end or last < scheduled.start:
                    continue
                assert item.identifier in self.in_pool, "an embedding is needed and not there"
                if self.settings["keeps_runs_whole"]:
                    is_found = scheduled.start == scheduled.request.num_cached_tokens
                    assert scheduled.start <= first or is_found
                    assert last < scheduled.end
        num_blocks = cdiv(scheduled.end, BLOCK_SIZE)
        return scheduled.block_table[:num_blocks].tolist()


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_in_random_workloads(seed: int) -> None:
    rng = random.Random(seed)
    settings = {
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": rng.randint(10, 30),
        "max_num_encoder_input_tokens": rng.randint(10, 24),
        "keeps_runs_whole": rng.random() < 0.5,
    }
    scheduler = make_scheduler(
        num_blocks=rng.randint(16, 40), encoder_cache_size=rng.randint(10, 40), **settings
    )
    watcher = Watcher(scheduler, settings)
    requests = {f"request {n}": random_request(rng, n) for n in range(25)}
    to_come, aborted = list(requests.values()), set()
    while to_come or scheduler.has_unfinished():
        while to_come and rng.random() < 0.5:
            scheduler.add_request(to_come.pop())
        if rng.random() < 0.05 and scheduler.request_ids:
            victim = rng.choice(scheduler.request_ids)
            scheduler.abort([victim])
            aborted.add(victim)
        if scheduler.has_unfinished():
            watcher.step()
    for request_id, request in requests.items():
        if request_id not in aborted:
            assert request.is_finished
            assert watcher.sampled[request_id] == request.sampling_params.max_tokens
    assert_all_returned(scheduler)


# ---- padding -------------------------------------------------------------------------------------


def make_roomy_scheduler(**settings: Any) -> Scheduler:
    """Return one whose steps have 128, 256, 512 or 1,024 tokens, or few."""
    buckets = Buckets.create(max_num_seqs=4, max_num_batched_tokens=1024)
    settings = {"max_num_batched_tokens": 1024, "max_num_encoder_input_tokens": 1024, **settings}
    sizes = {"num_blocks": 400, "encoder_cache_size": 1024, "max_model_len": 1024}
    return make_scheduler(**sizes, **settings, buckets=buckets)


def window_sizes(scheduler: Scheduler) -> list[int]:
    """Schedule a step, and read it; return how many tokens of each request it computes."""
    return [window.num_tokens for window in step(scheduler).requests]


make_long = partial(make_request, max_model_len=1024)


def test_the_end_of_a_prompt_is_left_to_a_step_with_less_padding() -> None:
    scheduler = make_roomy_scheduler()
    scheduler.add_request(make_long("a", 610, max_tokens=9))
    assert [window_sizes(scheduler) for _ in range(3)] == [[512], [98], [1]]
    # Beside one that decodes; the other prompt is short enough.
    scheduler.add_request(make_long("b", 615))
    scheduler.add_request(make_long("c", 20))
    assert [window_sizes(scheduler) for _ in range(2)] == [[1, 491, 20], [1, 124, 1]]


def test_what_is_computed_at_once_is_not_cut() -> None:
    item = make_item(2, 600)
    whole = make_roomy_scheduler(keeps_runs_whole=True)
    whole.add_request(make_long("a", 610, (item,)))
    assert window_sizes(whole) == [610]
    without = make_roomy_scheduler(enable_chunked_prefill=False)
    without.add_request(make_long("a", 610))
    assert window_sizes(without) == [610]
    # An item that is encoded for the first part is not encoded again.
    cut = make_roomy_scheduler()
    cut.add_request(make_long("a", 700, (item, make_item(610, 20))))
    outputs = [cut.schedule(), cut.schedule()]
    assert [[one.num_tokens for one in output.requests] for output in outputs] == [[512], [188]]
    assert [len(output.encoder_items) for output in outputs] == [2, 0]
