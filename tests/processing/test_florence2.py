"""Florence-2's own: tasks in words, the two prompts, what it refuses."""

from typing import Any

import numpy as np
import pytest

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import CheckpointError, RequestError
from tests.families import FAMILIES
from tests.families.florence2 import FLORENCE2
from tests.kit import draw

IMAGE_ID, BOS, EOS = 979, 0, 2
TASKS = [
    *("<OCR>", "<OCR_WITH_REGION>", "<CAPTION>", "<DETAILED_CAPTION>", "<MORE_DETAILED_CAPTION>"),
    *("<OD>", "<DENSE_REGION_CAPTION>", "<REGION_PROPOSAL>"),
    "<CAPTION_TO_PHRASE_GROUNDING>a red car",
    "<REFERRING_EXPRESSION_SEGMENTATION> the cat ",
    "<REGION_TO_SEGMENTATION><loc_1><loc_2><loc_3><loc_4>",
    "<OPEN_VOCABULARY_DETECTION>cat",
    "<REGION_TO_CATEGORY><loc_1><loc_2><loc_3><loc_4>",
    "<REGION_TO_DESCRIPTION><loc_0><loc_9><loc_3><loc_4>",
    "<REGION_TO_OCR><loc_1><loc_2><loc_3><loc_4>",
    "what is it?",
    "",
    "<s>odd</s>",
]


FAMILY = FAMILIES["florence2"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("num_images", [0, 1])
def test_tasks_are_written_out_as_hf_does(processor: Any, task: str, num_images: int):
    images = [draw(60, 90)] * num_images
    wanted = FLORENCE2.call_hf(task, images, {}).input_ids
    mm_data = {"image": images} if images else {}
    tokenizer = processor.info.get_tokenizer()
    for prompt in (task, tokenizer.encode(task), tokenizer.encode(task, add_special_tokens=False)):
        if isinstance(prompt, list) and task.startswith("<s>") and BOS not in prompt[1:]:
            continue  # those ids are those of `odd`
        inputs = processor.apply(prompt, mm_data)
        assert inputs.encoder_prompt_token_ids == wanted
        assert inputs.prompt_token_ids == [EOS]
        assert inputs.prompt == (prompt if isinstance(prompt, str) else None)
        for one in inputs.mm_placeholders.get("image", []):
            assert (one.offset, one.length, one.is_embed) == (0, 17, None)
    if images:
        assert wanted[:18] == [IMAGE_ID] * 17 + [BOS]
        assert wanted[-1] == EOS


def test_a_given_decoder_prompt_is_taken(processor: Any):
    inputs = processor.apply("<OD>", {"image": draw(9, 9)}, decoder_prompt="the cat")
    tokenizer = processor.info.get_tokenizer()
    assert inputs.prompt_token_ids == tokenizer.encode("the cat", add_special_tokens=False)
    assert inputs.encoder_prompt_token_ids[0] == IMAGE_ID
    assert processor.apply("<OD>", decoder_prompt=[EOS, 5]).prompt_token_ids == [EOS, 5]


@pytest.mark.parametrize("prompt", ["<OD> and more", "please <CAPTION>", "<OD><OCR>"])
def test_a_task_without_input_stands_alone(processor: Any, prompt: str):
    for kind in (prompt, processor.info.get_tokenizer().encode(prompt)):
        with pytest.raises(RequestError, match="among other words; send the task alone") as caught:
            processor.apply(kind, {"image": draw(9, 9)})
        assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_a_cached_picture_serves_every_task():
    cache = MultiModalProcessorOnlyCache(2**24)
    processor = FLORENCE2.make_processor(processor_cache=cache)
    picture = draw(60, 90)
    for task in TASKS:
        wanted = FLORENCE2.make_processor().apply(task, {"image": picture})
        found = processor.apply(task, {"image": picture})
        assert found.encoder_prompt_token_ids == wanted.encoder_prompt_token_ids
        assert found.mm_kwargs == wanted.mm_kwargs
    assert cache.make_stats().hits >= len(TASKS) - 1


def test_pictures_of_any_shape_have_one_size(processor: Any):
    for size in [(1, 1), (700, 3), (128, 128), (500, 400)]:
        inputs = processor.apply("<OD>", {"image": draw(*size)})
        assert np.shape(inputs.mm_kwargs["image"][0]["pixel_values"].data) == (3, 128, 128)


def test_a_checkpoint_whose_files_contradict_each_other():
    processor = FLORENCE2.make_processor()
    processor.info.get_hf_config().image_token_id = 7
    with pytest.raises(CheckpointError, match=r"`<image>` is token 979, but `image_token_id` .* 7"):
        processor.info.get_hf_processor()
