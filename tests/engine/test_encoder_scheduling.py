"""Laws of the scheduler for an encoder-decoder: no device, tokens invented."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from mmjax.engine.scheduling.admission import AdmissionLimits
from mmjax.engine.scheduling.outputs import SchedulerOutput
from mmjax.engine.scheduling.request import EncoderItem, EncoderPrompt, Request
from mmjax.engine.scheduling.scheduler import Scheduler
from mmjax.errors import MediaIdConflictError, RequestValueError
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.rounding import cdiv
from tests.engine import steps
from tests.engine.steps import BLOCK_SIZE, encoded, sample, step, windows

MAX_MODEL_LEN, MAX_ENCODER_LEN = 32, 12
make_scheduler = partial(
    steps.make_scheduler,
    max_model_len=MAX_MODEL_LEN,
    max_encoder_len=MAX_ENCODER_LEN,
    max_num_encoder_input_tokens=32,
    max_num_encoder_states=24,
)


def make_image(name: str, num_embeds: int = 4) -> EncoderItem:
    return EncoderItem(identifier=name, mm_position=PlaceholderRange(0, num_embeds))


def make_request(
    request_id: str,
    num_tokens: int,
    encoder_len: int,
    *,
    max_tokens: int = 2,
    images: Sequence[EncoderItem] = (),
) -> Request:
    prompt = EncoderPrompt(token_ids=np.zeros(encoder_len, np.int32), items=images)
    states = EncoderItem(
        identifier=f"encoder of {request_id}",
        mm_position=PlaceholderRange(0, encoder_len),
        prompt=prompt,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=[3] * num_tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_model_len=MAX_MODEL_LEN,
        encoder=states,
    )


def check_nothing_is_held(scheduler: Scheduler) -> None:
    assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_blocks
    assert scheduler.encoder_cache.num_freeable_slots == scheduler.encoder_cache.cache_size


# ---- admission -----------------------------------------------------------------------------------


def test_the_first_window_brings_the_states_and_later_ones_read_them() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 20, 9))
    first, second, third = (step(scheduler) for _ in range(3))
    assert encoded(first) == ["encoder of a"]
    assert not encoded(second) + encoded(third)
    assert [windows(output)["a"] for output in (first, second, third)] == [
        (0, 16),
        (16, 20),
        (20, 21),
    ]
    assert [output.requests[0].num_new_states for output in (first, second, third)] == [9, 0, 0]
    tables = [output.requests[0].encoder_table for output in (first, second, third)]
    table = tables[0]
    assert table is not None
    assert len(set(table.tolist())) == len(table) == 3
    assert all(np.array_equal(other, table) for other in tables if other is not None)
    assert not set(table.tolist()) & set(first.requests[0].block_table[:5].tolist())
    check_nothing_is_held(scheduler)


def test_states_hold_no_pool_once_they_are_written() -> None:
    scheduler = make_scheduler(encoder_cache_size=12)
    for name in "abc":
        scheduler.add_request(make_request(name, 1, 12, max_tokens=9))
    # The pool has room for one; each goes on while the next is encoded.
    assert [list(windows(step(scheduler))) for _ in range(3)] == [["a"], ["a", "b"], [*"abc"]]
    assert step(scheduler).freed_identifiers == []


def test_an_image_is_encoded_once_for_all_prompts_about_it() -> None:
    scheduler = make_scheduler()
    image = make_image("x")
    for name in "ab":
        scheduler.add_request(make_request(name, 1, 6, images=[image, image]))
    assert encoded(step(scheduler)) == ["x", "encoder of a", "encoder of b"]
    scheduler.add_request(make_request("c", 1, 7, images=[image]))
    assert encoded(step(scheduler)) == ["encoder of c"]
    info = scheduler.encoder_cache.info
    assert (info.hits, info.total) == (2, 6)


def test_states_of_ended_requests_go_before_an_image() -> None:
    """One image and one prompt's states fill the pool: only states make room."""
    scheduler = make_scheduler(encoder_cache_size=16)
    names = [str(n) for n in range(5)]
    outputs = []
    for name in names:
        scheduler.add_request(make_request(name, 1, 12, images=[make_image("x")]))
        while scheduler.has_unfinished():
            outputs.append(step(scheduler))
    expected = ["x", *(f"encoder of {name}" for name in names)]
    assert [name for output in outputs for name in encoded(output)] == expected
    freed = [name for output in outputs for name in output.freed_identifiers]
    assert freed == expected[1:-1]
    check_nothing_is_held(scheduler)


def test_states_of_running_requests_go_before_an_image_too() -> None:
    scheduler = make_scheduler(encoder_cache_size=16)
    outputs = []
    for name in "abc":
        scheduler.add_request(make_request(name, 1, 12, images=[make_image("x")], max_tokens=20))
        outputs.append(step(scheduler))
    assert [encoded(output) for output in outputs] == [
        ["x", "encoder of a"],
        ["encoder of b"],
        ["encoder of c"],
    ]


def test_an_id_stands_for_one_number_of_embeddings() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 1, 12, images=[make_image("x", 4)]))
    for _ in range(3):
        with pytest.raises(MediaIdConflictError, match="4 embeddings"):
            scheduler.add_request(make_request("b", 1, 12, images=[make_image("x", 5)]))
        step(scheduler)


def test_a_request_without_an_encoder_has_no_table() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(
        Request(
            request_id="a",
            prompt_token_ids=[3],
            sampling_params=SamplingParams(max_tokens=1),
            max_model_len=MAX_MODEL_LEN,
        )
    )
    (scheduled,) = step(scheduler).requests
    assert scheduled.encoder_table is None
    assert scheduled.num_new_states == 0


# ---- lack of room --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_blocks": 7}, "blocks of the encoder"),
        ({"num_blocks": 8}, "blocks of the prompt"),
        ({"max_num_encoder_states": 20}, "states of a step"),
        ({"max_num_encoder_input_tokens": 20}, "what a step encodes"),
        ({"encoder_cache_size": 20}, "the pool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whoever_finds_no_room_waits_and_holds_nothing(
    settings: dict[str, Any], reason: str
) -> None:
    scheduler = make_scheduler(**settings)
    scheduler.add_request(make_request("a", 5, 12))
    scheduler.add_request(make_request("b", 5, 12))
    scheduler.add_request(make_request("c", 1, 1))
    first = scheduler.schedule()
    assert windows(first) == {"a": (0, 5)}, reason
    assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_blocks - 3 - 2
    assert encoded(first) == ["encoder of a"], "nobody is overtaken"
    scheduler.update_from_output(first, sample(first))
    order = list(windows(first))
    while scheduler.has_unfinished():
        order += [name for name in windows(step(scheduler)) if name not in order]
    assert order == ["a", "b", "c"]
    check_nothing_is_held(scheduler)


# ---- preemption ----------------------------------------------------------------------------------


def run(scheduler: Scheduler, names: str, max_tokens: int) -> list[SchedulerOutput]:
    """Run requests that begin together, and grow into each other's room, to their end."""
    for name in names:
        scheduler.add_request(make_request(name, 3, 8, max_tokens=max_tokens))
    outputs = []
    while scheduler.has_unfinished():
        outputs.append(step(scheduler))
    check_nothing_is_held(scheduler)
    return outputs


def starts_of(outputs: list[SchedulerOutput], name: str) -> list[tuple[int, int]]:
    """Return (first window's end, states written) of each start of a request."""
    return [
        (scheduled.end, scheduled.num_new_states)
        for output in outputs
        for scheduled in output.requests
        if scheduled.request.request_id == name and scheduled.num_new_states
    ]


def test_a_preempted_request_writes_its_states_again() -> None:
    outputs = run(make_scheduler(num_blocks=8), "ab", 10)
    assert sum(output.num_preempted for output in outputs) == 1
    assert starts_of(outputs, "a") == [(3, 8)]
    (first, again) = starts_of(outputs, "b")
    assert first == (3, 8)
    assert again[0] > 3, "what was sampled is computed again"
    assert again[1] == 8
    assert [name for output in outputs for name in encoded(output)] == [
        "encoder of a",
        "encoder of b",
    ], "the encoder's output was still in the pool"


def test_a_preempted_request_whose_states_are_gone_is_encoded_again() -> None:
    outputs = run(make_scheduler(num_blocks=10, encoder_cache_size=8), "abc", 16)
    names = [name for output in outputs for name in encoded(output)]
    held: set[str] = set()
    for output in outputs:
        held -= set(output.freed_identifiers)
        held |= set(encoded(output))
        needed = {
            s.request.encoder.identifier
            for s in output.requests
            if s.num_new_states and s.request.encoder is not None
        }
        assert needed <= held
    assert len(names) > len(set(names)) == 3


@pytest.mark.parametrize("num_steps", range(4))
def test_an_abort_frees_all(num_steps: int) -> None:
    scheduler = make_scheduler(num_blocks=8)
    for name in "abc":
        scheduler.add_request(make_request(name, 20 if name == "a" else 3, 8, max_tokens=9))
    for _ in range(num_steps):
        step(scheduler)
    scheduler.abort("abc")
    check_nothing_is_held(scheduler)


# ---- random workloads ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_no_step_holds_too_much_and_all_end(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=rng.choice([11, 14, 30]),
        encoder_cache_size=rng.choice([24, 28, 48]),
        max_num_encoder_states=rng.choice([12, 24]),
    )
    images = [make_image(f"image {n}", n) for n in range(1, 6)]
    batch = [
        make_request(
            f"{n}",
            rng.randint(1, 20),
            rng.randint(5, 12),
            max_tokens=rng.randint(1, 12),
            images=rng.sample(images, rng.randint(0, 2)),
        )
        for n in range(25)
    ]
    held: dict[str, int] = {}
    to_come = list(batch)
    for _ in range(2000):
        while to_come and rng.random() < 0.4:
            scheduler.add_request(to_come.pop())
        output = step(scheduler)
        check_step(scheduler, output)
        check_pool(held, output)
        assert sum(held.values()) <= scheduler.encoder_cache.cache_size
        if not to_come and not scheduler.has_unfinished():
            break
    assert all(request.is_finished for request in batch)
    check_nothing_is_held(scheduler)


def check_step(scheduler: Scheduler, output: SchedulerOutput) -> None:
    num_states = sum(scheduled.num_new_states for scheduled in output.requests)
    assert num_states <= scheduler._max_num_encoder_states
    blocks: list[int] = []
    for scheduled in output.requests:
        request = scheduled.request
        assert scheduled.encoder_table is not None
        blocks += scheduled.encoder_table[: cdiv(request.encoder_len, BLOCK_SIZE)].tolist()
        blocks += scheduled.block_table[: cdiv(scheduled.end, BLOCK_SIZE)].tolist()
    assert len(blocks) == len(set(blocks)), "no block is anybody else's"


def check_pool(held: dict[str, int], output: SchedulerOutput) -> None:
    """What a step reads is there, in the order in which the runner makes it."""
    for identifier in output.freed_identifiers:
        del held[identifier]
    for item in output.encoder_items:
        if item.prompt is not None:
            assert {one.identifier for one in item.prompt.items} <= held.keys()
        held[item.identifier] = item.num_embeds
    for scheduled in output.requests:
        if scheduled.num_new_states and scheduled.request.encoder is not None:
            assert scheduled.request.encoder.identifier in held


# ---- limits --------------------------------------------------------------------------------------


def test_what_never_fits_beside_its_encoder_is_refused() -> None:
    limits = AdmissionLimits(
        max_model_len=MAX_MODEL_LEN,
        num_token_ids=10,
        vocab_size=10,
        num_blocks=8,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=16,
        encoder_budget=16,
        keeps_runs_whole=False,
        max_encoder_len=MAX_ENCODER_LEN,
    )
    limits.check_request(make_request("a", 10, 12, max_tokens=11))
    with pytest.raises(RequestValueError, match=r"21 tokens beside 12 encoder states.* 9 blocks"):
        limits.check_request(make_request("a", 10, 12, max_tokens=12))
