"""A prompt's fields, one by one: what each may be, and may leave out."""

from typing import Any

import pytest

from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.frontend.requests.prompts import ParsedPrompt, parse_prompt


def test_a_modality_without_data_stands_for_its_uuids():
    prompt = parse_prompt(
        {
            "prompt": "look",
            "multi_modal_data": {"image": None},
            "multi_modal_uuids": {"image": ["a", "b"]},
        }
    )
    assert prompt.mm_data == {"image": [None, None]}
    assert prompt.mm_uuids == {"image": ["a", "b"]}


def test_a_modality_with_neither_is_refused():
    with pytest.raises(RequestValueError, match=r"multi_modal_data\['image'\] is empty but"):
        parse_prompt({"prompt": "look", "multi_modal_data": {"image": None}})
    with pytest.raises(RequestTypeError, match="has the type `int`"):
        parse_prompt(
            {
                "prompt": "look",
                "multi_modal_data": {"image": None},
                "multi_modal_uuids": {"image": 7},
            }
        )


def test_the_forms_of_a_prompt() -> None:
    assert parse_prompt("red") == ParsedPrompt(text="red")
    assert parse_prompt([1, 2]) == ParsedPrompt(token_ids=[1, 2])
    assert parse_prompt({"prompt": "red", "add_special_tokens": False}) == ParsedPrompt(
        text="red", add_special_tokens=False
    )
    left_out: Any = {"prompt": "red", "add_special_tokens": None}
    assert parse_prompt(left_out) == ParsedPrompt(text="red")
    full: Any = {
        "prompt_token_ids": [3],
        "multi_modal_data": {"image": "x"},
        "multi_modal_uuids": {"image": ["a"]},
        "mm_processor_kwargs": {"size": 3},
        "cache_salt": "s",
        "decoder_prompt": [4, 5],
    }
    assert parse_prompt(full) == ParsedPrompt(
        token_ids=[3],
        mm_data={"image": "x"},
        mm_uuids={"image": ["a"]},
        mm_processor_kwargs={"size": 3},
        cache_salt="s",
        decoder_prompt=[4, 5],
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"decoder_prompt": 3}, "decoder_prompt"),
        ({"decoder_prompt": ["a"]}, "decoder_prompt"),
        ({"cache_salt": "a\0b"}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"cache_salt": "a\nb"}, "cache_salt"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"cache_salt": "x" * 10**6}, "cache_salt"),
        ({3: "x"}, "3"),
        ({"multi_modal_uuids": "a"}, "multi_modal_uuids"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ({"add_special_tokens": 0}, "add_special_tokens"),
    ],
)
def test_what_is_refused_names_the_field(fields: Any, param: str) -> None:
    prompt: Any = {"prompt": "red", **fields}
    with pytest.raises(RequestError) as caught:
        parse_prompt(prompt)
    assert caught.value.param == param


@pytest.mark.parametrize("salt", ["a", "x" * 128, "a b", "\U0001f600"])
def test_salts_may_be_any_printable_text(salt: str) -> None:
    assert parse_prompt({"prompt": "red", "cache_salt": salt}).cache_salt == salt
