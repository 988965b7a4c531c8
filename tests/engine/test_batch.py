"""Known windows to known arrays, padding included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.engine.device.batch import (
    NO_TOKEN,
    BatchBuilder,
    StepSizes,
    sample_layout,
    step_layout,
    unpack_step,
)
from mmjax.engine.scheduling.buckets import StepBucket
from mmjax.engine.scheduling.outputs import ScheduledRequest
from mmjax.engine.scheduling.request import EncoderItem, Request, join_rows
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import PlaceholderRange

NUM_BLOCKS, BLOCK_SIZE, MAX_BLOCKS = 50, 4, 6
ROWS = {"x": np.array([30, 31, 40, 41], np.int32), "y": np.array([7], np.int32)}


@pytest.fixture
def builder() -> BatchBuilder:
    return BatchBuilder(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        sizes=StepSizes(MAX_BLOCKS),
        sample_layout=sample_layout(4),
        rows_of=ROWS.__getitem__,
        has_spans=True,
    )


def make_request(num_tokens: int, items: tuple = (), **sampling: Any) -> Request:
    sampling = {"temperature": 0.0, **sampling}
    return Request(
        request_id=f"{num_tokens} tokens",
        prompt_token_ids=list(range(100, 100 + num_tokens)),
        sampling_params=SamplingParams(**sampling),
        max_model_len=MAX_BLOCKS * BLOCK_SIZE,
        items=items,
        eos_token_ids=[1],
    )


def window(request: Request, start: int, end: int, blocks: list[int]) -> ScheduledRequest:
    table = np.zeros(MAX_BLOCKS, np.int32)
    table[: len(blocks)] = blocks
    return ScheduledRequest(request, start, end - start, table, end == request.num_tokens)


def item(identifier: str, offset: int, mask: list[int] | None, length: int) -> EncoderItem:
    is_embed = None if mask is None else np.array(mask, bool)
    return EncoderItem(
        identifier=identifier, mm_position=PlaceholderRange(offset, length, is_embed)
    )


def fields_of(flat: np.ndarray, bucket: StepBucket) -> dict[str, np.ndarray]:
    return step_layout(bucket, StepSizes(MAX_BLOCKS)).views(flat)


def test_a_decode_step(builder: BatchBuilder) -> None:
    bucket = StepBucket(4, 4, 1)
    requests = [
        window(make_request(6), 5, 6, [10, 11]),
        window(make_request(9), 8, 9, [20, 21, 22]),
    ]
    flat, last_rows = builder.build_step(requests, bucket)
    fields = fields_of(flat, bucket)
    assert flat.dtype == np.int32
    assert last_rows.tolist() == [0, 1]
    assert fields["token_ids"].tolist() == [105, 108, 0, 0]
    assert fields["token_from"].tolist() == [-1] * 4
    assert fields["positions"].tolist() == [[5, 8, 0, 0]] * 3
    assert fields["token_index"].tolist() == [5, 8, 0, 0]
    assert fields["span_end"].tolist() == [6, 9, 0, 0]
    assert fields["src_index"].tolist() == [-1] * 4
    assert fields["slot_block"].tolist() == [11, 22, NUM_BLOCKS, NUM_BLOCKS]
    assert fields["slot_offset"].tolist() == [1, 0, 0, 0]
    assert fields["tile_rows"].tolist() == [[0], [1], [4], [4]]
    assert fields["tile_request"].tolist() == [0, 1, 0, 0]
    assert fields["row_slot"].tolist() == [0, 1, 0, 0]
    assert fields["block_tables"][:2].tolist() == [[10, 11, 0, 0, 0, 0], [20, 21, 22, 0, 0, 0]]
    assert not fields["block_tables"][2:].any()


def test_a_chunk_with_pictures_beside_a_decode_row(builder: BatchBuilder) -> None:
    bucket = StepBucket(64, 4, 64)
    # places 2 to 7: a mark, two embeddings, a mark, two embeddings; place 9: one embedding
    items = (item("x", 2, [0, 1, 1, 0, 1, 1], 6), item("y", 9, None, 1))
    requests = [
        window(make_request(13, items), 2, 11, [10, 11, 12]),
        window(make_request(6), 5, 6, [20, 21]),
    ]
    flat, last_rows = builder.build_step(requests, bucket)
    fields = fields_of(flat, bucket)
    assert last_rows.tolist() == [8, 9]
    assert fields["token_ids"][:11].tolist() == [*range(102, 111), 105, 0]
    assert fields["token_index"][:11].tolist() == [*range(2, 11), 5, 0]
    assert fields["src_index"][:11].tolist() == [-1, 30, 31, -1, 40, 41, -1, 7, -1, -1, -1]
    assert fields["span_end"][:11].tolist() == [3, 5, 5, 6, 8, 8, 9, 10, 11, 6, 0]
    assert fields["slot_block"][:11].tolist() == [10, 10, *[11] * 4, 12, 12, 12, 21, NUM_BLOCKS]
    assert fields["slot_offset"][:11].tolist() == [2, 3, 0, 1, 2, 3, 0, 1, 2, 1, 0]
    assert fields["tile_rows"].shape == (4, 64)
    assert fields["tile_rows"][0].tolist() == [*range(9), *[64] * 55]
    assert fields["tile_rows"][1].tolist() == [9, *[64] * 63]
    assert (fields["tile_rows"][2:] == 64).all()
    assert fields["tile_request"].tolist() == [0, 1, 0, 0]
    assert fields["row_slot"][:11].tolist() == [*range(9), 64, 0]


def test_a_token_in_flight_is_a_row_of_the_sample_before(builder: BatchBuilder) -> None:
    bucket = StepBucket(64, 4, 64)
    talker, held_back = make_request(6), make_request(9, min_tokens=2, stop_token_ids=[9])
    for row, request in enumerate((talker, held_back)):
        request.num_in_flight, request.sampled_row = 1, row
    requests = [
        window(make_request(3), 0, 3, [1]),
        ScheduledRequest(held_back, 9, 1, np.full(MAX_BLOCKS, 2, np.int32), True, 1),
        ScheduledRequest(talker, 6, 1, np.full(MAX_BLOCKS, 3, np.int32), True, 0),
    ]
    flat, is_plain = builder.build(requests, bucket)
    fields = fields_of(flat, bucket)
    assert fields["token_from"][:6].tolist() == [-1, -1, -1, 1, 0, -1]
    assert fields["token_index"][:5].tolist() == [0, 1, 2, 9, 6]
    assert not is_plain, "the next is its second token, which may not end the text"
    sample = sample_layout(4).views(flat[step_layout(bucket, StepSizes(MAX_BLOCKS)).size :])
    assert sample["rows"].tolist() == [2, 3, 4, 0]
    assert sample["masked_token_ids"][:, 0].tolist() == [NO_TOKEN, 1, NO_TOKEN, NO_TOKEN]


def test_a_bucket_without_spans_has_no_field_for_them(builder: BatchBuilder) -> None:
    bucket = StepBucket(64, 4, 64, has_spans=False)
    text = window(make_request(13), 0, 9, [1, 2, 3])
    fields = fields_of(builder.build_step([text], bucket)[0], bucket)
    assert "span_end" not in fields
    assert fields["token_index"][:10].tolist() == [*range(9), 0]


def test_only_a_part_of_an_image_needs_spans(builder: BatchBuilder) -> None:
    request = make_request(13, (item("y", 4, [0, 1, 0], 3),))
    before, inside, behind = (
        window(request, start, end, [1, 2, 3]) for start, end in ((0, 4), (3, 8), (7, 13))
    )
    assert not builder.needs_spans([before, behind])
    assert builder.needs_spans([before, inside])
    builder.has_spans = False
    assert not builder.needs_spans([before, inside])


def test_a_later_chunk_reads_the_rest_of_an_item(builder: BatchBuilder) -> None:
    bucket = StepBucket(64, 4, 64)
    items = (item("x", 2, [0, 1, 1, 0, 1, 1], 6),)
    flat, _ = builder.build_step([window(make_request(13, items), 4, 7, [10, 11])], bucket)
    fields = fields_of(flat, bucket)
    assert fields["src_index"][:4].tolist() == [31, -1, 40, -1]
    assert fields["span_end"][:4].tolist() == [5, 6, 8, 0]


def test_a_window_over_an_item_s_marks_alone_asks_for_no_rows(builder: BatchBuilder) -> None:
    items = (item("never encoded", 2, [0, 1, 1, 0], 4),)
    for start, end in [(0, 3), (5, 9)]:
        flat, _ = builder.build_step(
            [window(make_request(13, items), start, end, [1, 2, 3])], StepBucket(64, 4, 64)
        )
        assert (fields_of(flat, StepBucket(64, 4, 64))["src_index"] == -1).all()


def test_without_spans_every_token_is_causal(builder: BatchBuilder) -> None:
    builder.has_spans = False
    bucket = StepBucket(64, 4, 64)
    flat, _ = builder.build_step(
        [window(make_request(13, (item("x", 2, None, 4),)), 0, 8, [1, 2])], bucket
    )
    assert fields_of(flat, bucket)["span_end"][:8].tolist() == list(range(1, 9))


def test_a_long_chunk_is_cut_into_tiles(builder: BatchBuilder) -> None:
    bucket = StepBucket(256, 4, 64)
    request = make_request(1)
    request.token_ids = np.arange(200, dtype=np.int32)
    table = np.arange(50, dtype=np.int32)
    builder.sizes = StepSizes(50)
    requests = [
        ScheduledRequest(request, 0, 70, table, False),
        ScheduledRequest(request, 3, 3, table, False),
    ]
    flat, _ = builder.build_step(requests, bucket)
    fields = step_layout(bucket, builder.sizes).views(flat)
    assert fields["tile_rows"][0].tolist() == list(range(64))
    assert fields["tile_rows"][1].tolist() == [*range(64, 70), *[256] * 58]
    assert fields["tile_rows"][2].tolist() == [70, 71, 72, *[256] * 61]
    assert fields["tile_request"].tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert fields["row_slot"][:74].tolist() == [*range(70), 128, 129, 130, 0]


def test_greedy_rows_need_no_more_than_their_rows(builder: BatchBuilder) -> None:
    flat = np.zeros(sample_layout(4).size, np.int32)
    assert builder.fill_sample(flat, [window(make_request(6), 5, 6, [1, 2])], np.array([3]))
    assert sample_layout(4).views(flat)["rows"].tolist() == [3, 0, 0, 0]


def test_sampling_rows_carry_their_parameters(builder: BatchBuilder) -> None:
    drawn = make_request(6, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.25, seed=-1)
    held_back = make_request(7, min_tokens=1, stop_token_ids=[9])
    reported = make_request(8, logprobs=0)
    requests = [window(r, r.num_tokens - 1, r.num_tokens, [1, 2]) for r in (drawn, held_back)]
    flat = np.zeros(sample_layout(4).size, np.int32)
    assert not builder.fill_sample(flat, requests, np.array([3, 4]))
    fields = sample_layout(4).views(flat)
    assert fields["positions"].tolist() == [6, 7, 0, 0]
    assert fields["temperature"].view(np.float32).tolist() == [0.5, 0, 0, 0]
    assert fields["top_p"].view(np.float32)[0] == np.float32(0.9)
    assert fields["min_p"].view(np.float32)[0] == 0.25
    assert fields["top_k"].tolist() == [0] * 4
    assert fields["seeds"].view(np.uint32)[0].tolist() == [2**32 - 1] * 2
    assert fields["masked_token_ids"][1, :3].tolist() == [1, 9, NO_TOKEN]
    assert (fields["masked_token_ids"][[0, 2, 3]] == NO_TOKEN).all()
    assert (fields["has_filters"], fields["has_logprobs"]) == (1, 0)

    held_back.append_token(5)
    flat = np.zeros(sample_layout(4).size, np.int32)
    requests = [window(held_back, 7, 8, [1, 2]), window(reported, 7, 8, [1, 2])]
    assert not builder.fill_sample(flat, requests, np.array([0, 1]))
    fields = sample_layout(4).views(flat)
    assert (fields["masked_token_ids"] == NO_TOKEN).all()
    assert (fields["has_filters"], fields["has_logprobs"]) == (0, 1)


# ---- an encoder-decoder --------------------------------------------------------------------------


def encoder_builder(*, attends_to_items: bool = False) -> BatchBuilder:
    return BatchBuilder(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        sizes=StepSizes(MAX_BLOCKS, 3, attends_to_items),
        sample_layout=sample_layout(4),
        # An item's identifier says how many rows it has.
        rows_of=lambda identifier: np.arange(30, 30 + int(identifier), dtype=np.int32),
        has_spans=False,
    )


def with_encoder(start: int, num_tokens: int, encoder_len: int, blocks: list[int]) -> Any:
    states = EncoderItem(identifier=str(encoder_len), mm_position=PlaceholderRange(0, encoder_len))
    request = Request(
        request_id=f"{encoder_len} states",
        prompt_token_ids=[3] * (start + num_tokens),
        sampling_params=SamplingParams(temperature=0.0),
        max_model_len=MAX_BLOCKS * BLOCK_SIZE,
        encoder=states,
    )
    table = np.array([*blocks, 0, 0, 0], np.int32)[:3]
    own = np.zeros(MAX_BLOCKS, np.int32)
    return ScheduledRequest(request, start, num_tokens, own, True, encoder_table=table)


def test_states_are_written_where_a_request_begins_and_seen_by_all() -> None:
    builder = encoder_builder()
    bucket = StepBucket(64, 4, 64, has_spans=False, num_states=16)
    requests = [
        with_encoder(0, 2, 6, [21, 22]),
        with_encoder(5, 1, 9, [23, 24, 25]),
        with_encoder(0, 1, 2, [26]),
    ]
    assert builder.count_states(requests) == 8
    flat, _ = builder.build_step(requests, bucket)
    fields = step_layout(bucket, builder.sizes).views(flat)
    assert fields["cross_lengths"].tolist() == [6, 9, 2, 0]
    assert fields["cross_block_tables"].tolist() == [[21, 22, 0], [23, 24, 25], [26, 0, 0], [0] * 3]
    assert fields["cross_src"][:8].tolist() == [30, 31, 32, 33, 34, 35, 30, 31]
    nowhere = [NUM_BLOCKS] * 8
    assert fields["cross_slot_block"].tolist() == [21, 21, 21, 21, 22, 22, 26, 26, *nowhere]
    assert fields["cross_slot_offset"][:8].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]


def test_tokens_are_told_which_states_they_attend_to() -> None:
    items = [
        EncoderItem(
            identifier=f"image {offset}",
            mm_position=PlaceholderRange(offset, 1),
            rows=np.arange(number, dtype=np.int32),
        )
        for offset, number in ((2, 3), (4, 1), (5, 2))
    ]
    states = join_rows("6", items)
    assert states is not None
    assert states.num_embeds == 6
    request = Request(
        request_id="r",
        prompt_token_ids=[3] * 7,
        sampling_params=SamplingParams(temperature=0.0),
        max_model_len=MAX_BLOCKS * BLOCK_SIZE,
        encoder=states,
        attended=items,
    )
    assert [one.mm_position.offset for one in request.media_items] == [0, 3, 4]
    # The second and the third follow each other at once: what is behind sees both.
    expected = [[0, 0, 0, 0, 3, 3, 3, 3, 3], [0, 0, 3, 3, 4, 6, 6, 6, 6]]
    assert request.seen_between(0, 9).tolist() == expected
    assert request.seen_between(6, 8).tolist() == [[3, 3], [6, 6]]
    builder = encoder_builder(attends_to_items=True)
    bucket = StepBucket(64, 4, 64, has_spans=False, num_states=16)
    table, own = np.array([21, 22, 0], np.int32), np.zeros(MAX_BLOCKS, np.int32)
    request.num_found_tokens = 4
    window = ScheduledRequest(request, 4, 3, own, True, encoder_table=table)
    assert builder.count_states([window]) == 6, "the first window, behind what was found"
    flat, _ = builder.build_step([with_encoder(5, 1, 9, [23, 24, 25]), window], bucket)
    layout = step_layout(bucket, builder.sizes)
    seen = layout.views(flat)["cross_seen"]
    assert seen[:, :5].tolist() == [[0, 3, 3, 3, 0], [0, 4, 6, 6, 0]]


def test_decoding_writes_no_states() -> None:
    builder = encoder_builder()
    bucket = StepBucket(1, 1, 1, has_spans=False)
    requests = [with_encoder(5, 1, 9, [23, 24, 25])]
    assert builder.count_states(requests) == 0
    flat, _ = builder.build_step(requests, bucket)
    batch = unpack_step(step_layout(bucket, builder.sizes), jnp.asarray(flat))
    assert batch.metadata.cross is not None
    assert batch.metadata.cross.lengths.tolist() == [9]
    assert batch.metadata.cross.block_tables.tolist() == [[23, 24, 25]]
    assert batch.metadata.cross.slot_block.shape == (0,)
    assert batch.cross_src is not None
    assert batch.cross_src.shape == (0,)


def test_a_decoder_alone_has_none_of_these_fields(builder: BatchBuilder) -> None:
    bucket = StepBucket(4, 4, 1)
    layout = step_layout(bucket, StepSizes(MAX_BLOCKS))
    assert [name for name, _ in layout.shapes if name.startswith("cross")] == []
    batch = unpack_step(layout, jnp.asarray(builder.empty_step(bucket)[0]))
    assert batch.metadata.cross is None
    assert batch.cross_src is None
    assert len(jax.tree.leaves(batch)) == 12
    assert builder.count_states([window(make_request(6), 5, 6, [10, 11])]) == 0
