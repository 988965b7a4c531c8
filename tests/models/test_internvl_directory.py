"""InternVL from a directory: `LLM` against HF's own processor and model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmjax import LLM, SamplingParams
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.reference import generate_reference, load_reference, make_pixels
from tests.families.internvl import hf_processor
from tests.families.internvl import write as write_internvl
from tests.families.internvl import write_original as write_internvl_original
from tests.kit import draw

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PICTURE = draw(130, 70, 3)
NUM_TOKENS = 4
"""Embeddings of one tile."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF's layout, as `save_pretrained` writes it."""
    return write_internvl(tmp_path_factory.mktemp("internvl"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in the original layout."""
    return write_internvl_original(tmp_path_factory.mktemp("internvl-original"))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return load_reference(directory, "InternVLForConditionalGeneration")


def open_llm(path: Path, **settings: Any) -> LLM:
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    return LLM(str(path), use_tqdm_on_load=False, **sizes, **settings)


def ask(llm: LLM, image: Any) -> tuple[list[int], list[int]]:
    """Return the prompt's tokens and the answer's."""
    content = [image, {"type": "text", "text": "What color is it?"}]
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    return list(output.prompt_token_ids), list(output.outputs[0].token_ids)


def answer_of_hf(reference: Any, prompt: str) -> tuple[list[int], list[int]]:
    inputs = hf_processor()(text=prompt, images=[PICTURE], return_tensors="pt")
    with torch.no_grad():
        out = reference.generate(**inputs, do_sample=False, max_new_tokens=GREEDY.max_tokens)[0]
    length = inputs["input_ids"].shape[1]
    return out[:length].tolist(), out[length:].tolist()


def test_a_chat_about_a_picture_and_its_embeddings(directory: Path, reference: Any):
    part = {"type": "image_pil", "image_pil": PICTURE}
    with open_llm(directory, enable_mm_embeds=True) as llm:
        prompt = (
            "<|im_start|>user\n<IMG_CONTEXT>\nWhat color is it?<|im_end|>\n<|im_start|>assistant\n"
        )
        ids, tokens = ask(llm, part)
        assert (ids, tokens) == answer_of_hf(reference, prompt)
        assert ids.count(998) == 3 * NUM_TOKENS  # two tiles and a thumbnail

        pixels = hf_processor()(text=prompt, images=[PICTURE], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            rows = reference.get_image_features(pixels).pooler_output.flatten(0, 1)
        data: Any = {"prompt": prompt, "multi_modal_data": {"image": {"image_embeds": rows}}}
        (output,) = llm.generate(data, GREEDY, use_tqdm=False)
        assert list(output.prompt_token_ids) == ids
        assert list(output.outputs[0].token_ids) == tokens
        assert llm.engine.compilations == 0


def test_the_original_layout_says_the_same_of_pictures_and_videos(original: Path, reference: Any):
    picture = "<|im_start|>user\n<image>\nWhat color is it?<|im_end|>\n"
    video = picture.replace("<image>", "<video>")
    frames = np.stack([np.asarray(draw(50, 40, seed)) for seed in range(3)])
    prompts: list[Any] = [
        {"prompt": picture, "multi_modal_data": {"image": [PICTURE]}},
        {"prompt": video, "multi_modal_data": {"video": [frames]}},
    ]
    with open_llm(original) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        ids, tokens = zip(
            *[(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs], strict=True
        )
    expected = answer_of_hf(reference, picture.replace("<image>", "<IMG_CONTEXT>"))
    assert (list(ids[0]), list(tokens[0])) == expected

    processor = create_processor(load_model_config(str(original)))
    inputs = processor.apply(video, {"video": [frames]})
    assert list(ids[1]) == inputs.prompt_token_ids
    pixels: Any = make_pixels(inputs.mm_kwargs.get_data())["pixel_values_flat_video"]
    assert len(pixels) == 3
    tensors = {"input_ids": torch.tensor([ids[1]]), "pixel_values": torch.tensor(pixels)}
    assert tuple(tokens[1]) == generate_reference(reference, tensors, GREEDY.max_tokens)
