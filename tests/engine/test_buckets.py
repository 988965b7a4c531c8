"""The ladder is short, covers everything, and pads as little as it can."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.engine.scheduling.buckets import (
    STEP_COST,
    TILE_SIZE,
    Buckets,
    StepBucket,
    ladder,
    next_bucket,
    split_calls,
    unit_sizes,
)


def make_buckets(max_num_seqs: int = 16, max_num_batched_tokens: int = 2048) -> Buckets:
    return Buckets.create(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        encode_sizes={"encode": unit_sizes(max_num_batched_tokens // 36)},
    )


@pytest.mark.parametrize(("num_tokens", "expected"), [(2048, 31), (1024, 30)])
def test_the_embedded_default_has_at_most_31_programs(num_tokens: int, expected: int) -> None:
    assert make_buckets(16, num_tokens).num_programs == expected


def test_a_ladder_ends_at_its_last_size() -> None:
    assert ladder(1, 16, 2) == (1, 2, 4, 8, 16)
    assert ladder(1, 12, 4) == (1, 4, 12)
    assert ladder(1, 1, 4) == (1,)
    assert next_bucket((1, 4, 16), 5) == 16


def test_one_token_each_is_a_decode_step() -> None:
    assert make_buckets().step_bucket(3, 3) == StepBucket(4, 4, 1)
    assert make_buckets().step_bucket(4, 3) == StepBucket(16, 4, 16)


def test_a_short_prompt_alone_is_padded_little() -> None:
    buckets = make_buckets()
    sizes = [buckets.step_bucket(size, 1).num_tokens for size in range(2, 513)]
    assert all(size <= max(16, 2 * i) for i, size in enumerate(sizes, 2))
    assert all(size <= 1.5 * i for i, size in enumerate(sizes, 2) if i > 64)
    # Beside many others the doublings are enough, and there are fewer programs to compile.
    assert buckets.step_bucket(20, 10) == StepBucket(64, 16, TILE_SIZE)


def test_no_bucket_is_larger_than_a_step_can_be() -> None:
    assert make_buckets(3, 7).mixed == (StepBucket(16, 3, 16),)
    sizes = [(one.num_tokens, one.num_requests) for one in make_buckets(8, 20).mixed]
    assert sizes == [(16, 4), (32, 4), (64, 8)]


def test_a_long_prompt_is_cut_where_two_steps_have_less_padding_than_one() -> None:
    buckets = make_buckets()
    # 576 embeddings of a picture of LLaVA's, and a question; a picture of 1,024 and one.
    assert [buckets.cut(size, 1) for size in (610, 1100, 1500)] == [512, 1024, 1024]
    # A bucket of 384; the next step would be as large; little is padding; one fills its bucket.
    assert [buckets.cut(size, 1) for size in (300, 1600, 900, 1024)] == [300, 1600, 900, 1024]
    assert buckets.cut(617, 8) == 512


@given(st.integers(1, 2048), st.integers(1, 16))
def test_what_is_cut_costs_less(num_tokens: int, num_requests: int) -> None:
    buckets, num_tokens = make_buckets(), max(num_tokens, num_requests)
    first = buckets.cut(num_tokens, num_requests)
    steps = [one for one in (first, num_tokens - first) if one]
    sizes = [buckets.step_bucket(one, min(one, num_requests)).num_tokens for one in steps]
    whole = buckets.step_bucket(num_tokens, num_requests).num_tokens
    assert sum(sizes) + STEP_COST * (len(steps) - 1) <= whole


@given(st.data())
def test_every_step_within_the_limits_has_a_bucket_that_holds_it(data: st.DataObject) -> None:
    max_num_seqs = data.draw(st.integers(1, 40))
    max_num_batched_tokens = data.draw(st.integers(max_num_seqs, 3000))
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    num_requests = data.draw(st.integers(1, max_num_seqs))
    counts = [1] * num_requests
    counts[0] += data.draw(st.integers(0, max_num_batched_tokens - num_requests))
    bucket = buckets.step_bucket(sum(counts), num_requests)
    assert bucket in buckets.steps
    assert bucket.num_tokens >= sum(counts)
    assert bucket.num_requests >= num_requests
    assert bucket.num_tiles >= sum(-(-count // bucket.tile_size) for count in counts)
    assert bucket.num_tokens <= buckets.max_num_tokens


@given(st.integers(1, 100), st.integers(1, 8))
def test_units_are_split_over_calls_without_loss(num_units: int, max_units: int) -> None:
    sizes = unit_sizes(max_units)
    calls = list(split_calls(sizes, num_units))
    units = [unit for _, chosen in calls for unit in range(num_units)[chosen]]
    assert units == list(range(num_units))
    assert all(0 < one.stop - one.start <= size and size in sizes for size, one in calls)


def test_eleven_units_take_two_calls() -> None:
    calls = split_calls(make_buckets().encode, 11)
    assert list(calls) == [(8, slice(0, 8)), (4, slice(8, 11))]


def make_variants(*span_variants: bool) -> Buckets:
    return Buckets.create(max_num_seqs=4, max_num_batched_tokens=128, span_variants=span_variants)


def test_spans_are_in_the_programs_that_may_need_them() -> None:
    assert all(bucket.has_spans for bucket in make_variants(True).steps)
    assert not any(bucket.has_spans for bucket in make_variants(False).steps)
    assert make_variants(True).num_programs == make_variants(False).num_programs


def test_where_causal_steps_have_a_kernel_only_images_go_without() -> None:
    buckets = make_variants(False, True)
    assert buckets.step_bucket(3, 3) == StepBucket(4, 4, 1, has_spans=False)
    assert buckets.step_bucket(100, 3) == StepBucket(128, 4, TILE_SIZE, has_spans=False)
    assert buckets.step_bucket(100, 3, has_spans=True) == StepBucket(128, 4, TILE_SIZE)
    assert len(buckets.mixed) == 2 * len(make_variants(True).mixed)
    assert len(set(buckets.steps)) == len(buckets.steps)


def test_one_kind_of_program_serves_steps_with_and_without_images() -> None:
    buckets = make_variants(True)
    assert buckets.step_bucket(70, 3) == buckets.step_bucket(70, 3, has_spans=True)


def test_where_requests_of_an_encoder_decoder_begin_there_is_room_for_their_states() -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
    plain, buckets = Buckets.create(**sizes), Buckets.create(**sizes, max_encoder_len=10)
    assert (plain.prompts, buckets.prompts) == ((), (1, 2, 4))
    assert buckets.num_programs == plain.num_programs + 3
    assert (plain.num_states, buckets.num_states) == (0, 40)
    assert {bucket.num_states for bucket in plain.steps} == {0}
    assert buckets.step_bucket(3, 3).num_states == 0
    # A prompt of one token is no decoding step: it writes its encoder's states.
    assert buckets.step_bucket(3, 3, num_states=1) == StepBucket(16, 4, 16, num_states=40)
    assert buckets.step_bucket(8, 8, num_states=40) == StepBucket(64, 8, TILE_SIZE, num_states=40)
    assert Buckets.create(**sizes | {"max_num_seqs": 2}, max_encoder_len=10).num_states == 20


# ---- buckets to begin with -----------------------------------------------------------------------


def stages(buckets: Buckets, **options: int) -> list[Buckets]:
    """Return what is ready when the first programs are compiled, and after each further one."""
    order, num_first = buckets.compile_order(**options)
    return [buckets.among(order[:number]) for number in range(num_first, len(order) + 1)]


def test_the_first_programs_are_few_and_the_next_serve_everybody() -> None:
    first, *_, last = stages(make_buckets())
    assert first.mixed == (StepBucket(64, 4, 64),)
    assert first.decode == (StepBucket(1, 1, 1),)
    assert (first.sample, first.encode) == ((1,), (1,))
    second = stages(make_buckets())[5]
    assert (first.max_num_seqs, first.max_num_batched_tokens) == (1, 64)
    assert (second.max_num_seqs, second.max_num_batched_tokens) == (16, 64)
    assert last == make_buckets()


def test_an_image_that_cannot_be_divided_fits_into_the_first_programs() -> None:
    first = stages(make_buckets(), least_tokens=256)[0]
    assert first.max_num_batched_tokens == 256
    # One that fits into no step is the admission's to refuse.
    assert stages(make_buckets(), least_tokens=10**6)[0].max_num_batched_tokens == 2048


@given(st.data())
def test_what_is_ready_serves_what_it_says(data: st.DataObject) -> None:
    max_num_seqs = data.draw(st.integers(1, 40))
    max_encoder_len = data.draw(st.sampled_from([0, 30]))
    buckets = Buckets.create(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=data.draw(st.integers(max_num_seqs, 3000)),
        encode_sizes={"encode": unit_sizes(data.draw(st.integers(0, 9)))},
        max_written=data.draw(st.sampled_from([0, 600])),
        span_variants=data.draw(st.sampled_from([(True,), (False,), (False, True)])),
        max_encoder_len=max_encoder_len,
    )
    before = None
    has_spans = any(bucket.has_spans for bucket in buckets.mixed)
    for stage in stages(buckets, least_tokens=data.draw(st.integers(1, 3000))):
        num_seqs, num_tokens = stage.max_num_seqs, stage.max_num_batched_tokens
        assert num_tokens >= num_seqs
        for num_requests in {1, (num_seqs + 1) // 2, num_seqs}:
            assert stage.step_bucket(num_requests, num_requests) in buckets.steps
            assert next_bucket(stage.sample, num_requests) in buckets.sample
            chosen = stage.step_bucket(
                num_tokens,
                num_requests,
                has_spans=has_spans and num_tokens > num_requests,
                num_states=buckets.num_states,
            )
            assert chosen in buckets.steps
        assert set(stage.keys) <= set(buckets.keys)
        assert {key.function for key in stage.keys} == {key.function for key in buckets.keys}
        if before is not None:
            assert set(before.keys) <= set(stage.keys)
            assert before.max_num_seqs <= num_seqs
            assert before.max_num_batched_tokens <= num_tokens
        before = stage
    assert before == buckets
