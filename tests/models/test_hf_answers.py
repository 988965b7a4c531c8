"""A directory as HF reads it: its processor and its `generate` say what mmjax says.

No file of expected answers: HF's classes are asked at test time. By default of the directories that
tests write, which have no golden ones; of all others in the slow run.
"""

from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmjax import LLM, SamplingParams
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor, load_model_class
from mmjax.parity.arrays import PagedModel, make_sample
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import generate_reference, load_reference, run_reference
from tests.families import FAMILIES
from tests.families.family import Family
from tests.kit import draw

NUM_TOKENS = 24
SIZES = [(90, 70), (37, 211)]
START = "here are the picture and some crops to help you see better how many red shapes there are "
"""More than a block of the KV cache."""
CASES = [
    pytest.param(family, id=name, marks=() if family.is_written else pytest.mark.slow)
    for name, family in FAMILIES.items()
    if family.is_hf_asked
]
Prompt = tuple[str, list[Image.Image]]


def write_prompts(family: Family) -> list[Prompt]:
    """Return prompts of no picture, one and two, of these what the family takes."""
    pictures = [draw(*size, seed) for seed, size in enumerate(SIZES)]
    return [
        (f"{START}{family.placeholder * n} which color is {'the circle' * n}", pictures[:n])
        for n in range(family.min_images, min(2, family.max_images) + 1)
    ]


def as_inputs(family: Family, reference: Any, prompt: Prompt) -> dict[str, Any]:
    """Return what HF's processor gives, of it what HF's model takes: a batch of one."""
    hf = family.call_hf(*prompt, {})
    known = signature(reference.forward).parameters.keys()
    ids = torch.tensor(hf.input_ids)[None]
    return {
        **{name: torch.as_tensor(np.asarray(hf.tensors[name])) for name in known & {*hf.tensors}},
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


@cache
def ask_hf(family: Family) -> tuple[list[np.ndarray], list[list[int]]]:
    """Return the logits at every position of each prompt, and its greedy tokens."""
    config = load_model_config(str(family.checkpoint))
    reference = load_reference(family.checkpoint, config.architecture)
    prompts = [as_inputs(family, reference, prompt) for prompt in write_prompts(family)]
    logits = [run_reference(reference, inputs, ())[LOGITS] for inputs in prompts]
    return logits, [list(generate_reference(reference, one, NUM_TOKENS)) for one in prompts]


@pytest.mark.parametrize("family", CASES)
def test_logits_at_every_position_are_hfs(family: Family):
    config = load_model_config(str(family.checkpoint))
    processor = create_processor(config)
    model_class = load_model_class(config.architecture)
    model = PagedModel.from_directory(
        family.checkpoint, model_class, config.hf_config, max_len=1024
    )
    for (text, images), expected in zip(write_prompts(family), ask_hf(family)[0], strict=True):
        inputs = processor.apply(text, {"image": images} if images else {})
        found = model.run(make_sample(inputs))[LOGITS]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", CASES)
def test_the_engines_greedy_tokens_are_hfs(family: Family):
    """In chunks, all at once; with cold caches, and with warm ones."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": images} if images else {}}
        for text, images in write_prompts(family)
    ]
    _, expected = ask_hf(family)
    settings = {**family.llm_settings, "max_num_batched_tokens": 32}
    with LLM(family.checkpoint, use_tqdm_on_load=False, **settings) as llm:
        for _ in ("cold", "warm"):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert llm.engine.stats().prefix_cache_hits > 0
    assert len({str(answer) for answer in expected}) == len(expected), "images change nothing"
