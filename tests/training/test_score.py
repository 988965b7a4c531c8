"""`score` says of a sequence what the paged engine says token by token, for every family.

Of the families that transformers has no class of, `test_rollout.py` asks the engine itself.
"""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mmjax import ScoredModel, score
from mmjax.config.engine_config import MultiModalConfig
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.training.batch import round_size
from tests.families import TINY_FAMILIES, served_model
from tests.families.default_run import rows

LENGTHS = (5, 9, 3)
"""Tokens of the answers, by turns."""
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", rows("scores", TINY_FAMILIES))
def test_a_batch_has_the_log_probabilities_of_the_paged_engine(name: str):
    model = served_model(name)
    samples = [model.draw_sample(parts) for parts in model.family.prompts.values()]
    scored = ScoredModel.build(model.family.model_class, model.config)
    check(scored, model.paged, samples)


def check(scored: ScoredModel, paged: PagedModel, samples: list[Sample]) -> None:
    """Compare what a batch is scored with what each answer was chosen by."""
    pairs, expected = [], []
    for number, sample in enumerate(samples):
        answer, logprobs = answer_greedily(paged, sample, LENGTHS[number % len(LENGTHS)])
        pairs.append((sample, answer))
        expected.append(logprobs)
    batch = scored.make_batch(pairs)
    found = np.asarray(score(paged.params, scored, batch))
    for row, one in zip(found, expected, strict=True):
        np.testing.assert_allclose(row[: len(one)], one, rtol=0, atol=TOLERANCE)
        assert (row[len(one) :] == 0).all(), "padding has none"


def answer_greedily(paged: PagedModel, sample: Sample, length: int) -> tuple[list[int], Any]:
    """Return an answer, and its tokens' log-probabilities, in float64."""
    logits = paged.decode(sample, length).astype(np.float64)
    peak = logits.max(-1)
    total = peak + np.log(np.exp(logits - peak[:, None]).sum(-1))
    return logits.argmax(-1).tolist(), peak - total


def test_an_item_of_two_prompts_is_encoded_once():
    model = served_model("gemma3")
    scored = ScoredModel.build(model.family.model_class, model.config)
    sample = model.draw_sample(model.family.prompts["image"])
    known = Sample(token_ids=sample.token_ids, items=sample.items, item_hashes=["image 1"])
    twice = scored.make_batch([(known, [3, 4]), (known, [5])])
    apart = scored.make_batch([(sample, [3, 4]), (sample, [5])])
    assert count_units(apart) == 2 * count_units(twice)
    found, expected = (np.asarray(score(model.paged.params, scored, x)) for x in (twice, apart))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def count_units(batch: Any) -> int:
    (encoder,) = batch.encoders
    return len(next(iter(encoder.inputs.values())))


def test_sizes_are_rounded_up_so_that_few_programs_are_compiled():
    model = served_model("gemma3")
    scored = ScoredModel.build(model.family.model_class, model.config)
    sample = model.draw_sample(model.family.prompts["image"])
    shapes = {
        str(jax.tree.map(np.shape, scored.make_batch([(sample, [1] * n)]))) for n in range(1, 25)
    }
    assert len(shapes) <= 5, "of answers or of whole sequences"
    assert [round_size(n) for n in (1, 7, 8, 9, 33, 100)] == [1, 7, 8, 10, 40, 112]


def test_logits_are_divided_by_the_temperature_and_computed_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("mmjax.training.score.LOGITS_AT_ONCE", 1000)  # 7 rows of 128 logits
    model = served_model("llava")
    scored = ScoredModel.build(model.family.model_class, model.config)
    sample = model.draw_sample(model.family.prompts["text"])
    logits = model.paged.decode(sample, 11)
    expected = jax.nn.log_softmax(logits / 3.0, axis=-1)
    batch = scored.make_batch([(sample, logits.argmax(-1).tolist())])
    found = np.asarray(score(model.paged.params, scored, batch, 3.0))[0, :11]
    np.testing.assert_allclose(found, expected.max(-1), rtol=0, atol=TOLERANCE)


def test_an_accelerator_rounds_no_factors_of_float32(monkeypatch: pytest.MonkeyPatch):
    """The engine's programs round none either, so that a rollout's probabilities are these."""
    model = served_model("gemma3")
    [sample, *_] = (model.draw_sample(parts) for parts in model.family.prompts.values())
    scored = ScoredModel.build(model.family.model_class, model.config)
    batch = scored.make_batch([(sample, [1, 2])])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.default_matmul_precision("default"):
        jaxpr = str(score.trace(scored.abstract, scored, batch).jaxpr)
    products = re.findall(r"dot_general\[.*?\] ", jaxpr, re.DOTALL)
    assert products
    assert all("HIGHEST" in one for one in products)


def test_a_model_without_media_reads_a_directory_without_its_tower(tmp_path: Path):
    model = served_model("gemma3")
    model.reference.save_pretrained(tmp_path)
    mm = MultiModalConfig(limit_mm_per_prompt={"image": 0})
    scored = ScoredModel.build(model.family.model_class, model.config, mm=mm)
    assert scored.load_params(tmp_path).keys() == scored.abstract.keys() == {"language_model"}


def test_items_that_are_given_by_their_embeddings_are_refused():
    model = served_model("gemma3")
    scored = ScoredModel.build(model.family.model_class, model.config)
    sample = model.draw_sample(model.family.prompts["image"])
    (item,) = sample.items
    embeds = item._replace(tensors={"image_embeds": np.zeros((4, 32), np.float32)})
    given = Sample(token_ids=sample.token_ids, items=[embeds])
    with pytest.raises(ValueError, match="prompt 1 is given by its embeddings"):
        scored.make_batch([(sample, [1]), (given, [1])])


def test_a_batch_of_nothing_is_refused():
    model = served_model("gemma3")
    scored = ScoredModel.build(model.family.model_class, model.config)
    for pairs in ([], [(Sample(token_ids=np.zeros(0, np.int32)), [1])]):
        with pytest.raises(ValueError, match="needs prompts, each with a token"):
            scored.make_batch(pairs)
