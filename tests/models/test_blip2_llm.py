"""BLIP-2 from a directory: through `LLM`, with embeddings in place of a picture."""

from pathlib import Path

import pytest
import torch

from mmjax import LLM, SamplingParams
from mmjax.parity.reference import generate_reference, load_reference
from tests.families.blip2 import hf_processor
from tests.families.blip2 import write as write_blip2
from tests.kit import draw

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = "what is it"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blip2(tmp_path_factory.mktemp("blip2"))


def test_llm_says_what_hf_says(checkpoint: Path):
    reference = load_reference(checkpoint, "Blip2ForConditionalGeneration")
    pictures = [draw(40, 30, seed) for seed in range(2)]
    inputs = [hf_processor()(text=PROMPT, images=one, return_tensors="pt") for one in pictures]
    expected = [generate_reference(reference, one, 8) for one in inputs]
    with torch.no_grad():
        features = reference.get_image_features(inputs[1]["pixel_values"])
    images = [*pictures, {"image_embeds": features.pooler_output.numpy()}]

    settings = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    with LLM(
        str(checkpoint),
        enable_mm_embeds=True,
        use_tqdm_on_load=False,
        **settings,
    ) as llm:
        prompts = [{"prompt": PROMPT, "multi_modal_data": {"image": one}} for one in images]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.engine.compilations == 0
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert answers == [*expected, expected[1]]
