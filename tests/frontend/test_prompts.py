"""What a prompt may leave empty."""

import pytest

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.frontend.prompts import parse_prompt


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
