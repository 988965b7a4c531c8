"""Qwen2-VL beyond the laws: positions of three axes, embeddings in place of items, refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmjax.config.engine_config import MultiModalConfig
from mmjax.engine.core import EngineCore
from mmjax.errors import RequestError
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import generate_reference
from tests.engine.tiny import answer_all
from tests.families import served_model
from tests.families.qwen2_vl import CLASSES, Grid, draw_grid
from tests.families.tiny import DrawnItem, Media, Part, Words
from tests.models.served import make_request, start_engine

SIZED: dict[Media, tuple[Grid, float]] = {
    Media(0): ((1, 6, 10), 0.0),
    Media(1): ((1, 8, 2), 0.0),
    Media(2): ((1, 2, 2), 0.0),
    Media(3): ((1, 4, 12), 0.0),
    Media(4): ((1, 2, 6), 0.0),
    Media(0, "video"): ((2, 8, 4), 0.0),
    Media(1, "video"): ((9, 2, 4), 0.3),
    Media(2, "video"): ((5, 4, 2), 1.25),
}
"""Grids, and seconds for each frame."""


def draw_sized(config: Any, media: Media) -> DrawnItem:
    return draw_grid(config, media.modality, media.seed, *SIZED[media])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "parts",
    [
        [Words(0, 9), Media(0), Words(1, 5), Media(1), Words(2, 7)],
        [Media(2), Words(0, 1)],
        [Words(0, 3), Media(0, "video"), Words(1, 2), Media(3), Words(2, 1), Media(4), Words(3, 4)],
        [Words(0, 3), Media(1, "video"), Words(1, 2), Media(2, "video"), Words(2, 4)],
    ],
)
def test_positions_are_hfs(kind: str, parts: list[Part]):
    model = served_model(kind)
    sample = replace(model.family, draw_item=draw_sized).draw_sample(model.config, parts)
    inputs = model.family.torch_inputs(model.reference, sample)
    given = {name: value for name, value in inputs.items() if name.endswith(("_thw", "_ts"))}
    expected, _ = model.reference.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], **given
    )
    found = model.paged.host_inputs.rotary_positions(sample.num_tokens, sample.items)
    assert found is not None
    np.testing.assert_array_equal(found.prompt, expected[:, 0].numpy())
    # As `generate` goes on: one behind the last token of text.
    assert found.offset == int(expected[0, 0, -1]) + 1 - sample.num_tokens
    assert found.prompt.dtype == np.int32


def test_text_alone_is_at_its_indices():
    assert served_model("qwen2_vl").paged.host_inputs.rotary_positions(7, []) is None


# ---- the engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core() -> EngineCore:
    # Room to find both items' embeddings there, after they were served.
    sizes = {"encoder_cache_size": 64, "max_num_encoder_input_tokens": 64}
    mm = MultiModalConfig(enable_mm_embeds=True)
    return start_engine(served_model("qwen2_vl"), mm=mm, **sizes)


@pytest.fixture(scope="module")
def sample() -> Sample:
    parts = [Words(0, 5), Media(0), Words(1, 1), Media(0, "video"), Words(2, 6)]
    return served_model("qwen2_vl").draw_sample(parts)


def test_embeddings_stand_in_for_images_and_videos(core: EngineCore, sample: Sample):
    request = make_request("pixels", sample)
    answers = answer_all(core, [request])
    model = served_model("qwen2_vl")
    hf = model.family.torch_call(model.reference, sample)
    assert answers == [list(generate_reference(*hf, 8))]
    rows = [
        np.asarray(core._runner._pool)[core._runner.rows.get(feature.identifier)]
        for feature in request.mm_features
    ]
    tensors = [
        {"image_embeds": rows[0], "image_grid_thw": np.array([1, 6, 10])},
        {"video_embeds": rows[1], "video_grid_thw": np.array([3, 4, 6])},
    ]
    assert answer_all(core, [make_request("embeddings", sample, tensors=tensors)]) == answers
    assert core.compilations == 0
    # A grid of as many embeddings, but no whole ones: positions would not be the prompt's.
    tensors[0]["image_grid_thw"] = np.array([1, 5, 12])
    with pytest.raises(RequestError, match="grid has 12 embeddings, and the prompt placeholders"):
        core.add_request(make_request("wrong grid", sample, tensors=tensors))


def test_an_item_whose_patches_are_not_its_grids_is_refused(core: EngineCore, sample: Sample):
    image, video = (item.tensors for item in sample.items)
    tensors = [{**image, "image_grid_thw": np.array([1, 4, 4])}, video]
    with pytest.raises(RequestError, match="all must have as many"):
        core.add_request(make_request("bad", sample, tensors=tensors))
