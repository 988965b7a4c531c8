"""InternVL's original layout from a directory: `LLM` against HF's model of the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmjax import LLM, SamplingParams
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.reference import generate_reference, load_reference, make_pixels
from tests.families.internvl import INTERNVL, INTERNVL_ORIGINAL, hf_processor
from tests.kit import draw

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PICTURE = draw(130, 70, 3)


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_reference(INTERNVL.checkpoint, "InternVLForConditionalGeneration")


def open_llm(path: Path, **settings: Any) -> LLM:
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    return LLM(str(path), use_tqdm_on_load=False, **sizes, **settings)


def answer_of_hf(reference: Any, prompt: str) -> tuple[list[int], list[int]]:
    inputs = hf_processor()(text=prompt, images=[PICTURE], return_tensors="pt")
    with torch.no_grad():
        out = reference.generate(**inputs, do_sample=False, max_new_tokens=GREEDY.max_tokens)[0]
    length = inputs["input_ids"].shape[1]
    return out[:length].tolist(), out[length:].tolist()


def test_the_original_layout_says_the_same_of_pictures_and_videos(reference: Any):
    picture = "<|im_start|>user\n<image>\nWhat color is it?<|im_end|>\n"
    video = picture.replace("<image>", "<video>")
    frames = np.stack([np.asarray(draw(50, 40, seed)) for seed in range(3)])
    prompts: list[Any] = [
        {"prompt": picture, "multi_modal_data": {"image": [PICTURE]}},
        {"prompt": video, "multi_modal_data": {"video": [frames]}},
    ]
    with open_llm(INTERNVL_ORIGINAL.checkpoint) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        ids, tokens = zip(
            *[(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs], strict=True
        )
    expected = answer_of_hf(reference, picture.replace("<image>", "<IMG_CONTEXT>"))
    assert (list(ids[0]), list(tokens[0])) == expected

    processor = create_processor(load_model_config(str(INTERNVL_ORIGINAL.checkpoint)))
    inputs = processor.apply(video, {"video": [frames]})
    assert list(ids[1]) == inputs.prompt_token_ids
    pixels: Any = make_pixels(inputs.mm_kwargs.get_data())["pixel_values_flat_video"]
    assert len(pixels) == 3
    tensors = {"input_ids": torch.tensor([ids[1]]), "pixel_values": torch.tensor(pixels)}
    assert tuple(tokens[1]) == generate_reference(reference, tensors, GREEDY.max_tokens)
