"""Prompts in every form, and every limit named."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mmjax.config.engine_config import ModelConfig, MultiModalConfig
from mmjax.errors import (
    ContextLengthError,
    RequestError,
    RequestTypeError,
    RequestValueError,
)
from mmjax.frontend.prompt import processor_pool
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.request import GenerateRequest, ProcessedRequest
from mmjax.models.model_source import load_model_config
from mmjax.params.sampling_params import SamplingParams, TranscriptRules
from mmjax.processing.items import parse
from tests.families.directories import GOLDEN, edit_golden, edit_json
from tests.families.idefics3 import IDEFICS3
from tests.kit import IMAGE_SOFT, IMAGE_START, draw

GREEDY = SamplingParams(temperature=0.0)


def process(
    processor: InputProcessor, prompt: Any, params: SamplingParams = GREEDY
) -> ProcessedRequest:
    return processor.process(GenerateRequest("r", prompt, params))


def test_prompt_forms_agree(input_processor: InputProcessor) -> None:
    ids = input_processor.tokenizer.encode("a red circle")
    forms: list[Any] = [
        "a red circle",
        ids,
        {"prompt": "a red circle"},
        {"prompt_token_ids": ids},
        {"prompt": "a red circle", "multi_modal_data": None, "multi_modal_uuids": None},
    ]
    for form in forms:
        request = process(input_processor, form)
        assert request.prompt_token_ids == ids
        assert [message.request_id for message in request.messages] == ["r"]
        assert request.messages[0].mm_features == []
    assert process(input_processor, ids).prompt is None
    assert process(input_processor, "red").prompt == "red"


def test_images_become_features_in_prompt_order(input_processor: InputProcessor) -> None:
    prompt: Any = {
        "prompt": f"{IMAGE_START} and {IMAGE_START}",
        "multi_modal_data": {"image": [draw(20, 30, 1), draw(30, 20, 2)]},
    }
    request = process(input_processor, prompt)
    features = request.messages[0].mm_features
    assert [feature.modality for feature in features] == ["image", "image"]
    assert features[0].mm_position.offset < features[1].mm_position.offset
    assert features[0].identifier != features[1].identifier
    assert all(feature.data is not None for feature in features)
    assert request.num_embeds["image"] == 8
    again = process(input_processor, prompt)
    assert [f.identifier for f in again.messages[0].mm_features] == [
        feature.identifier for feature in features
    ]


def test_special_tokens_are_added_unless_the_text_has_them(
    input_processor: InputProcessor,
) -> None:
    bos = input_processor.tokenizer.bos_token_id
    added = process(input_processor, "red").prompt_token_ids
    plain = process(input_processor, {"prompt": "red", "add_special_tokens": False})
    assert added == [bos, *plain.prompt_token_ids]


def test_n_fans_out_with_seeds(input_processor: InputProcessor) -> None:
    request = process(input_processor, "red", SamplingParams(n=3, seed=5, max_tokens=None))
    assert [message.request_id for message in request.messages] == ["r-0", "r-1", "r-2"]
    assert [message.sampling_params.seed for message in request.messages] == [5, 6, 7]
    assert {message.sampling_params.n for message in request.messages} == {1}
    last = process(input_processor, "red", SamplingParams(n=2, seed=2**63 - 1))
    assert [message.sampling_params.seed for message in last.messages] == [2**63 - 1, -(2**63)]


def test_seeds_are_drawn_where_none_is_given(model_config: ModelConfig) -> None:
    def seeds() -> list[int | None]:
        processor = InputProcessor(model_config)
        requests = [process(processor, "red", SamplingParams()) for i in range(3)]
        return [request.messages[0].sampling_params.seed for request in requests]

    drawn = seeds()
    assert None not in drawn
    assert len(set(drawn)) == 3
    assert seeds() == drawn, "an operator's seed makes the requests repeatable"


def test_tokens_are_completed(input_processor: InputProcessor) -> None:
    message = process(input_processor, "red", SamplingParams(max_tokens=None)).messages[0]
    assert message.sampling_params.max_tokens == 128 - len(message.prompt_token_ids)
    tokenizer = input_processor.tokenizer
    assert message.eos_token_ids == [1, tokenizer.convert_tokens_to_ids("<end_of_turn>")]
    assert message.cache_salt is None


def test_the_tokenizers_own_end_is_one_beside_those_of_the_files(tmp_path: Path) -> None:
    """As of Fuyu's files, whose generation_config.json names a token that no answer has."""
    config = {"eos_token_id": 7, "text_config.eos_token_id": 7}
    files: Any = {"config": config, "generation_config": {"eos_token_id": [7, 8]}}
    processor = InputProcessor(load_model_config(str(edit_golden("fuyu", tmp_path, **files))))
    own = processor.tokenizer.convert_tokens_to_ids("|ENDOFTEXT|")
    ids = process(processor, "red").messages[0].eos_token_ids
    assert ids[0] == own
    assert {7, 8} < {*ids}


def test_suppressed_tokens_of_the_files_come_in_no_answer(tmp_path: Path) -> None:
    """As the ends of media in Gemma 4's 12B, which its tied head finds probable."""
    files: Any = {"generation_config": {"suppress_tokens": [7, 8], "bad_words_ids": [[9, 8]]}}
    processor = InputProcessor(load_model_config(str(edit_golden("gemma3", tmp_path, **files))))
    params = SamplingParams(bad_words=["red"])
    banned = process(processor, "red", params).messages[0].bad_words_token_ids
    assert banned[-3:] == [[7], [8], [9, 8]]
    assert len(banned) > 3
    # A transcript's rules say it themselves.
    transcript = SamplingParams(transcript=TranscriptRules())
    assert process(processor, "red", transcript).messages[0].bad_words_token_ids == []


def test_the_end_of_a_turn_ends_idefics3s_answers(tmp_path: Path) -> None:
    """Its 8B's files name Llama 3's ends alone."""
    path = Path(shutil.copytree(IDEFICS3.path(), tmp_path / "model"))
    edit_json(path / "generation_config.json", {"eos_token_id": 5})
    processor = InputProcessor(load_model_config(str(path)))
    end = processor.tokenizer.convert_tokens_to_ids("<end_of_utterance>")
    assert {5, end} < {*process(processor, "red").messages[0].eos_token_ids}


def test_default_sampling_params_come_from_the_checkpoint(input_processor: InputProcessor) -> None:
    assert input_processor.default_sampling_params() == SamplingParams()
    assert (
        process(input_processor, "red", SamplingParams()).messages[0].sampling_params.max_tokens
        == 16
    )


@pytest.mark.parametrize(
    ("prompt", "param", "match"),
    [
        ({"prompt": "", "add_special_tokens": False}, "prompt", "empty"),
        ([], "prompt", "empty"),
        ("red " * 200, "prompt", "128"),
        ([5] * 128, "prompt", "128 tokens"),
        ("x" * 128 * 129, "prompt", "characters"),
        ({}, "prompt", "either"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", "either"),
        ({"prompt": 3}, "prompt", "str"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids", "integers"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids", "integers"),
        ({"prompt_token_ids": [1, 10**6]}, None, "1000000"),
        ({"prompt_token_ids": [-1]}, None, "-1"),
        ({"prompt": "a", "images": []}, "images", "no field"),
        ({"prompt": "a", "multi_modal_data": [1]}, "multi_modal_data", "dict"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "128"),
        ({"prompt": "a", "cache_salt": "x" * 129}, "cache_salt", "128"),
        (f"a {IMAGE_START}", None, "0 images"),
        (f"a {IMAGE_SOFT}", None, "image_soft_token"),
        ({"prompt": "a", "multi_modal_data": {"image": draw(8, 8)}}, None, "1 image"),
        ({"prompt": "a", "multi_modal_data": {"smell": 1}}, None, "smell"),
        ({"prompt": IMAGE_START, "multi_modal_data": {"image": b"no image"}}, None, "image"),
    ],
)
def test_what_is_refused_names_the_field(
    input_processor: InputProcessor, prompt: Any, param: str | None, match: str
) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        process(input_processor, prompt)
    assert caught.value.status == (422 if match == "image" else 400)
    assert caught.value.param is not None
    if param is not None:
        assert caught.value.param == param


def test_media_are_blamed_for_a_prompts_length_where_there_are_any(
    input_processor: InputProcessor,
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        process(input_processor, [5] * 128)
    assert str(caught.value) == (
        "the prompt has 128 tokens, but max_model_len is 128, the answer included; shorten it"
    )
    prompt = {"prompt": f"{IMAGE_START} " + "red " * 200, "multi_modal_data": {"image": draw(8, 8)}}
    with pytest.raises(ContextLengthError, match=r"\(its images included\).*fewer images$"):
        process(input_processor, prompt)


def test_the_longest_prompt_leaves_one_token(input_processor: InputProcessor) -> None:
    message = process(input_processor, [5] * 127).messages[0]
    assert message.sampling_params.max_tokens == 1


def test_stop_ids_lie_in_the_vocabulary(input_processor: InputProcessor) -> None:
    with pytest.raises(RequestValueError, match="stop_token_ids"):
        process(input_processor, "red", SamplingParams(stop_token_ids=[10**6]))


def test_too_many_images(tiny_gemma3: Path) -> None:
    mm = MultiModalConfig(limit_mm_per_prompt={"image": 1}, mm_processor_cache_gb=0.0)
    processor = InputProcessor(load_model_config(str(tiny_gemma3), max_model_len=128, mm=mm))
    assert processor.info.allowed_mm_limits["image"] == 1
    prompt: Any = {
        "prompt": IMAGE_START * 2,
        "multi_modal_data": {"image": [draw(8, 8), draw(8, 8)]},
    }
    with pytest.raises(RequestError, match="1"):
        process(processor, prompt)


@pytest.mark.parametrize("family", ["llava", "florence2"])
def test_uuids_are_read_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    to_list = parse._to_list
    monkeypatch.setattr(
        parse, "_to_list", lambda modality, given: read.append(modality) or to_list(modality, given)
    )
    processor = InputProcessor(load_model_config(str(GOLDEN / family)))
    text = {"llava": "<image>", "florence2": "<CAPTION>"}[family]
    prompt: Any = {
        "prompt": text,
        "multi_modal_data": {"image": draw(8, 8)},
        "multi_modal_uuids": {"image": ["a"]},
    }
    request = process(processor, prompt)
    assert request.messages[0].mm_features[0].identifier == "a"
    assert read == ["image"]


def test_mere_text_is_no_control_token_and_what_follows_it_may_be(
    input_processor: InputProcessor,
) -> None:
    (start,) = input_processor.tokenizer.encode(IMAGE_START, add_special_tokens=False)
    pieces = [(IMAGE_START, False), (IMAGE_START, True), (IMAGE_START, False)]
    first, *text, last = input_processor.tokenize_pieces(pieces, add_special_tokens=False)
    assert (first, last) == (start, start)
    assert text
    assert start not in text
    assert input_processor.detokenize(text) == IMAGE_START


def test_other_types_are_no_prompt(input_processor: InputProcessor) -> None:
    prompt: Any = {"prompt": "red", "mm_processor_kwargs": 3}
    with pytest.raises(RequestTypeError, match="mm_processor_kwargs"):
        process(input_processor, prompt)


def test_warm_up_processes_an_image(input_processor: InputProcessor) -> None:
    input_processor.warm_up()


def test_after_the_warm_up_no_thread_waits_until_a_processor_is_made(
    input_processor: InputProcessor,
) -> None:
    input_processor.warm_up(3)
    pool = input_processor._pool
    with (
        patch.object(processor_pool, "create_processor", side_effect=AssertionError("made one")),
        pool.borrow() as first,
        pool.borrow() as second,
        pool.borrow() as third,
    ):
        assert first is pool.first  # which requests one after the other share
        processors = [first, second, third]
        assert len({id(one.info.get_tokenizer()) for one in processors}) == 3


def test_a_larger_picture_than_the_operator_described_is_refused() -> None:
    limits = {"image": {"width": 56, "height": 56}}
    config = load_model_config(
        str(GOLDEN / "qwen2_vl"), max_model_len=256, mm=MultiModalConfig(limit_mm_per_prompt=limits)
    )
    processor = InputProcessor(config)

    def prompt(side: int) -> Any:
        picture = draw(side, side)
        text = "<|vision_start|><|image_pad|><|vision_end|>"
        return {"prompt": text, "multi_modal_data": {"image": picture}}

    assert process(processor, prompt(56)).num_embeds["image"] == 4
    for refuse in (
        lambda: process(processor, prompt(150)),
        lambda: processor.explain(prompt(150)),
    ):
        with pytest.raises(RequestValueError, match="`--limit-mm-per-prompt` sets") as caught:
            refuse()
        assert caught.value.param == "multi_modal_data"
