"""What a caller asks of the sampler is checked where it is made, field by field."""

from typing import Any

import msgspec
import numpy as np
import pytest

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.params import sampling_params
from mmjax.params.sampling_params import SamplingParams, StructuredOutputsParams
from mmjax.params.structured_outputs import read_grammar

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
    ("no_repeat_ngram_window_size", 2.0),
    ("logprobs", 2.0),
    ("skip_special_tokens", "no"),
    ("presence_penalty", "1"),
    ("frequency_penalty", None),
    ("repetition_penalty", True),
    ("prompt_logprobs", 1.5),
    ("detokenize", None),
    ("logit_bias", [1]),
    ("logit_bias", {"word": 1.0}),
    ("logit_bias", {5: "1"}),
    ("logit_bias", {True: 1.0}),
    ("allowed_token_ids", 5),
    ("allowed_token_ids", ["5"]),
    ("bad_words", 5),
    ("bad_words", [5]),
    ("structured_outputs", {"regex": "a"}),
    ("transcript", {"eos_token_id": 1}),
    ("alignment", (0, 5)),
    ("pooling", {"task": "embed"}),
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
    [
        ("temperature", 10**400),
        ("temperature", float("nan")),
        ("stop", ["a", ""]),
        ("n", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e30),
        ("prompt_logprobs", 21),
        ("logit_bias", {5: 101}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", []),
        ("bad_words", ["a", ""]),
        ("bad_words", [str(number) for number in range(129)]),
        ("bad_words", ["a" * 1025]),
    ],
)
def test_a_wrong_value_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(RequestValueError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


STRUCTURES = {
    "nothing": ({}, "structured_outputs"),
    "two": ({"json": "{}", "regex": "a"}, "structured_outputs"),
    "no object": ({"json_object": False}, "structured_outputs"),
    "a number": ({"json": 3}, "structured_outputs.json"),
    "not JSON": ({"json": {"a": {1, 2}}}, "structured_outputs.json"),
    "NaN": ({"json": {"const": float("nan")}}, "structured_outputs.json"),
    "no choice": ({"choice": []}, "structured_outputs.choice"),
    "an empty choice": ({"choice": ["a", ""]}, "structured_outputs.choice"),
    "choices": ({"choice": [str(n) for n in range(4097)]}, "structured_outputs.choice"),
    "long": ({"regex": "a" * (2**16 + 1)}, "structured_outputs.regex"),
    "long choices": ({"choice": ["a" * 2**16, "b"]}, "structured_outputs.choice"),
    "unread": ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any"),
    "no bool": ({"json": "{}", "disable_any_whitespace": None}, "structured_outputs.disable_any"),
}


@pytest.mark.parametrize(("given", "param"), STRUCTURES.values(), ids=STRUCTURES)
def test_a_wrong_structure_names_its_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises((RequestTypeError, RequestValueError)) as caught:
        StructuredOutputsParams(**given)
    assert (caught.value.param or "").startswith(param)


@pytest.mark.parametrize(
    ("given", "kind", "made"),
    [
        ({"json": {"b": "ü", "a": 1}}, "json", '{"b": "ü", "a": 1}'),
        ({"json": "{}"}, "json", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["b", "a", "b"]}, "choice", ("b", "a")),
        ({"grammar": "start: A"}, "grammar", "start: A"),
        ({"json_object": True}, "json_object", True),
    ],
)
def test_a_structure_crosses_to_p1_as_it_is(given: dict[str, Any], kind: str, made: Any) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    assert params.structured_outputs is not None
    assert params.structured_outputs.kind == kind
    assert getattr(params.structured_outputs, kind) == made
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"json": {"type": "nope"}}, "failed to compile JSON schema: Invalid type: nope"),
        ({"regex": "(a"}, 'invalid regex "(a" (in regex): regex parse error: (a ^ error: unclosed'),
        ({"grammar": 'start: "a" b'}, 'at 1(8): unknown name: "b" 1 | start: "a" b'),
    ],
)
def test_a_wrong_structure_is_told_by_what_the_client_wrote(
    given: dict[str, Any], error: str
) -> None:
    told = msgspec.json.decode(read_grammar(msgspec.json.encode(StructuredOutputsParams(**given))))
    assert told["error"].startswith(error)
    assert ("no_forcing" in told["error"]) == ("grammar" in given)
