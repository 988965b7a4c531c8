"""Each numeric bound of the API is declared once; the schema, and both doors' errors, follow it."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mmjax import SamplingParams
from mmjax.errors import RequestValueError
from mmjax.params.sampling_params import LIMITS
from mmjax.server.openai.protocol import ChatCompletionRequest, CompletionRequest

PACKAGE = Path(__file__).parents[2] / "mmjax"
DECLARE = [
    PACKAGE / "params" / "sampling_params.py",
    PACKAGE / "params" / "media_io.py",
    *sorted((PACKAGE / "server").rglob("*.py")),
]
BOUNDS = {"ge", "gt", "le", "lt", "max_length", "min_length"}
SCHEMA_NAMES = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "max_length": "max",
}


def bounds_in(source: str) -> Iterator[str]:
    """Yield what a module declares with numbers: its constants, and the fields of its bodies."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=[ast.Name(name)]) if name.lstrip("_").startswith("MAX_"):
                yield name
            case ast.AnnAssign(target=ast.Name(name)) if _has_numbers(node):
                yield name


def _has_numbers(field: ast.AnnAssign) -> bool:
    calls = [node for node in ast.walk(field) if isinstance(node, ast.Call)]
    names = [one.func.id for one in calls if isinstance(one.func, ast.Name)]
    bounds = [one for call in calls for one in call.keywords if one.arg in BOUNDS]
    return "Field" in names and any(not isinstance(one.value, ast.Name) for one in bounds)


def repeated(sources: list[str]) -> set[str]:
    """Return the bounds that several modules or bodies declare, or that `LIMITS` has already."""
    found = Counter(name for source in sources for name in bounds_in(source))
    return {name for name, count in found.items() if count > 1 or name in LIMITS}


def test_each_bound_is_declared_once() -> None:
    assert repeated([file.read_text() for file in DECLARE]) == set()


@pytest.mark.parametrize(
    "again",
    [
        "MAX_BAD_WORDS = 128",
        "class Body:\n    top_p: Annotated[float, Field(gt=0, le=1)] | None = None",
        "class Body:\n    timeout: Annotated[float, Field(gt=0, le=2**16)] = 1.0",
    ],
)
def test_a_repeated_bound_is_found(again: str) -> None:
    assert len(repeated([*(file.read_text() for file in DECLARE), again])) == 1


def numbers_of(schema: dict[str, Any]) -> dict[str, float]:
    kinds = [schema, *schema.get("anyOf", ())]
    return {
        name: value
        for kind in kinds
        for bound, name in SCHEMA_NAMES.items()
        for key, value in kind.items()
        if key == name or (bound == "max_length" and key in ("maxItems", "maxProperties"))
    }


@pytest.mark.parametrize("body", [ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize("name", LIMITS)
def test_the_schema_has_the_bounds_of_sampling(body: Any, name: str) -> None:
    expected = {SCHEMA_NAMES[bound]: value for bound, value in LIMITS[name].items()}
    if (body, name) == (CompletionRequest, "max_tokens"):
        expected["minimum"] = 0  # with `echo`
    # A chat's `logprobs` is a truth value.
    is_flag = (body, name) == (ChatCompletionRequest, "logprobs")
    field = body.model_json_schema()["properties"]["top_logprobs" if is_flag else name]
    assert numbers_of(field) == expected


NUMBERS = [
    (name, bound, number)
    for name, one in LIMITS.items()
    for bound, number in one.items()
    if bound != "max_length"
]


@pytest.mark.parametrize(("name", "bound", "number"), NUMBERS)
def test_both_doors_refuse_the_same(name: str, bound: str, number: float) -> None:
    beyond = {"ge": -1, "gt": 0, "le": 1, "lt": 0}[bound]
    field = "top_logprobs" if name == "logprobs" else name
    for is_wrong in (False, True):
        within = {"gt": 0.5, "lt": -1}.get(bound, 0)
        value = number + (beyond if is_wrong else within)
        others = {"max_tokens": 2**31 - 1} if name == "min_tokens" else {}
        body = {"messages": [], "logprobs": True, **others, field: value}
        if not is_wrong:
            SamplingParams(**{**others, name: value})
            ChatCompletionRequest.model_validate(body)
            continue
        with pytest.raises(RequestValueError):
            SamplingParams(**{**others, name: value})
        with pytest.raises(ValidationError):
            ChatCompletionRequest.model_validate(body)
