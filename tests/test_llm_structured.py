"""Structured outputs and prompts' log-probabilities through `LLM`, over the embedded checkpoint."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from mmjax import LLM, SamplingParams, StructuredOutputsParams
from mmjax.errors import RequestValueError
from mmjax.params.sampling_params import MAX_BAD_WORDS

NUM_SCHEMAS = 15
NUM_SCHEMAS_SLOW = 200


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 64}  # few programs
    with LLM(max_model_len=512, use_tqdm_on_load=False, **sizes) as llm:
        yield llm


def answer(llm: LLM, structure: dict[str, Any], **sampling: Any) -> Any:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(**structure),
        **{"temperature": 1.0, "seed": 3, "max_tokens": 400, **sampling},
    )
    (output,) = llm.generate("red", params, use_tqdm=False)
    return output.outputs[0]


def draw_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose values are all short: an answer of any model ends."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern", "number"]
    kind = chance.choice(kinds if depth > 2 else [*kinds, "object", "array", "anyOf", "object"])
    match kind:
        case "string":
            return {"type": "string", "minLength": chance.randint(0, 3), "maxLength": 5}
        case "integer":
            low = chance.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 99)}
        case "number":
            return {"enum": [chance.randint(0, 9) / 4 for _ in range(3)]}
        case "enum":
            return {"enum": chance.sample(["red", "green", 3, None, True, "ü\n", 2.5, [1]], 3)}
        case "const":
            return {"const": chance.choice([{"a": [1, {"b": "c"}]}, "x", 7])}
        case "pattern":
            return {"type": "string", "pattern": chance.choice(["^[a-c]{2,4}$", "^(ab|c)d?$"])}
        case "object":
            names = chance.sample(["colour", "shape", "n", 'quo"ted', "é"], chance.randint(0, 3))
            properties = {name: draw_schema(chance, depth + 1) for name in names}
            required = [name for name in names if chance.random() < 0.7]
            closed = {"additionalProperties": False}
            return {"type": "object", "properties": properties, "required": required, **closed}
        case "array":
            low = chance.randint(0, 2)
            items = draw_schema(chance, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + 1}
        case "anyOf":
            return {"anyOf": [draw_schema(chance, depth + 1) for _ in range(2)]}
    return {"type": kind}


@pytest.mark.parametrize(
    "number",
    [NUM_SCHEMAS, pytest.param(NUM_SCHEMAS_SLOW, marks=pytest.mark.slow)],
    ids=str,
)
def test_every_answer_is_valid_by_its_schema(llm: LLM, number: int) -> None:
    chance = random.Random(number)
    schemas = [draw_schema(chance) for _ in range(number)]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=450,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )
        for seed, schema in enumerate(schemas)
    ]
    outputs = llm.generate(["red"] * number, params, use_tqdm=False)
    for schema, output in zip(schemas, outputs, strict=True):
        (one,) = output.outputs
        assert one.finish_reason == "stop", schema
        jsonschema.validate(json.loads(one.text), schema)
    assert llm.engine.compilations == 0


def test_each_kind_holds_for_the_whole_answer(llm: LLM) -> None:
    assert re.fullmatch(r"[0-9]{2}:[0-9]{2}", answer(llm, {"regex": "[0-9]{2}:[0-9]{2}"}).text)
    texts = ['a "red" one', "gr\\een", "x\ny"]
    assert answer(llm, {"choice": texts}).text in texts
    nested = answer(llm, {"grammar": 'root ::= "<" root ">" | "red" | "blue"'}).text
    assert re.fullmatch("<*(red|blue)>*", nested)
    assert nested.count("<") == nested.count(">")
    greedy = answer(llm, {"json_object": True}, temperature=0.0, max_tokens=60)
    assert greedy.text.startswith("{")


def test_bad_words_are_those_with_and_without_a_space(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (free,) = llm.generate("a red circle", params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    texts = [tokenizer.decode([token_id]).strip() for token_id in free.outputs[0].token_ids]
    ids_of = {
        text: [tokenizer.encode(space + text, add_special_tokens=False) for space in ("", " ")]
        for text in texts
        if text
    }
    words = [text for text, (plain, _) in ids_of.items() if len(plain) == 1]
    assert words
    banned = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, bad_words=words)
    (held,) = llm.generate("a red circle", banned, use_tqdm=False)
    ids = {ids[0] for word in words for ids in ids_of[word] if len(ids) == 1}
    assert ids & set(free.outputs[0].token_ids)
    assert not ids & set(held.outputs[0].token_ids)


def test_as_many_bad_words_as_there_may_be_have_two_sequences_each(llm: LLM) -> None:
    words = [f"red {number}" for number in range(MAX_BAD_WORDS)]
    tokenizer = llm.get_tokenizer()
    for word in words:
        plain, spaced = (tokenizer.encode(s + word, add_special_tokens=False) for s in ("", " "))
        assert (len(plain), plain[1:]) == (len(spaced), spaced[1:])
        assert plain != spaced
    params = SamplingParams(temperature=0.0, max_tokens=3, bad_words=words)
    assert llm.generate("a red circle", params, use_tqdm=False)[0].outputs[0].token_ids


def test_prompt_logprobs_are_logprobs_of_the_same_text(llm: LLM) -> None:
    """The oracle: `logprobs` of the tokens, given as prompts and answers."""
    token_ids = llm.get_tokenizer()("red circle and a blue square")["input_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, n=1)
    (output,) = llm.generate([token_ids], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for place in range(1, len(token_ids)):
        forced = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2, allowed_token_ids=[token_ids[place]]
        )
        (step,) = llm.generate([token_ids[:place]], forced, use_tqdm=False)
        assert step.outputs[0].logprobs is not None
        wanted, got = step.outputs[0].logprobs[0], output.prompt_logprobs[place]
        assert got is not None
        assert got.keys() == wanted.keys()
        for token_id, entry in got.items():
            assert entry.logprob == pytest.approx(wanted[token_id].logprob, abs=1e-4)
            assert entry.rank == wanted[token_id].rank


def test_without_detokenization_there_are_token_ids_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, detokenize=False, ignore_eos=True)
    (output,) = llm.generate("red", params, use_tqdm=False)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 5


def test_a_bad_grammar_is_refused_and_the_next_request_served(llm: LLM) -> None:
    with pytest.raises(RequestValueError, match="regex"):
        answer(llm, {"regex": "((("})
    with pytest.raises(ValueError, match="allowed_token_ids"):
        llm.generate("red", SamplingParams(allowed_token_ids=[10**6]), use_tqdm=False)
    assert answer(llm, {"choice": ["a"]}).text == "a"
