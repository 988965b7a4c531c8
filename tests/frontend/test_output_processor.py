"""Deltas become outputs: text, ends, logprobs, n, streamed or whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from mmjax.frontend.output.output_processor import OutputProcessor, ProcessedOutputs
from mmjax.frontend.output.outputs import CompletionOutput, RequestOutput
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.params.sampling_params import SamplingParams, StructuredOutputsParams
from mmjax.transport.messages import RequestOutputDelta
from tests.echo_engine import EchoEngine


def run(
    input_processor: InputProcessor, prompt: Any, *, stream: bool = False, **params: Any
) -> tuple[list[RequestOutput], EchoEngine]:
    """Return all outputs of one request against the echo."""
    params = {"max_tokens": 64, **params}
    request = input_processor.process(
        GenerateRequest("r", prompt, SamplingParams(**params), stream=stream)
    )
    processor, engine = OutputProcessor(input_processor.tokenizer), EchoEngine()
    processor.add_request(request)
    for message in request.messages:
        engine.add_request(message)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        processed = process(processor, *engine.step())
        engine.abort(processed.request_ids_to_abort)
        outputs += processed.request_outputs
    assert processor.remove("r") == []
    return outputs, engine


def process(processor: OutputProcessor, *deltas: RequestOutputDelta) -> ProcessedOutputs:
    """Return what the deltas of a step tell."""
    processed = ProcessedOutputs.empty()
    for delta in deltas:
        processor.process(delta, processed)
    return processed


def whole(input_processor: InputProcessor, prompt: Any, **params: Any) -> CompletionOutput:
    outputs, _ = run(input_processor, prompt, **params)
    assert len(outputs) == 1
    assert outputs[0].finished
    return outputs[0].outputs[0]


def test_the_end_token_is_an_id_and_no_text(input_processor: InputProcessor) -> None:
    output = whole(input_processor, "a red circle")
    assert output.text == "a red circle"
    assert output.finish_reason == "stop"
    assert output.stop_reason is None
    assert output.token_ids[-1] == input_processor.tokenizer.eos_token_id
    assert output.finished()


def test_max_tokens_end_with_length(input_processor: InputProcessor) -> None:
    output = whole(input_processor, "a red circle", max_tokens=2)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 2


def test_max_tokens_are_cut_to_the_room(input_processor: InputProcessor) -> None:
    output = whole(input_processor, "red", max_tokens=10_000, ignore_eos=True)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 128 - 2


@pytest.mark.parametrize(("include", "text"), [(False, "a red "), (True, "a red circle")])
def test_stop_strings_end_and_are_aborted(
    input_processor: InputProcessor, include: bool, text: str
) -> None:
    outputs, engine = run(
        input_processor,
        "a red circle left of a star",
        stop=["nothing", "circle"],
        include_stop_str_in_output=include,
    )
    output = outputs[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", "circle")
    assert engine.aborted == ["r"]


def test_stop_strings_wait_for_min_tokens(input_processor: InputProcessor) -> None:
    output = whole(input_processor, "red red red red", stop=["red"], min_tokens=3)
    # The prompt begins with `<bos>`, which counts and has no text.
    assert output.text == "red red "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "text"), [(False, "a "), (True, "a red circle")])
def test_a_stop_string_may_begin_before_min_tokens_and_end_behind(
    input_processor: InputProcessor, stream: bool, include: bool, text: str
) -> None:
    # `<bos>`, "a ", "red ": the stop string begins in the last token that may not stop.
    outputs, _ = run(
        input_processor,
        "a red circle left of a star",
        stream=stream,
        stop=["red circle"],
        min_tokens=3,
        include_stop_str_in_output=include,
    )
    pieces = [output.outputs[0] for output in outputs]
    assert "".join(piece.text for piece in pieces) == text
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "red circle")


def test_a_stop_string_that_ends_within_min_tokens_is_text(
    input_processor: InputProcessor,
) -> None:
    output = whole(input_processor, "a red circle", stop=["red", "a red circle."], min_tokens=4)
    assert (output.text, output.stop_reason) == ("a red circle", None)


@pytest.mark.parametrize(("include", "text"), [(False, "a "), (True, "a red ")])
def test_stop_token_ids(input_processor: InputProcessor, include: bool, text: str) -> None:
    red = input_processor.tokenizer.encode("red ", add_special_tokens=False)
    output = whole(
        input_processor, "a red circle", stop_token_ids=red, include_stop_str_in_output=include
    )
    assert (output.text, output.stop_reason) == (text, red[0])


def test_streamed_pieces_join_to_the_whole(input_processor: InputProcessor) -> None:
    text = "a red circle, 日本 🎈 and a star"
    outputs, _ = run(input_processor, text, stream=True, stop=["never"])
    pieces = [output.outputs[0] for output in outputs]
    assert "".join(piece.text for piece in pieces) == text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert pieces[-1].finish_reason == "stop"
    expected = whole(input_processor, text)
    assert [i for piece in pieces for i in piece.token_ids] == expected.token_ids


def test_n_answers_come_together_or_one_by_one(input_processor: InputProcessor) -> None:
    outputs, _ = run(input_processor, "red", n=3)
    assert [output.index for output in outputs[0].outputs] == [0, 1, 2]
    assert {output.text for output in outputs[0].outputs} == {"red"}
    streamed, _ = run(input_processor, "red", n=3, stream=True)
    assert {output.outputs[0].index for output in streamed} == {0, 1, 2}
    assert [output.finished for output in streamed].count(True) == 1
    assert streamed[-1].finished


def test_what_n_answers_find_of_each_other_was_not_cached(input_processor: InputProcessor) -> None:
    params = SamplingParams(n=2)
    processor = OutputProcessor(input_processor.tokenizer)
    processor.add_request(input_processor.process(GenerateRequest("r", "red", params)))
    deltas = (
        RequestOutputDelta(
            request_id=f"r-{n}", new_token_ids=[5], num_cached_tokens=2 * n, finish_reason="length"
        )
        for n in range(2)
    )
    (output,) = process(processor, *deltas).request_outputs
    assert output.num_cached_tokens == 0


def test_logprobs(input_processor: InputProcessor) -> None:
    output = whole(input_processor, "red", logprobs=2)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        sampled, *others = position.items()
        assert sampled[0] == token_id
        assert sampled[1].rank == 9
        assert [entry.rank for _, entry in others] == [1, 2][: len(others)]
    assert output.cumulative_logprob == pytest.approx(-2.0 * len(output.token_ids))
    assert whole(input_processor, "red").cumulative_logprob is None


@pytest.mark.parametrize("found", [["ids"], []])
def test_an_answer_is_parsed_up_to_a_character_that_is_cut_off(
    input_processor: InputProcessor, found: list[str]
) -> None:
    """One in which nothing is found is text alone."""
    ids = input_processor.tokenizer.encode("a 🎈", add_special_tokens=False)
    request = input_processor.process(
        GenerateRequest("r", {"prompt_token_ids": ids}, SamplingParams(max_tokens=4))
    )
    prepared = replace(
        request.prepared, parse_answer=lambda token_ids: {key: list(token_ids) for key in found}
    )
    processor = OutputProcessor(input_processor.tokenizer)
    processor.add_request(replace(request, prepared=prepared))
    delta = RequestOutputDelta(request_id="r", new_token_ids=ids[:-1], finish_reason="length")
    (output,) = process(processor, delta).request_outputs
    assert output.outputs[0].text == "a "
    assert output.outputs[0].parsed == ({"ids": ids[:-4]} if found else None)


@pytest.mark.parametrize("is_structured", [True, False])
def test_a_structured_answer_keeps_a_space_at_its_beginning(
    input_processor: InputProcessor, is_structured: bool
) -> None:
    """Which decoding drops there, and a chat's answer has no use for."""
    tokenizer: Any = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "golden/llava")
    end, word = tokenizer.convert_tokens_to_ids(["</s>", "▁a"])
    structure = StructuredOutputsParams(regex=" a") if is_structured else None
    prompt: Any = {"prompt_token_ids": [word, end]}
    request = input_processor.process(
        GenerateRequest("r", prompt, SamplingParams(), continues_prompt=False)
    )
    params = SamplingParams(structured_outputs=structure)
    messages = [msgspec.structs.replace(one, sampling_params=params) for one in request.messages]
    processor = OutputProcessor(tokenizer)
    processor.add_request(replace(request, messages=messages))
    delta = RequestOutputDelta(request_id="r", new_token_ids=[word], finish_reason="length")
    (output,) = process(processor, delta).request_outputs
    assert output.outputs[0].text == (" a" if is_structured else "a")


@pytest.mark.parametrize("structure", [None, StructuredOutputsParams(regex=".*")])
def test_characters_of_several_tokens_are_whole_behind_others(
    input_processor: InputProcessor, structure: StructuredOutputsParams | None
) -> None:
    """Of bytes in a row that begin within a character, decoding shows none."""
    ids = input_processor.tokenizer.encode("é🎈", add_special_tokens=False)
    prompt: Any = {"prompt_token_ids": ids}
    request = input_processor.process(GenerateRequest("r", prompt, SamplingParams()))
    params = SamplingParams(structured_outputs=structure)
    messages = [msgspec.structs.replace(one, sampling_params=params) for one in request.messages]
    processor = OutputProcessor(input_processor.tokenizer)
    processor.add_request(replace(request, messages=messages))
    delta = RequestOutputDelta(request_id="r", new_token_ids=ids, finish_reason="length")
    (output,) = process(processor, delta).request_outputs
    assert output.outputs[0].text == "é🎈"


def test_request_fields(input_processor: InputProcessor) -> None:
    outputs, _ = run(input_processor, "red")
    assert outputs[0].prompt == "red"
    assert outputs[0].prompt_token_ids == input_processor.tokenizer.encode("red")
    assert outputs[0].num_cached_tokens == 3
    assert outputs[0].num_image_tokens == 0


def test_a_piece_without_tokens_is_of_the_weights_of_the_last_one(
    input_processor: InputProcessor,
) -> None:
    """As the end of what an update of the weights has aborted."""
    request = input_processor.process(GenerateRequest("r", "red", SamplingParams(), stream=True))
    processor = OutputProcessor(input_processor.tokenizer)
    processor.add_request(request)
    told = {"request_id": "r", "weights_version": 3}
    deltas = (
        RequestOutputDelta(new_token_ids=[5], **told),
        RequestOutputDelta(new_token_ids=[], finish_reason="abort", **told),
    )
    processed = process(processor, *deltas)
    pieces = [output.outputs[0] for output in processed.request_outputs]
    assert [len(piece.token_ids) for piece in pieces] == [1, 0]
    assert [piece.weights_version for piece in pieces] == [3, 3]
    assert [tokens.num_tokens for tokens in processed.new_tokens] == [1], "whose time is measured"


def test_an_unknown_id_is_skipped(input_processor: InputProcessor) -> None:
    processor = OutputProcessor(input_processor.tokenizer)
    delta = RequestOutputDelta(request_id="gone", new_token_ids=[5])
    assert process(processor, delta) == ([], [], [], [])


def test_aborted_requests_are_forgotten(input_processor: InputProcessor) -> None:
    processor = OutputProcessor(input_processor.tokenizer)
    processor.add_request(input_processor.process(GenerateRequest("r", "red", SamplingParams(n=2))))
    assert processor.remove("unknown") == []
    assert processor.remove("r") == ["r-0", "r-1"]
    assert processor.remove("r") == []
