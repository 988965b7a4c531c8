"""Llama 3.2 Vision beyond the laws: what each token sees, BOS, files that contradict each other."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from mmjax.errors import RequestError
from mmjax.models.host_inputs import find_seen_rows
from mmjax.models.mllama.host_inputs import MAX_IMAGES, MllamaHostInputs
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import run_reference
from tests.families import FAMILIES, served_model
from tests.families.directories import golden_processor
from tests.families.family import call_processor, hf_of
from tests.families.mllama import (
    BOS,
    IMAGE,
    MllamaImageProcessorPil,
    MllamaProcessor,
    draw_item,
    tiny_config,
    write_files,
)
from tests.families.tiny import Media, Words
from tests.kit import draw


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=12))
def test_each_token_sees_what_hfs_mask_shows(tokens: list[tuple[bool, int]]):
    """Of each token whether it is a picture's, and of how many tiles that is."""
    ids = [int(is_image) for is_image, _ in tokens]
    counts = [number for is_image, number in tokens if is_image]
    first, end = find_seen_rows(np.flatnonzero(ids).tolist(), counts, len(ids))
    places = np.arange(sum(counts))
    ours = (places >= first[:, None]) & (places < end[:, None])
    if not counts:
        assert not ours.any()
        return
    sparse = [get_cross_attention_token_mask(ids, 1)]
    (mask,) = convert_sparse_cross_attention_mask_to_dense(sparse, [counts], 4, len(ids))
    is_tile = np.arange(4)[None] < np.array(counts)[:, None]
    np.testing.assert_array_equal(ours, mask[:, is_tile].astype(bool))


def test_rows_of_tiles_that_are_not_there_are_left_out():
    config = tiny_config()
    host_inputs = MllamaHostInputs(config)
    tensors = draw_item(config, Media(1)).tensors
    assert len(tensors["pixel_values"]) == 2
    assert host_inputs.embed_rows(tensors).tolist() == list(range(2 * 5))
    units = host_inputs.units(tensors)["pixel_values"]
    assert units.shape == (1, 3, 32, 8)
    np.testing.assert_array_equal(units[0, :, 8:16], tensors["pixel_values"][1])
    assert not units[0, :, 16:].any()
    assert host_inputs.max_encoder_len == MAX_IMAGES * 4 * 5


def write_with_bos(path: Path) -> Path:
    """Write a directory whose tokenizer adds BOS, as the published ones do."""
    write_files(path)
    tokenizer = golden_processor("mllama", path=path).info.get_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(path)
    return path


def test_bos_is_where_hfs_processor_and_the_tokenizer_write_it(tmp_path: Path):
    path = write_with_bos(tmp_path)
    call_hf = partial(call_processor, hf_of(MllamaProcessor, MllamaImageProcessorPil, lambda: path))
    processor = golden_processor("mllama", path=path)
    bos = processor.info.get_tokenizer().bos_token_id
    for prompt in (f"{IMAGE}what", f"what {IMAGE} is", f"{BOS}look {IMAGE}", f"{IMAGE}{BOS}what"):
        found = processor.apply(prompt, {"image": draw(60, 50)}).prompt_token_ids
        assert found == call_hf(prompt, [draw(60, 50)], {}).input_ids
        assert (found[0], found.count(bos)) == (bos, 2)
    # Token ids that have it, as a chat template's, are left as they are.
    ids = processor.info.get_tokenizer().encode(f"look {IMAGE}")
    assert processor.apply(ids, {"image": draw(60, 50)}).prompt_token_ids == ids


def test_more_pictures_than_a_step_has_room_for_are_refused():
    images = [draw(40, 30, seed=seed) for seed in range(MAX_IMAGES + 1)]
    with pytest.raises(RequestError, match=f"{MAX_IMAGES}"):
        FAMILIES["mllama"].make_processor().apply(IMAGE * len(images), {"image": images})


def test_hf_shows_pictures_to_tokens_before_the_first():
    """The one departure: with a picture first, HF's class says the same as it is."""
    model = served_model("mllama")
    family = model.family
    as_it_is = family.reference_class(model.config).eval()
    as_it_is.load_state_dict(model.reference.state_dict())
    for parts, is_equal in (
        ((Media(0), Words(1, 6)), True),
        ((Words(1, 6), Media(0), Words(2, 3)), False),
    ):
        sample = model.draw_sample(parts)
        module, inputs = family.torch_call(as_it_is, sample)
        theirs = run_reference(module, inputs, model.rules)[LOGITS]
        ours = model.paged.run(sample)[LOGITS]
        assert np.allclose(ours, theirs, rtol=0, atol=1e-4) == is_equal
