"""Models with recurrent layers: an answer's bits are the same however it was scheduled."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from mmjax.engine.core import EngineCore
from mmjax.errors import ConfigError
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.attention.kv_cache import StateCache
from mmjax.layers.module import bind
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.guesses import NGRAM, make_eager
from tests.engine.recurrent import (
    Answer,
    answer_of,
    check_random,
    recurrent_engine,
    recurrent_params,
    serve,
    serve_found,
    serve_preempted,
)
from tests.engine.tiny import drain, message, text

pytestmark = pytest.mark.as_served

BLOCK_SIZE = 8


def ask(request_id: str, parts: Sequence[Any], **sampling: Any) -> EngineCoreRequest:
    sampling = {"max_tokens": 6, "logprobs": 3, **sampling}
    return message(request_id, parts, **sampling)


PROMPTS: list[list[Any]] = [
    [text(0, 150)],
    [text(1, 64)],
    [text(2, 65)],
    [text(3, 1)],
    [text(4, 50), (1, 1), text(5, 30)],
    [text(0, 130), text(6, 40)],
    [(2, 2), (3, 1), text(7, 100)],
    [text(4, 50), (1, 1), text(8, 90)],
    [text(0, 64), (5, 1), text(9, 63)],
]


@pytest.fixture(scope="module")
def roomy() -> EngineCore:
    """An engine whose steps hold most prompts."""
    return recurrent_engine(max_num_seqs=2, max_num_batched_tokens=192, num_state_snapshots=6)


@pytest.fixture(scope="module")
def cramped() -> EngineCore:
    """An engine with the smallest chunks, and blocks for a little more than the longest prompt.

    What it evicts is in host memory.
    """
    return recurrent_engine(
        num_blocks=44, num_state_snapshots=2, kv_offload_gb=0.01, precompile="all"
    )


@pytest.fixture(scope="module")
def alone(roomy: EngineCore) -> list[Answer]:
    """Each prompt's answer, alone and with cold caches."""
    answers = []
    for number, parts in enumerate(PROMPTS):
        roomy.reset_prefix_cache()
        answers += serve(roomy, [ask(f"alone {number}", parts)])
    return answers


def test_answers_are_those_of_whole_sequences(alone: list[Answer]) -> None:
    for number in (0, 2, 3):
        (token_ids,) = PROMPTS[number]
        ids = token_ids + [token for token, _ in alone[number]]
        logprobs = dense_logprobs(ids)
        for place, (token, told) in enumerate(alone[number], start=len(token_ids) - 1):
            assert token == int(np.argmax(logprobs[place]))
            assert told["logprobs"][0] == pytest.approx(logprobs[place, token], abs=1e-4)


def test_programs_that_run_ahead_change_no_state(cramped: EngineCore, alone: list[Answer]) -> None:
    request = ask("before", PROMPTS[0])
    assert serve(cramped, [request]) == [alone[0]]
    cramped.step()
    while cramped.is_warming:
        cramped.step()
    num_found, answer = serve_found(cramped, ask("after", PROMPTS[0]))
    assert answer == alone[0]
    assert num_found


def dense_logprobs(token_ids: list[int]) -> np.ndarray:
    ids = np.zeros(192, np.int32)
    ids[: len(token_ids)] = token_ids
    return np.asarray(_forward(recurrent_params()[1], ids))


@jax.jit
def _forward(params: Any, ids: Any) -> Any:
    model, length = bind(recurrent_params()[0], params), len(ids)
    index = jnp.arange(length, dtype=jnp.int32)
    metadata = DenseAttentionMetadata(index[None], (index[None] <= index[:, None])[None])
    positions = jnp.broadcast_to(index[None], (3, length))
    states, _ = model(model.embed_input_ids(ids), positions, None, metadata)
    return jax.nn.log_softmax(model.compute_logits(states))


def test_beside_others_and_in_chunks(
    roomy: EngineCore, cramped: EngineCore, alone: list[Answer]
) -> None:
    for engine in (roomy, cramped):
        engine.reset_prefix_cache()
        requests = [ask(f"beside {number}", parts) for number, parts in enumerate(PROMPTS)]
        assert serve(engine, requests) == alone
        assert engine.compilations == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("max_num_batched_tokens", [100, 128, 512, 2048])
def test_in_chunks_of_any_size(alone: list[Answer], max_num_batched_tokens: int) -> None:
    """An engine for each takes half a minute."""
    for is_async in (False, True):
        engine = recurrent_engine(
            max_num_batched_tokens=max_num_batched_tokens, async_scheduling=is_async
        )
        requests = [ask(f"{number}", parts) for number, parts in enumerate(PROMPTS)]
        assert serve(engine, requests) == alone
        engine.close()


def test_a_second_turn_begins_at_the_snapshot(roomy: EngineCore) -> None:
    first = [text(20, 200)]
    second = [text(20, 200), text(21, 30)]
    roomy.reset_prefix_cache()
    (cold,) = serve(roomy, [ask("cold", second)])
    roomy.reset_prefix_cache()
    serve(roomy, [ask("first", first)])
    assert serve_found(roomy, ask("second", second)) == (192, cold)


def test_another_question_about_a_picture_begins_behind_it(roomy: EngineCore) -> None:
    parts = [text(30, 125), (9, 1)]
    roomy.reset_prefix_cache()
    (cold,) = serve(roomy, [ask("cold", [*parts, text(32, 70)])])
    roomy.reset_prefix_cache()
    serve(roomy, [ask("one", [*parts, text(31, 80)])])
    assert serve_found(roomy, ask("two", [*parts, text(32, 70)])) == (128, cold)


@pytest.mark.parametrize("num_shared", [63, 64, 129, 192])
def test_a_hit_at_each_snapshot_there_may_be(roomy: EngineCore, num_shared: int) -> None:
    prompt = text(40, 200)
    roomy.reset_prefix_cache()
    (cold,) = serve(roomy, [ask("cold", [prompt])])
    roomy.reset_prefix_cache()
    serve(roomy, [ask("shared", [prompt[:num_shared]])])
    assert serve_found(roomy, ask("hit", [prompt])) == ((num_shared - 1) // 64 * 64, cold)


def test_an_answer_is_no_prefix(roomy: EngineCore) -> None:
    """A prompt that holds it adds its tokens in another order."""
    roomy.reset_prefix_cache()
    prompt = text(50, 60)
    (found,) = serve(roomy, [ask("first", [prompt], max_tokens=100)])
    longer = prompt + [token for token, _ in found]
    num_found, second = serve_found(roomy, ask("second", [longer]))
    assert num_found == 0
    # It begins at the second one's snapshot, and must not find the first one's blocks.
    (third,) = serve(roomy, [ask("third", [longer])])
    roomy.reset_prefix_cache()
    assert serve(roomy, [ask("cold", [longer])]) == [second] == [third]


@pytest.mark.parametrize("after", [1, 2, 3, 5, 9, 12])
def test_preempted_at_any_step(roomy: EngineCore, after: int) -> None:
    parts = [text(60, 130)]
    roomy.reset_prefix_cache()
    (expected,) = serve(roomy, [ask("whole", parts, max_tokens=10)])
    roomy.reset_prefix_cache()
    request = ask("preempted", parts, max_tokens=10)
    assert serve_preempted(roomy, request, after) == expected


@pytest.mark.parametrize("num_known", [1, 5, 9])
def test_begun_in_an_engine_that_died(roomy: EngineCore, num_known: int) -> None:
    """What was generated is sent along, and computed as it was."""
    parts = [text(70, 100)]
    roomy.reset_prefix_cache()
    (expected,) = serve(roomy, [ask("whole", parts, max_tokens=12)])
    roomy.reset_prefix_cache()
    known = [token for token, _ in expected[:num_known]]
    begun = msgspec.structs.replace(ask("begun", parts, max_tokens=12), output_token_ids=known)
    assert serve(roomy, [begun]) == [expected[num_known:]]


def test_too_few_blocks_preempt(cramped: EngineCore, alone: list[Answer]) -> None:
    before = cramped.num_preemptions
    cramped.reset_prefix_cache()
    batch = [ask(f"{number}", PROMPTS[number], max_tokens=40) for number in (0, 5, 6)]
    found = serve(cramped, batch)
    assert cramped.num_preemptions > before
    assert [answer[:6] for answer in found] == [alone[number] for number in (0, 5, 6)]


def test_evicted_blocks_are_found_up_to_a_snapshot(cramped: EngineCore) -> None:
    """The blocks of a second turn are in host memory, and its state is on the device."""
    cramped.reset_prefix_cache()
    prompt = text(80, 200)
    (cold,) = serve(cramped, [ask("cold", [prompt, text(81, 30)])])
    cramped.reset_prefix_cache()
    serve(cramped, [ask("first", [prompt]), ask("other", [text(82, 290)])])
    before = cramped.stats().kv_offload_hits
    assert serve_found(cramped, ask("second", [prompt, text(81, 30)])) == (192, cold)
    assert cramped.stats().kv_offload_hits > before


def make_random(number: int) -> list[EngineCoreRequest]:
    rng = random.Random(number)
    return [
        ask(f"{one}", rng.choice(PROMPTS)[: rng.randint(1, 3)], max_tokens=rng.randint(1, 12))
        for one in range(number)
    ]


def test_random_requests_stay_within_what_was_planned(cramped: EngineCore) -> None:
    check_random(cramped, make_random(40))


@pytest.mark.slow
def test_1000_random_requests_stay_within_what_was_planned(cramped: EngineCore) -> None:
    """Full counts: the same in minutes."""
    check_random(cramped, make_random(1000))


def test_a_failed_step_and_new_weights_forget_snapshots(
    roomy: EngineCore, alone: list[Answer]
) -> None:
    slots = roomy._scheduler.state_slots
    assert slots is not None
    serve(roomy, [ask("kept", PROMPTS[0])])
    assert slots.num_snapshots
    for number in (0, 1):
        roomy.add_request(ask(f"again {number}", PROMPTS[number]))
    roomy.step()
    assert roomy.recover() == []
    assert slots.num_snapshots == slots.num_running == 0
    news = drain(roomy)
    assert [answer_of(news[f"again {number}"]) for number in (0, 1)] == alone[:2]
    assert slots.num_snapshots
    roomy.sleep()
    assert slots.num_snapshots == 0
    roomy.wake_up()
    assert serve(roomy, [ask("awake", PROMPTS[0])]) == [alone[0]]


@pytest.mark.slow  # 20 s of compiling; `test_parallel.py` has two devices by default
def test_over_two_devices(alone: list[Answer]) -> None:
    """Heads and channels of the states are cut; sums over devices add in another order."""
    engine = recurrent_engine(tensor_parallel_size=2)
    states = engine._runner._state.kv_cache[1]
    assert isinstance(states, StateCache)
    conv, memory = states.arrays
    assert [x.sharding.shard_shape(x.shape) for x in (conv, memory)] == [
        (8, 3, 32),
        (8, 2, 8, 8),
    ]
    numbers = (0, 4, 7)
    for _ in range(2):  # the second time from snapshots
        found = serve(engine, [ask(f"{number}", PROMPTS[number]) for number in numbers])
        for answer, number in zip(found, numbers, strict=True):
            assert [token for token, _ in answer] == [token for token, _ in alone[number]]
            for (_, told), (_, expected) in zip(answer, alone[number], strict=True):
                assert told["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-5)


def test_a_late_mask_computes_no_token_twice(roomy: EngineCore, alone: list[Answer]) -> None:
    """What is taken back of a request is behind its states: it is computed again."""
    roomy.reset_prefix_cache()
    roomy.add_request(ask("late", PROMPTS[0]))
    news = []
    while not news:
        news += roomy.step()
    scheduler, dispatched = roomy._scheduler, roomy._in_flight
    assert dispatched is not None
    scheduler.withdraw(dispatched.output.requests)
    (request,) = scheduler.waiting
    assert (request.num_computed_tokens, request.num_in_flight) == (0, 0)
    roomy._in_flight = None
    news += drain(roomy)["late"]
    assert answer_of(news) == alone[0]


@pytest.fixture(scope="module")
def guessing() -> Iterator[EngineCore]:
    """An engine that guesses, in the smallest chunks and few blocks."""
    engine = recurrent_engine(
        num_blocks=60, num_state_snapshots=2, precompile="none", speculative_config=NGRAM
    )
    yield engine
    engine.close()


@pytest.mark.slow  # 60 s of compiling; an MTP layer beside such states guesses in `test_mtp.py`
def test_states_go_back_behind_wrong_guesses(roomy: EngineCore, guessing: EngineCore) -> None:
    requests = [
        ask(f"{number}", parts, max_tokens=30, temperature=0.7 * (number % 2), seed=number)
        for number, parts in enumerate(PROMPTS)
    ]
    for wrong in (0.0, 0.3):
        eager = make_eager(guessing, random.Random(1), wrong=wrong)
        expected = []
        for request in requests:
            roomy.reset_prefix_cache()
            expected += serve(roomy, [request])
            eager.answers.learn(request, [token for token, _ in expected[-1]])
        guessing.reset_prefix_cache()
        for turn in ("cold", "warm"):
            assert serve(guessing, requests) == expected, f"{wrong=} {turn=}"
        assert eager.num_accepted_tokens > 50
        assert (eager.num_accepted_tokens == eager.num_draft_tokens) == (not wrong)
    assert guessing.num_preemptions > 0
    assert guessing.stats().prefix_cache_hits > 0
    assert guessing._scheduler.state_slots is not None
    assert guessing._scheduler.state_slots.num_running == 0


@pytest.mark.slow  # of the engine above
def test_preempted_behind_guesses(roomy: EngineCore, guessing: EngineCore) -> None:
    request = ask("preempted", [text(60, 130)], max_tokens=20)
    roomy.reset_prefix_cache()
    (expected,) = serve(roomy, [request])
    for after in range(2, 9):
        guessing.reset_prefix_cache()
        eager = make_eager(guessing, random.Random(after))
        eager.answers.learn(request, [token for token, _ in expected])
        assert serve_preempted(guessing, request, after) == expected, f"{after=}"
        assert eager.num_accepted_tokens > 0


def test_a_step_must_hold_a_chunk() -> None:
    with pytest.raises(ConfigError, match=r"`max_num_batched_tokens` is 32, .* chunks of 64"):
        recurrent_engine(max_num_batched_tokens=32)
    with pytest.raises(ConfigError, match="`disable_chunked_mm_input` is set"):
        recurrent_engine(disable_chunked_mm_input=True)
