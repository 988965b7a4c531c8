"""What a caller asks of the sampler is checked where it is made, field by field."""

from typing import Any

import msgspec
import numpy as np
import pytest

from mmjax import sampling_params
from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.sampling_params import SamplingParams

WRONG = [
    ("n", 1.5),
    ("n", True),
    ("n", None),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", None),
    ("temperature", np.array([1.0])),
    ("top_p", 1j),
    ("top_k", np.float32(2)),
    ("min_p", [0.1]),
    ("seed", "5"),
    ("seed", np.bool_(True)),
    ("max_tokens", 16.0),
    ("min_tokens", None),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ["a", None]),
    ("stop", b"bytes"),
    ("stop_token_ids", 5),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [None]),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "yes"),
    ("ignore_eos", None),
    ("logprobs", True),
    ("no_repeat_ngram_size", 2.0),
    ("logprobs", 2.0),
    ("skip_special_tokens", "no"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_type_is_refused_where_it_is_made(name: str, value: Any) -> None:
    with pytest.raises(RequestTypeError, match=f"`{name}` .*give ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_every_field_has_its_type() -> None:
    assert set(sampling_params._TYPES) == set(SamplingParams.__struct_fields__)
    assert {name for name, _ in WRONG} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "value", "made"),
    [
        ("n", np.int64(2), 2),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("top_p", np.float64(0.5), 0.5),
        ("top_k", np.int32(4), 4),
        ("seed", np.uint8(7), 7),
        ("seed", None, None),
        ("max_tokens", np.int16(3), 3),
        ("max_tokens", None, None),
        ("logprobs", np.int64(3), 3),
        ("ignore_eos", np.True_, True),
        ("stop", None, ()),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", np.array([1, 2]), (1, 2)),
        ("stop_token_ids", [np.int64(5), 6], (5, 6)),
    ],
)
def test_what_vllm_takes_becomes_python_s(name: str, value: Any, made: Any) -> None:
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == made
    assert type(getattr(params, name)) is type(made)
    # It crosses to P1 as it is.
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 10**400), ("temperature", float("nan")), ("stop", ["a", ""]), ("n", 0)],
)
def test_a_wrong_value_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(RequestValueError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
