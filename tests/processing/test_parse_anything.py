"""Whatever is sent, the parser returns items or a RequestError, and nothing else."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from mmjax.errors import RequestError
from mmjax.processing import MediaLimits, MediaWithBytes, MultiModalDataParser
from tests.kit import draw
from tests.processing.test_embeddings import GridParser
from tests.processing.test_media import encode

PARSERS = (
    MultiModalDataParser(),
    GridParser(expected_hidden_size=2, allow_missing_mm_embeddings=True),
    MultiModalDataParser(
        target_sr=8, target_channels=1, video_needs_metadata=True, expected_hidden_size=3
    ),
    MultiModalDataParser(
        limits=MediaLimits(max_image_pixels=4, max_video_pixels=8, max_audio_samples=4)
    ),
)
ARRAYS = st.sampled_from("fdebBiQ?cOUmM").flatmap(
    lambda kind: arrays(kind, array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=4))
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70_000),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    ARRAYS,
    ARRAYS.filter(lambda array: array.dtype.kind in "f").map(torch.from_numpy),
    ARRAYS.filter(lambda array: array.dtype.char in "fe").map(jnp.asarray),
    st.sampled_from([draw(3, 2), Image.new("P", (2, 2)), encode(draw(2, 2)), object(), {1: 2}]),
)
KEYS = st.sampled_from("image_embeds image_grid_thw type image video_chunk fps".split())
DATA = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        inner.map(lambda media: MediaWithBytes(media, b"file")),
    ),
    max_leaves=8,
)


def use(items: Any) -> None:
    """Ask of items what processing asks."""
    for index in range(len(items)):
        items.get_item_for_hash(index)
    items.select(range(len(items)))
    items.get_passthrough_data()
    items.get_processor_data()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PARSERS), st.sampled_from(["image", "video", "audio", "vision_chunk"]), DATA)
@example(PARSERS[0], "vision_chunk", {"type": np.zeros(0, np.float32), 5: None})
def test_items_or_a_request_error(parser: MultiModalDataParser, modality: str, data: Any):
    error = None
    try:
        parser.count_entries(modality, data)
        for items in parser.parse_mm_data({modality: data}).values():
            use(items)
    except RequestError as raised:
        error = raised
    assert error is None or error.param is not None
