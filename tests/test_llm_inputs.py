"""`LLM.generate` with `return_mm_inputs`: the prompt as the engine computed it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax import LLM, SamplingParams, create_processor
from mmjax.processing.tensors.inputs import MultiModalInputs
from tests.kit import IMAGE_START, draw

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "use_tqdm_on_load": False,
}
ONE, TWO = draw(40, 30, 1), draw(20, 50, 2)
PROMPTS: list[dict[str, Any]] = [
    {"prompt": f"{IMAGE_START} red", "multi_modal_data": {"image": ONE}},
    {"prompt": f"a {IMAGE_START} {IMAGE_START}", "multi_modal_data": {"image": [TWO, ONE]}},
    {"prompt": f"{IMAGE_START} {IMAGE_START}", "multi_modal_data": {"image": [ONE, ONE]}},
    {"prompt": "a star"},
]


def check(found: MultiModalInputs | None, expected: MultiModalInputs) -> None:
    """Compare ids, placeholders and the tensors of all items."""
    assert found is not None
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.mm_placeholders == expected.mm_placeholders
    assert found.mm_kwargs.keys() == expected.mm_kwargs.keys()
    for modality, items in expected.mm_kwargs.items():
        for index in range(len(items)):
            own = found.mm_kwargs.get_item(modality, index).get_data()
            other = expected.mm_kwargs.get_item(modality, index).get_data()
            assert own.keys() == other.keys()
            for name, tensor in other.items():
                np.testing.assert_array_equal(own[name], tensor)
                assert not own[name].flags.writeable


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="lru"),
        pytest.param({"mm_processor_cache_type": "shm"}, id="shm", marks=pytest.mark.slow),
        pytest.param(
            {"mm_processor_cache_type": "processor_only"},
            id="processor only",
            marks=pytest.mark.slow,
        ),
        pytest.param({"mm_processor_cache_gb": 0.0}, id="none", marks=pytest.mark.slow),
    ],
)
def test_inputs_are_those_of_the_processor_wherever_items_come_from(
    tiny_gemma3: Path, settings: dict[str, Any]
) -> None:
    processor = create_processor(tiny_gemma3, max_model_len=128)
    expected = [
        processor.apply(prompt["prompt"], prompt.get("multi_modal_data")) for prompt in PROMPTS
    ]
    with LLM(str(tiny_gemma3), **SETTINGS, **settings) as llm:
        for _ in range(2):  # from the caches the second time
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, return_mm_inputs=True)
            for output, own in zip(outputs, expected, strict=True):
                check(output.multi_modal_inputs, own)
                assert output.prompt_token_ids == own.prompt_token_ids
        if "mm_processor_cache_gb" not in settings:
            named: dict[str, Any] = {**PROMPTS[0], "multi_modal_uuids": {"image": "one"}}
            llm.generate(named, GREEDY, use_tqdm=False)
            named["multi_modal_data"] = {"image": None}
            params = SamplingParams(temperature=0.0, max_tokens=2, n=2)
            (output,) = llm.generate(named, params, use_tqdm=False, return_mm_inputs=True)
            check(output.multi_modal_inputs, expected[0])
        (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        assert output.multi_modal_inputs is None
        part = {"type": "image_pil", "image_pil": ONE}
        conversation = [{"role": "user", "content": [part, {"type": "text", "text": "red"}]}]
        (output,) = llm.chat(conversation, GREEDY, use_tqdm=False, return_mm_inputs=True)
        assert output.multi_modal_inputs is not None
        assert output.multi_modal_inputs.prompt_token_ids == output.prompt_token_ids
        assert [len(items) for items in output.multi_modal_inputs.mm_kwargs.values()] == [1]


def test_an_engine_that_lost_an_item_gets_it_again(tiny_gemma3: Path) -> None:
    processor = create_processor(tiny_gemma3, max_model_len=128)
    with LLM(str(tiny_gemma3), **SETTINGS) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.engine._receiver_cache is not None
        llm.engine._receiver_cache.clear_cache()
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, return_mm_inputs=True)
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            own = processor.apply(prompt["prompt"], prompt.get("multi_modal_data"))
            check(output.multi_modal_inputs, own)


@pytest.mark.parametrize("include_stop_str_in_output", [False, True])
def test_the_token_that_ends_an_answer_is_one_of_its_tokens(
    tiny_gemma3: Path, include_stop_str_in_output: bool
) -> None:
    """As in vLLM: a trainer needs it, which the text leaves out."""
    with LLM(str(tiny_gemma3), **SETTINGS) as llm:
        free = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
        (output,) = llm.generate("a red circle", free, use_tqdm=False)
        ids = output.outputs[0].token_ids
        last = next(token_id for place, token_id in enumerate(ids) if place and token_id != ids[0])
        params = SamplingParams(
            temperature=0.0,
            max_tokens=6,
            ignore_eos=True,
            logprobs=0,
            stop_token_ids=[last],
            include_stop_str_in_output=include_stop_str_in_output,
        )
        (output,) = llm.generate("a red circle", params, use_tqdm=False)
        (answer,) = output.outputs
        assert answer.token_ids == ids[: ids.index(last) + 1]
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", last)
