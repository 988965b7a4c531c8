"""What the engine draws, `score` finds as likely as the engine said: the importance ratio is 1."""

from typing import Any

import numpy as np
import pytest

from mmjax import LLM, SamplingParams, ScoredModel, score
from tests.families import FAMILIES
from tests.families.family import Family
from tests.kit import draw

NUM_TOKENS = 12
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
TOLERANCE = 1e-5
PARITY = 1e-4
LOUD = {"deepseek_vl2", "florence2", "molmo", "qwen_vl"}
"""Golden models, whose random weights make logits so large that float32 rounds their last bits off:
they are up to 8e-5 apart."""
LARGER_STEPS = {"molmo2": {"max_num_batched_tokens": 128}}
"""Whose two pictures see each other, and so go in one step: of 71 tokens, where others have 64."""


# By default `test_score.py` compares scores with the paged model's log-probabilities, and
# `tests/test_grpo_example.py` trains on what an engine drew.
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_importance_ratio_is_one(name: str):
    family = FAMILIES[name]
    prompts = write_prompts(family)
    settings = {**family.llm_settings, **LARGER_STEPS.get(name, {})}
    with LLM(family.checkpoint, dtype="float32", use_tqdm_on_load=False, **settings) as llm:
        outputs = llm.generate(prompts, DRAWN, use_tqdm=False, return_mm_inputs=True)
        model = ScoredModel.of(llm)
    answers = [output.outputs[0] for output in outputs]
    pairs: Any = [
        (output.multi_modal_inputs, answer.token_ids)
        for output, answer in zip(outputs, answers, strict=True)
    ]
    batch = model.make_batch(pairs)
    scored = np.asarray(score(model.load_params(family.checkpoint), model, batch))
    said = np.zeros_like(scored)
    for row, answer in enumerate(answers):
        assert answer.logprobs is not None
        said[row, : len(answer.token_ids)] = [
            one[token].logprob for one, token in zip(answer.logprobs, answer.token_ids, strict=True)
        ]
    atol = PARITY if name in LOUD else TOLERANCE
    assert batch.answer_mask.sum() == NUM_TOKENS * len(prompts)
    np.testing.assert_allclose(np.exp(scored - said), 1, rtol=0, atol=atol)
    assert (said[batch.answer_mask] < -0.1).any(), "nothing was drawn that was not sure"


def write_prompts(family: Family) -> list[Any]:
    """Return prompts of none, one and two pictures, of different sizes: what the family takes."""
    pictures = [draw(*size, seed) for seed, size in enumerate(family.sizes)]
    return [
        {
            "prompt": f"here {family.placeholder * number} which color is the circle",
            "multi_modal_data": {"image": pictures[:number]} if number else {},
        }
        for number in range(family.min_images, min(2, family.max_images) + 1)
    ]
