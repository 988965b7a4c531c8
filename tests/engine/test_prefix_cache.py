"""Shared beginnings: what is found, what is not, and that answers are the same with and without."""

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmjax.engine.core import EngineCore
from mmjax.engine.scheduling.adapters import RegisteredAdapter
from mmjax.engine.scheduling.outputs import SampledToken
from mmjax.engine.scheduling.request import BlockHasher, EncoderItem, Request
from mmjax.engine.scheduling.scheduler import Scheduler
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.weights.adapter import Adapter
from tests.engine import steps
from tests.engine.steps import BLOCK_SIZE, MAX_MODEL_LEN
from tests.engine.tiny import (
    answer,
    dense_greedy,
    drain,
    message,
    text,
    tiny_engine,
    tokens_of,
)

# ---- the scheduler alone ------------------------------------------------------------------------

make_scheduler = partial(
    steps.make_scheduler, max_num_batched_tokens=64, max_num_encoder_input_tokens=64
)


def make_request(
    request_id: str, token_ids: list[int], *items: EncoderItem, max_tokens: int = 1, **names: Any
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_model_len=MAX_MODEL_LEN,
        items=items,
        block_hasher=BlockHasher(block_size=BLOCK_SIZE, none_hash=b"start"),
        **names,
    )


def make_adapter(lora_name: str, version: int) -> RegisteredAdapter:
    read: Future[Adapter] = Future()
    read.set_result(Adapter(arrays={}, digest=b""))
    return RegisteredAdapter(lora_name, Path(), version, lambda digest: read)


def item(identifier: str, offset: int, length: int) -> EncoderItem:
    return EncoderItem(identifier=identifier, mm_position=PlaceholderRange(offset, length))


def run(scheduler: Scheduler, request: Request) -> tuple[int, list[str]]:
    """Serve a request; return where it started, and what was encoded for it."""
    scheduler.add_request(request)
    start, encoded = -1, []
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        encoded += [one.identifier for one in output.encoder_items]
        (scheduled,) = output.requests
        start = scheduled.start if start < 0 else start
        sampled = {request.request_id: [SampledToken(7)]} if scheduled.samples else {}
        scheduler.update_from_output(output, sampled)
    assert request.num_cached_tokens == start
    return start, encoded


TEXT = list(range(10, 30))


def test_an_equal_beginning_is_computed_once() -> None:
    scheduler = make_scheduler()
    assert run(scheduler, make_request("a", TEXT))[0] == 0
    assert run(scheduler, make_request("b", [*TEXT[:10], 1, 2, 3]))[0] == 8
    assert run(scheduler, make_request("c", TEXT))[0] == 16  # never all: the last has logits
    assert run(scheduler, make_request("d", [9, *TEXT]))[0] == 0
    assert scheduler.kv_cache.prefix_info == (24, 20 + 13 + 20 + 21)


def test_what_was_answered_is_part_of_the_next_turn() -> None:
    scheduler = make_scheduler()
    first = make_request("a", TEXT[:6], max_tokens=7)
    run(scheduler, first)
    # The last token that was sampled was never computed.
    turn = [*TEXT[:6], *first.output_token_ids, 50, 51]
    assert run(scheduler, make_request("b", turn))[0] == 12


def test_the_same_tokens_of_another_picture_are_not_the_same() -> None:
    scheduler = make_scheduler()
    first = make_request("a", TEXT, item("cat", 6, 8))
    assert run(scheduler, first) == (0, ["cat"])
    assert run(scheduler, make_request("b", TEXT, item("dog", 6, 8))) == (4, ["dog"])
    assert run(scheduler, make_request("c", TEXT, item("cat", 6, 8))) == (16, [])


def test_a_picture_behind_the_found_beginning_is_not_encoded_again() -> None:
    scheduler = make_scheduler()
    run(scheduler, make_request("a", TEXT, item("cat", 2, 8)))
    scheduler.encoder_cache.reset()
    turn = make_request("b", [*TEXT, 1, 2], item("cat", 2, 8))
    assert run(scheduler, turn) == (20, [])


def test_salts_and_adapters_keep_callers_apart() -> None:
    scheduler = make_scheduler(max_loras=1)
    run(scheduler, make_request("a", TEXT, cache_salt="x"))
    assert run(scheduler, make_request("b", TEXT))[0] == 0
    assert run(scheduler, make_request("c", TEXT, cache_salt="y"))[0] == 0
    for version, start in ((1, 0), (1, 16), (2, 0)):
        adapter = make_adapter("l", version)
        assert run(scheduler, make_request("d", TEXT, lora_request=adapter))[0] == start
    assert run(scheduler, make_request("e", TEXT, cache_salt="x"))[0] == 16


def test_a_span_in_both_directions_may_be_found_in_part() -> None:
    scheduler = make_scheduler(keeps_runs_whole=True)
    items = (item("cat", 5, 4), item("dog", 9, 8))
    run(scheduler, make_request("a", TEXT[:19], *items))
    # Found are 16 tokens, which end inside of the dog; they were computed with all of it in view.
    turn = make_request("b", TEXT[:19], *items)
    assert run(scheduler, turn) == (16, [])
    scheduler.encoder_cache.reset()
    turn = make_request("c", TEXT[:19], *items)
    assert run(scheduler, turn) == (16, ["dog"])


def test_the_rest_of_a_span_that_was_found_in_part_is_computed_at_once() -> None:
    scheduler = make_scheduler(keeps_runs_whole=True, max_num_batched_tokens=10)
    picture = item("cat", 2, 9)
    run(scheduler, make_request("a", TEXT[:12], picture))
    scheduler.add_request(make_request("other", [9] * 9, max_tokens=1))
    scheduler.add_request(make_request("b", TEXT[:12], picture))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [(one.start, one.end) for one in first.requests] == [(0, 9)]
    assert [(one.start, one.end) for one in second.requests] == [(8, 12)]


def test_a_cut_inside_a_picture_needs_its_embeddings_again() -> None:
    scheduler = make_scheduler()
    run(scheduler, make_request("a", TEXT[:12], item("cat", 2, 10)))
    scheduler.encoder_cache.reset()
    assert run(scheduler, make_request("b", TEXT[:12], item("cat", 2, 10))) == (8, ["cat"])


def test_a_preempted_request_finds_its_own_blocks() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2)
    for name in "ab":
        tokens = [*TEXT[:10], ord(name), 1]
        scheduler.add_request(make_request(name, tokens, max_tokens=14))
    restarts = []
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        restarts += [
            scheduled.start
            for scheduled in output.requests
            if scheduled.request.num_preemptions and scheduled.num_tokens > 1
        ]
        sampled = {s.request.request_id: [SampledToken(7)] for s in output.requests if s.samples}
        scheduler.update_from_output(output, sampled)
    assert restarts
    assert min(restarts) >= 8  # the beginning was shared with the one that ran on
    assert scheduler.kv_cache.usage == 0


def test_without_a_hasher_nothing_is_kept() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        request = Request(
            request_id=name,
            prompt_token_ids=TEXT,
            sampling_params=SamplingParams(max_tokens=1),
            max_model_len=64,
        )
        assert run(scheduler, request)[0] == 0


# ---- the whole engine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return tiny_engine()


def test_warm_answers_are_the_cold_ones(core: EngineCore) -> None:
    parts = (text(1, 5), (1, 2), text(2, 30), (2, 1), text(3, 9))
    expected = dense_greedy(message("oracle", parts))
    cold = answer(core, message("cold", parts))
    before = core.stats().prefix_cache_hits
    warm = answer(core, message("warm", parts))
    longer = message("longer", (*parts, text(4, 11)))
    assert cold == warm == expected
    assert answer(core, longer) == dense_greedy(longer)
    found = core.stats().prefix_cache_hits - before
    num_tokens = len(message("cold", parts).prompt_token_ids)
    assert found >= 2 * (num_tokens - 1) // 8 * 8 - 8
    assert core.compilations == 0


def test_a_second_turn_encodes_nothing_and_computes_the_new_text_alone(core: EngineCore) -> None:
    parts = (text(5, 3), (7, 2), text(6, 12))
    (first,) = drain_one(core, message("turn 1", parts, max_tokens=6))
    assert first.num_cached_tokens == 0
    core._scheduler.encoder_cache.reset()
    core._runner.rows.reset()
    turn = (*parts, answer(core, message("again", parts, max_tokens=6)), text(7, 9))
    encodes: list[object] = []
    encode = core._runner._run_encode

    def count(**arguments: Any) -> None:
        encodes.append(arguments)
        encode(**arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core._runner, "_run_encode", count)
        (second,) = drain_one(core, message("turn 2", turn))
    assert encodes == []
    num_tokens = len(message("turn 2", turn).prompt_token_ids)
    assert num_tokens - second.num_cached_tokens <= 9 + 1 + 8  # what is new, and part of a block


def drain_one(core: EngineCore, request: Any) -> tuple[Any]:
    """Serve a request; return its first delta."""
    core.add_request(request)
    return (drain(core)[request.request_id][0],)


def test_cache_salts_keep_answers_and_apart_blocks(core: EngineCore) -> None:
    request = message("salted", (text(8, 40),))
    expected = dense_greedy(request)
    for number, salt in enumerate(["a", "b", "a"]):
        renamed = msgspec.structs.replace(request, request_id=f"s{number}", cache_salt=salt)
        core.add_request(renamed)
        (first, *rest) = drain(core)[renamed.request_id]
        assert tokens_of([first, *rest]) == expected
        assert first.num_cached_tokens == (32 if number == 2 else 0)


def test_a_failed_step_leaves_no_block_to_be_found(core: EngineCore) -> None:
    parts = (text(9, 40),)
    answer(core, message("x", parts))
    core.recover()
    before = core.stats().prefix_cache_hits
    assert answer(core, message("y", parts)) == dense_greedy(message("z", parts))
    assert core.stats().prefix_cache_hits == before


def test_it_can_be_switched_off() -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    for name in "ab":
        answer(engine, message(name, (text(1, 40),)))
    assert engine.stats().prefix_cache_hits == 0
