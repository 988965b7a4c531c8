"""Molmo against what the published implementation computed of the same tiny checkpoints."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.layers.module import bind
from mmjax.models.molmo.model import MolmoForCausalLM
from mmjax.parity.arrays import Sample
from mmjax.processing import MultiModalInputs
from mmjax.training.samples import make_sample
from tests.families.directories import GOLDEN_MODELS
from tests.families.golden_models import NUM_STEPS, GoldenModel, to_ranges
from tests.kit import each_once

MODELS = {name: GoldenModel(name, GOLDEN_MODELS / name) for name in ("molmo_7b_d", "molmo_7b_o")}
CASES = ("square", "wide", "tall", "tiny", "photo", "photo_raw", "text_only")
EMBEDS_WITHIN = 2e-4
LOGITS_WITHIN = 1e-3
PIXELS_WITHIN = 1e-4
"""Absolute, in float32; resizing by another program moves pixels by up to 6e-5."""
RAW = {"message_format": "none", "always_start_with_space": False}
PATCH_ROW = 2
"""Of `<im_patch>`, among the new tokens."""


@pytest.fixture(params=MODELS)
def golden(request: pytest.FixtureRequest) -> GoldenModel:
    return MODELS[request.param]


def process(golden: GoldenModel, case: dict[str, Any], prompt: Any) -> MultiModalInputs:
    kwargs = RAW if case["name"] == "photo_raw" else {}
    return golden.processor.apply(prompt, golden.images(case), hf_processor_mm_kwargs=kwargs)


def sample_of(golden: GoldenModel, name: str) -> Sample:
    case = golden.cases[name]
    return make_sample(process(golden, case, case["prompt"]))


def test_all_cases_are_there(golden: GoldenModel):
    assert tuple(golden.cases) == CASES


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["text", "formatted text", "token ids", "formatted token ids"])
def test_prompts_are_the_published_ones(golden: GoldenModel, name: str, kind: str):
    case = golden.cases[name]
    prompt = case["prompt"] if "formatted" in kind else case["user_text"]
    if "token ids" in kind:
        prompt = golden.processor.info.get_tokenizer().encode(prompt)
    inputs = process(golden, case, prompt)
    assert inputs.prompt_token_ids == case["prompt_token_ids"]
    assert inputs.mm_placeholders.get("image", []) == to_ranges(case)


@pytest.mark.parametrize("name", CASES[:-1])
def test_crops_are_the_published_ones(golden: GoldenModel, name: str):
    data = process(golden, golden.cases[name], "what").mm_kwargs.get_data()
    key = f"case.{'photo' if name == 'photo_raw' else name}."
    for tensor in ("image_masks", "image_input_idx"):
        np.testing.assert_array_equal(data[tensor], golden.tensors[key + tensor])
    assert data["num_crops"].tolist() == [golden.cases[name]["n_crops_incl_global"]]
    if key + "images" in golden.tensors:
        expected = golden.tensors[key + "images"]
        np.testing.assert_allclose(data["images"], expected, rtol=0, atol=PIXELS_WITHIN)


def test_some_pixels_were_compared():
    kept = {key for key in MODELS["molmo_7b_d"].tensors if key.endswith(".images")}
    assert kept == {"case.wide.images", "case.tiny.images"}


@pytest.mark.parametrize(("model", "name"), each_once(MODELS, CASES))
def test_embeddings_logits_and_tokens_are_the_published_ones(
    model: str, name: str, record_property: Any
):
    golden = MODELS[model]
    sample = sample_of(golden, name)
    if sample.items:
        key = f"case.{'photo' if name == 'photo_raw' else name}.image_embeds"
        # What is added to the token's own embedding.
        token = np.asarray(golden.model.params["new_embed_tokens"]["weight"])[PATCH_ROW]
        difference = np.abs(golden.model.embed(sample) - token - golden.tensors[key]).max()
        record_property("embeddings", float(difference))
        assert difference < EMBEDS_WITHIN
    logits = golden.model.decode(sample, NUM_STEPS)
    assert logits.argmax(-1).tolist() == golden.cases[name]["greedy_token_ids"]
    difference = np.abs(logits - golden.tensors[f"case.{name}.step_logits"]).max()
    record_property("logits", float(difference))
    assert difference < LOGITS_WITHIN


def test_new_tokens_are_read_and_have_no_logits(golden: GoldenModel):
    params = golden.model.params
    model = MolmoForCausalLM(golden.processor.info.get_hf_config(), dtype="float32")
    count = len(params["language_model"]["lm_head"]["weight"])
    assert count == golden.tensors["case.wide.step_logits"].shape[1]
    assert model.num_token_ids == golden.processor.info.vocab_size == count + 128
    bound = bind(golden.model.graphdef, params)
    found = bound.embed_input_ids(jnp.array([5, count - 1, count, count + 127]))
    tables = [params["language_model"]["embed_tokens"], params["new_embed_tokens"]]
    table = np.concatenate([one["weight"] for one in tables])
    np.testing.assert_array_equal(found, table[[5, count - 1, count, count + 127]])
