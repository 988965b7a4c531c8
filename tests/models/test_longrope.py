"""Prompts beyond the trained length of a Phi-3 have rotary frequencies of their own."""

from dataclasses import replace
from typing import Any

import pytest

from mmjax.models.internvl.host_inputs import InternVLHostInputs
from mmjax.parity.reference import generate_reference
from tests.engine.tiny import answer_all
from tests.families.internvl import PHI3, TINY, tiny_config
from tests.families.tiny import Media, Parts, TinyModel, Words
from tests.models.served import make_request, start_engine

TRAINED = PHI3["original_max_position_embeddings"]
SHORT: Parts = (Words(0, TRAINED - 5),)
PROMPTS: dict[str, Parts] = {
    "short": SHORT,
    "long": (*SHORT, Words(1, 20)),
    "long, of the same beginning": (*SHORT, Words(2, 12), Media(1)),
}
NUM_TOKENS = 5
"""Of an answer: a short prompt's ends where the trained length does."""


@pytest.fixture(scope="module")
def model() -> TinyModel:
    family = replace(TINY, served={"text": PHI3})
    return TinyModel(family, **family.served)


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_are_hfs_on_both_sides_of_the_length(model: TinyModel, name: str):
    sample = model.draw_sample(PROMPTS[name])
    module, inputs = TINY.torch_call(model.reference, sample)
    assert model.paged.generate(sample, NUM_TOKENS) == generate_reference(
        module, inputs, NUM_TOKENS
    )


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}], ids=["whole", "chunks"])
def test_keys_of_another_length_are_not_read(model: TinyModel, settings: dict[str, Any]):
    """The short prompt's blocks begin all three; the two long ones share theirs alone."""
    samples = [model.draw_sample(parts) for parts in PROMPTS.values()]
    expected = [list(model.paged.generate(sample, NUM_TOKENS)) for sample in samples]
    core = start_engine(model, max_model_len=96, **settings)
    hits = []
    for number, sample in enumerate(samples):
        request = make_request(f"{number}", sample, max_tokens=NUM_TOKENS)
        assert answer_all(core, [request]) == [expected[number]]
        hits.append(core.stats().prefix_cache_hits)
    assert hits[0] == hits[1] == 0 < hits[2]


def test_the_level_is_that_of_the_prompt():
    host_inputs = InternVLHostInputs(tiny_config(text=PHI3))
    for num_tokens, level in ((TRAINED, 0), (TRAINED + 1, 1)):
        positions = host_inputs.rotary_positions(num_tokens, ())
        assert positions is not None
        assert positions.cache_key == "longrope 1" * level
        rows = positions.between(num_tokens - 1, num_tokens + 2).tolist()
        assert rows[0] == rows[1] == [num_tokens - 1, num_tokens, num_tokens + 1]
        assert rows[2] == [level] * 3
    assert InternVLHostInputs(tiny_config()).rotary_positions(9, ()) is None
