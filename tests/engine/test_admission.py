"""Requests that no step can compute are refused on arrival, naming the field and a fix."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mmjax.engine.scheduling.admission import AdmissionLimits
from mmjax.engine.scheduling.request import EncoderItem, Request
from mmjax.errors import RequestValueError
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import PlaceholderRange

LIMITS: dict[str, Any] = {
    "max_model_len": 32,
    "num_token_ids": 100,
    "vocab_size": 100,
    "num_blocks": 5,
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "encoder_budget": 8,
    "keeps_runs_whole": True,
}


def item(offset: int, length: int, num_embeds: int | None = None) -> EncoderItem:
    mask = None if num_embeds is None else np.arange(length) < num_embeds
    return EncoderItem(identifier="x", mm_position=PlaceholderRange(offset, length, mask))


@pytest.mark.parametrize(
    ("token_ids", "items", "param", "words"),
    [
        ([], [], "prompt", "empty"),
        ([3] * 32, [], "prompt", "32 tokens"),
        ([3, 100], [], "prompt_token_ids", "100 is not in the vocabulary"),
        ([3, -1], [], "prompt_token_ids", "-1 is not in the vocabulary"),
        ([2**40], [], "prompt_token_ids", "not in the vocabulary"),
        ([3] * 4, [item(2, 3)], "multi_modal_data", "4 tokens"),
        ([3] * 20, [item(0, 9)], "multi_modal_data", "9 embeddings"),
    ],
)
def test_an_impossible_prompt_is_refused(
    token_ids: list[int], items: list[EncoderItem], param: str, words: str
) -> None:
    with pytest.raises(RequestValueError, match=words) as caught:
        AdmissionLimits(**LIMITS).check_prompt(token_ids, items)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_placeholder_ids_may_lie_outside_the_vocabulary() -> None:
    AdmissionLimits(**LIMITS).check_prompt([3, 262144, 262144, 3], [item(1, 2)])


def test_only_a_run_of_embeddings_must_fit_a_step() -> None:
    limits = AdmissionLimits(**LIMITS | {"encoder_budget": 99})
    limits.check_prompt([3] * 20, [item(0, 19, 16)])
    with pytest.raises(RequestValueError, match=r"a run of 17 embeddings.*a step holds 16"):
        limits.check_prompt([3] * 20, [item(0, 19, 17)])
    mask = np.array([*[True] * 14, False, *[True] * 14])
    halves = EncoderItem(identifier="x", mm_position=PlaceholderRange(0, 29, mask))
    limits.check_prompt([3] * 30, [halves])


def test_a_run_may_be_cut_where_the_model_allows_it() -> None:
    limits = AdmissionLimits(**LIMITS | {"encoder_budget": 99, "keeps_runs_whole": False})
    limits.check_prompt([3] * 20, [item(0, 19, 17)])


def make_request(num_tokens: int, *, eos: Sequence[int] = (1,), **sampling: Any) -> Request:
    return Request(
        request_id="a",
        prompt_token_ids=[3] * num_tokens,
        sampling_params=SamplingParams(**sampling),
        max_model_len=32,
        eos_token_ids=list(eos),
    )


def test_a_request_must_fit_the_kv_cache_alone() -> None:
    limits = AdmissionLimits(**LIMITS)
    limits.check_request(make_request(10, max_tokens=11))
    with pytest.raises(RequestValueError, match="21 tokens, which need 6 blocks") as caught:
        limits.check_request(make_request(10, max_tokens=12))
    assert caught.value.param == "max_tokens"


def test_min_tokens_holds_back_at_most_as_many_ids_as_the_table_is_wide() -> None:
    limits = AdmissionLimits(**LIMITS)
    many = list(range(1000, 1256))
    limits.check_request(
        make_request(4, max_tokens=4, min_tokens=1, stop_token_ids=many, eos=range(32))
    )
    limits.check_request(make_request(4, max_tokens=4, stop_token_ids=many, eos=range(33)))
    with pytest.raises(RequestValueError, match="289 ids"):
        limits.check_request(
            make_request(4, max_tokens=4, min_tokens=1, stop_token_ids=many, eos=range(33))
        )


def test_without_chunks_a_prompts_items_are_computed_in_one_step() -> None:
    limits = AdmissionLimits(**LIMITS | {"enable_chunked_prefill": False})
    other = EncoderItem(identifier="y", mm_position=PlaceholderRange(12, 4, None))
    limits.check_prompt([3] * 20, [item(0, 6), item(6, 6)])  # one picture twice
    with pytest.raises(RequestValueError, match="10 embeddings") as caught:
        limits.check_prompt([3] * 20, [item(0, 6), other])
    assert caught.value.param == "multi_modal_data"


def test_a_prompt_that_sees_itself_is_computed_in_one_step() -> None:
    limits = AdmissionLimits(**LIMITS | {"sees": "prompt", "max_model_len": 32})
    other = EncoderItem(identifier="y", mm_position=PlaceholderRange(12, 3, None))
    limits.check_prompt([3] * 16, [item(0, 6)])
    with pytest.raises(RequestValueError, match=r"17 tokens, which see .* holds 16") as caught:
        limits.check_prompt([3] * 17, [])
    assert caught.value.param == "prompt"
    with pytest.raises(RequestValueError, match=r"9 embeddings, .* since they see each other"):
        limits.check_prompt([3] * 16, [item(0, 6), other])


def test_items_that_see_each_other_are_computed_in_one_step() -> None:
    limits = AdmissionLimits(**LIMITS | {"sees": "all_items", "encoder_budget": 9})
    limits.check_prompt([3] * 30, [item(2, 6), item(12, 6)])  # one picture twice
    with pytest.raises(RequestValueError, match=r"has 17 tokens .* holds 16") as caught:
        limits.check_prompt([3] * 30, [item(2, 6), item(13, 6)])
    assert caught.value.param == "multi_modal_data"
    other = EncoderItem(identifier="y", mm_position=PlaceholderRange(12, 4, None))
    with pytest.raises(RequestValueError, match="10 embeddings"):
        limits.check_prompt([3] * 30, [item(2, 6), other])


def test_an_encoders_prompt_and_its_items_fit_one_step() -> None:
    limits = AdmissionLimits(**LIMITS | {"max_encoder_len": 64, "encoder_budget": 50})
    image = item(0, 10)
    limits.check_encoder_prompt([3] * 40, [image])
    limits.check_encoder_prompt([3] * 40, [image, image])  # encoded once
    with pytest.raises(RequestValueError, match=r"41 tokens and its items give 51.*computes 50"):
        limits.check_encoder_prompt([3] * 41, [image])
