"""A request's own state: where its pictures lie, and when it ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mmjax.engine.scheduling.request import BlockHasher, EncoderItem, Request, RequestStatus
from mmjax.models.host_inputs import Sees
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import PlaceholderRange


def make_request(
    num_prompt_tokens: int = 4,
    items: tuple = (),
    *,
    eos_token_ids: Sequence[int] = (1,),
    sees: Sees = "past",
    block_hasher: BlockHasher | None = None,
    **sampling: Any,
) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=list(range(num_prompt_tokens)),
        sampling_params=SamplingParams(**sampling),
        max_model_len=12,
        items=items,
        eos_token_ids=eos_token_ids,
        sees=sees,
        block_hasher=block_hasher,
    )


def item(offset: int, mask: list[int]) -> EncoderItem:
    is_embed = np.array(mask, bool)
    return EncoderItem(
        identifier=f"at {offset}", mm_position=PlaceholderRange(offset, len(mask), is_embed)
    )


def test_spans_are_the_runs_of_embeddings() -> None:
    request = make_request(9, items=(item(1, [0, 1, 1, 0, 1, 0]),))
    assert request.spans.ends.tolist() == [0, 0, 4, 4, 0, 6, 0, 0, 0]


def test_a_prompt_that_sees_itself_is_one_run() -> None:
    request = make_request(5, items=(item(1, [1, 1]),), sees="prompt")
    assert request.spans.ends.tolist() == [-5] * 5
    assert [request.spans.last_cut(end) for end in range(8)] == [0, 0, 0, 0, 0, 5, 6, 7]
    assert request.spans.are_between(4, 5), "a lone token sees beyond a window"
    assert not request.spans.are_between(5, 6)


def test_items_that_see_each_other_are_one_run_with_gaps() -> None:
    request = make_request(9, items=(item(1, [0, 1, 1]), item(5, [1, 0])), sees="all_items")
    assert request.spans.ends.tolist() == [0, 0, 6, 6, 0, 6, 0, 0, 0]
    assert [request.spans.last_cut(end) for end in range(10)] == [0, 1, 2, 2, 2, 2, 6, 7, 8, 9]
    assert (request.spans.first_ahead, request.spans.stop) == (2, 6)
    assert make_request(9, sees="all_items").spans.first_ahead is None


@pytest.mark.parametrize(
    ("sees", "first_other"), [("past", 2), ("items", 2), ("all_items", 0), ("prompt", 0)]
)
def test_a_block_is_found_again_only_where_all_that_it_sees_is_the_same(
    sees: Sees, first_other: int
) -> None:
    """Two prompts whose second items differ, in blocks of two tokens."""
    hasher = BlockHasher(block_size=2, none_hash=b"start")
    first, last = item(1, [1, 1]), item(5, [1, 1])
    other = EncoderItem(identifier="another", mm_position=last.mm_position)
    one, two = (
        make_request(9, items=(first, second), sees=sees, block_hasher=hasher).block_hashes
        for second in (last, other)
    )
    found = [a == b for a, b in zip(one, two, strict=True)]
    assert found == [number < first_other for number in range(4)]


def test_items_come_in_the_order_of_their_places() -> None:
    request = make_request(9, items=(item(5, [1, 1]), item(1, [1, 1])))
    assert [entry.start for entry in request.items] == [1, 5]
    assert [entry.start for entry in request.items_between(2, 5)] == [1]
    assert [entry.start for entry in request.items_between(3, 5)] == []
    assert [entry.start for entry in request.items_between(2, 6)] == [1, 5]


@pytest.mark.parametrize(
    ("sampling", "sampled", "status", "stop_reason"),
    [
        ({"max_tokens": 2}, [5, 6], RequestStatus.FINISHED_LENGTH, None),
        ({"max_tokens": 3}, [5, 1], RequestStatus.FINISHED_STOPPED, None),
        ({"max_tokens": 2}, [5, 1], RequestStatus.FINISHED_STOPPED, None),
        ({"max_tokens": 3, "ignore_eos": True}, [5, 1, 1], RequestStatus.FINISHED_LENGTH, None),
        ({"max_tokens": 3, "stop_token_ids": [7]}, [5, 7], RequestStatus.FINISHED_STOPPED, 7),
        ({"max_tokens": 3, "stop_token_ids": [1]}, [1], RequestStatus.FINISHED_STOPPED, None),
        ({"max_tokens": 4, "min_tokens": 3}, [1, 1, 1], RequestStatus.FINISHED_STOPPED, None),
        ({"max_tokens": None}, [5] * 8, RequestStatus.FINISHED_LENGTH, None),
        ({"max_tokens": 100}, [5] * 8, RequestStatus.FINISHED_LENGTH, None),
    ],
)
def test_a_request_ends(
    sampling: dict, sampled: list[int], status: RequestStatus, stop_reason: int | None
) -> None:
    request = make_request(**sampling)
    for token_id in sampled:
        assert not request.is_finished
        request.append_token(token_id)
    assert request.status is status
    assert request.stop_reason == stop_reason
    assert request.output_token_ids == sampled


@pytest.mark.parametrize(("token_id", "stop_reason"), [(1, None), (9, 9)])
def test_another_end_of_the_checkpoint_is_a_reason(token_id: int, stop_reason: int | None) -> None:
    request = make_request(eos_token_ids=[1, 9])
    request.append_token(token_id)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == stop_reason


def test_a_seed_is_kept() -> None:
    assert make_request(seed=5).seed == 5


def test_behind_a_prompt_tokens_see_less_where_windows_keep_it() -> None:
    spans = make_request(items=(item(1, [1, 1]),), sees="reference").spans
    assert spans.reference_end == 4
    assert [spans.are_between(*span) for span in ((0, 4), (3, 5), (6, 7))] == [False, True, True]
    assert spans.last_cut(2) == 2  # no run goes in one step
