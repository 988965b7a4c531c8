"""A directory as HF reads it: its processor and its `generate` say what mmjax says.

No file of expected answers: HF's classes are asked at test time. By default of the families that
differ most, logits of one; of all in the slow run.
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
from mmjax.parity.arrays import PagedModel
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import generate_reference, load_reference, run_reference
from mmjax.training.samples import make_sample
from tests.families import FAMILIES
from tests.families.default_run import mark
from tests.families.family import Family
from tests.kit import draw

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
Prompt = tuple[str, list[Image.Image]]
START = "here are the picture and some crops to help you see better how many red shapes there are "
"""More than a block of the KV cache."""


def find_cases(law: str) -> list[Any]:
    """Return all families that HF answers for."""
    return [
        pytest.param(family, id=name, marks=mark(law, name))
        for name, family in FAMILIES.items()
        if family.is_hf_asked
    ]


def write_prompts(family: Family) -> list[Prompt]:
    """Return prompts of no picture, one and two, of these what the family takes."""
    pictures = [draw(*size, seed) for seed, size in enumerate(family.sizes)]
    return [
        (f"{START}{family.placeholder * n} which color is {'the circle' * n}", pictures[:n])
        for n in range(family.min_images, min(2, family.max_images) + 1)
    ]


LISTED = {"num_local_patches"}
"""What HF's models take in Python."""


def as_inputs(family: Family, reference: Any, prompt: Prompt) -> dict[str, Any]:
    """Return what HF's processor gives, of it what HF's model takes: a batch of one."""
    hf = family.call_hf(*prompt, {})
    known = signature(reference.forward).parameters.keys()
    ids = torch.tensor(hf.input_ids)[None]
    return {
        **{
            name: np.asarray(hf.tensors[name]).tolist()
            if name in LISTED
            else torch.as_tensor(np.asarray(hf.tensors[name]))
            for name in known & {*hf.tensors}
        },
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


@cache
def load(family: Family) -> tuple[Any, list[dict[str, Any]]]:
    """Return HF's model, and what it takes of each prompt."""
    config = load_model_config(str(family.checkpoint))
    reference = load_reference(family.checkpoint, config.architecture)
    if family.tiny is not None:
        family.tiny.mend(reference)
    return reference, [as_inputs(family, reference, prompt) for prompt in write_prompts(family)]


def embed(reference: Any, inputs: dict[str, Any]) -> np.ndarray:
    """Return float32[rows, D]: what HF's tower and connector make of a prompt's picture.

    Of Granite 4 Vision an embedding of 0, and behind it what each layer of the decoder is fed.
    """
    known = signature(reference.get_image_features).parameters.keys()
    with torch.no_grad():
        found = reference.get_image_features(**{name: inputs[name] for name in known & {*inputs}})
    if found.pooler_output is None:
        fed = [torch.cat(of_pictures) for _, of_pictures in found.deepstack_features]
        rows = torch.cat([torch.zeros_like(fed[0]), *fed], dim=-1)
    else:
        rows = torch.cat(list(found.pooler_output))
    return rows.reshape(-1, rows.shape[-1]).numpy()


@pytest.mark.parametrize("family", find_cases("HF's logits"))
def test_logits_at_every_position_are_hfs(family: Family):
    config = load_model_config(str(family.checkpoint))
    processor, model_class = create_processor(config), load_model_class(config.architecture)
    parts: Any = (family.checkpoint, model_class, config.hf_config)
    model = PagedModel.from_directory(
        *parts, max_len=family.llm_settings.get("max_model_len", 1024)
    )
    reference, prompts = load(family)
    for (text, images), inputs in zip(write_prompts(family), prompts, strict=True):
        given = processor.apply(text, {"image": images} if images else {})
        expected = run_reference(reference, inputs, ())[LOGITS]
        found = model.run(make_sample(given))[LOGITS]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", find_cases("HF's tokens"))
def test_the_engines_greedy_tokens_are_hfs(family: Family):
    """In chunks, all at once; with cold caches and with warm ones; with HF's embeddings."""
    reference, inputs = load(family)
    expected = [list(generate_reference(reference, one, NUM_TOKENS)) for one in inputs]
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": images} if images else {}}
        for text, images in write_prompts(family)
    ]
    chunk = max(32, 0 if family.tiny is None else family.tiny.longest_run)
    settings = {**family.llm_settings, "max_num_batched_tokens": chunk}
    embeds: dict[str, Any] = {"enable_mm_embeds": True} if family.takes_embeds else {}
    with LLM(family.checkpoint, use_tqdm_on_load=False, **settings, **embeds) as llm:
        for _ in ("cold", "warm"):
            assert generate(llm, prompts) == expected
        assert llm.engine.stats().prefix_cache_hits > 0
        check_chat(llm, family)
        if family.takes_embeds:
            place = 1 - family.min_images
            rows = embed(reference, inputs[place])
            data = {"image": {"image_embeds": [rows]}}
            (found,) = generate(llm, [{**prompts[place], "multi_modal_data": data}])
            assert found == expected[place]
        assert llm.engine.compilations == 0
    assert len({str(answer) for answer in expected}) == len(expected), "images change nothing"


def generate(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_chat(llm: LLM, family: Family) -> None:
    """A conversation is answered as HF answers its text."""
    picture = draw(130, 70, 3)
    content: list[Any] = [
        {"type": "image_pil", "image_pil": picture},
        {"type": "text", "text": "what color is the circle"},
    ]
    (chat,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    reference, _ = load(family)
    inputs = as_inputs(family, reference, (str(chat.prompt), [picture]))
    # A checkpoint's template, not the tokenizer, says how a conversation begins.
    start = inputs["input_ids"].shape[1] - len(chat.prompt_token_ids)
    assert start in (0, 1)
    of_tokens = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    cut = {name: value[:, start:] if name in of_tokens else value for name, value in inputs.items()}
    assert cut["input_ids"][0].tolist() == list(chat.prompt_token_ids)
    assert list(chat.outputs[0].token_ids) == list(generate_reference(reference, cut, NUM_TOKENS))
