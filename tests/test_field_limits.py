"""Each sampling field at the limit of the HTTP API, against an engine: none is refused later on."""

from collections.abc import Iterator
from typing import Any

import pytest

from mmjax import LLM, SamplingParams
from mmjax.frontend.output.outputs import CompletionOutput
from mmjax.server.openai.protocol import CompletionRequest
from tests.kit import tiny_gemma3_checkpoint

VOCAB_SIZE = 1152
"""No fewer than the most ids that a field takes, but for those that may come twice."""
MIN_TOKENS = 4
FIELDS = CompletionRequest.model_json_schema()["properties"]
STRUCTURE = {"structured_outputs": {"regex": "[a-z ]+"}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny_gemma3_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), text={"vocab_size": VOCAB_SIZE}
    )
    with LLM(str(path), max_model_len=64, max_num_seqs=4, use_tqdm_on_load=False) as llm:
        yield llm


def find_kinds(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in schema.get("anyOf", schema.get("oneOf", ())):
        yield from find_kinds(kind)
    yield schema


def find_limit(name: str) -> Any:
    """Return the greatest value that the API takes; None for a field without a limit."""
    for kind in find_kinds(FIELDS[name]):
        if "maximum" in kind:
            return kind["maximum"]
        if "exclusiveMaximum" in kind:
            return kind["exclusiveMaximum"] - 1
        if "maxProperties" in kind:
            return {f"{token_id}": 100.0 for token_id in range(kind["maxProperties"])}
        if "maxItems" in kind:
            is_text = kind["items"]["type"] == "string"
            numbers = range(kind["maxItems"])
            return [f"red {n}" if is_text else n % VOCAB_SIZE for n in numbers]
    return None


LIMITS = {
    name: limit
    for name in SamplingParams.__struct_fields__
    if name in FIELDS and (limit := find_limit(name)) is not None
}


def answer(llm: LLM, **fields: Any) -> list[CompletionOutput]:
    lengths = {"max_tokens": 8, "min_tokens": MIN_TOKENS}
    body = CompletionRequest.model_validate({"prompt": "a", **lengths, **fields})
    params = body.sampling_params(SamplingParams())
    (output,) = llm.generate("a", params, use_tqdm=False)
    return output.outputs


def test_the_limits_are_found() -> None:
    lists = {"stop": 64, "stop_token_ids": 256, "bad_words": 128, "logit_bias": 1024}
    assert {name: len(LIMITS[name]) for name in lists} == lists
    assert len(LIMITS) >= 18


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("others", [{}, STRUCTURE], ids=["alone", "with a structure"])
def test_a_field_at_its_limit_is_served(llm: LLM, name: str, others: dict[str, Any]) -> None:
    fields = {name: LIMITS[name], **others}
    if name == "min_tokens":
        fields["max_tokens"] = LIMITS["max_tokens"]
    answers = answer(llm, **fields)
    assert len(answers) == fields.get("n", 1)
    assert all(len(one.token_ids) >= MIN_TOKENS or others for one in answers)


def test_all_fields_at_their_limits_are_served_together(llm: LLM) -> None:
    fields = {**LIMITS, "n": 2, "min_tokens": MIN_TOKENS}
    for one in answer(llm, **fields):
        assert not set(one.token_ids[:MIN_TOKENS]) & set(LIMITS["stop_token_ids"])


def test_no_stop_token_comes_before_min_tokens(llm: LLM) -> None:
    """Where all of them would: nothing else has a bias."""
    ids = LIMITS["stop_token_ids"]
    biases = {f"{token_id}": 100.0 for token_id in ids}
    (one,) = answer(llm, stop_token_ids=ids, logit_bias=biases, temperature=0)
    assert [token_id in ids for token_id in one.token_ids] == [False] * MIN_TOKENS + [True]
    assert one.finish_reason == "stop"
