"""Whatever bytes come as embeddings: an array, or an error that names the field."""

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from mmjax.errors import RequestError, RequestValueError
from mmjax.processing import MediaLimits
from mmjax.processing.media.embeds import decode_embeds

LIMITS = MediaLimits(max_image_bytes=1000)
GOOD = save({"rows": np.ones((2, 8), np.float32)})


def decode(data: bytes) -> Any:
    return decode_embeds(base64.b64encode(data).decode(), LIMITS, param="here")


def test_a_file_is_read_as_it_is():
    rows = np.arange(12, dtype=np.float16).reshape(3, 4)
    np.testing.assert_array_equal(decode(save({"any name": rows})), rows, strict=True)


@given(st.data())
def test_damaged_files_are_refused_by_name(data: st.DataObject):
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(GOOD) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(GOOD)))
    for file in (bytes(damaged), bytes(damaged[:end])):
        error = None
        try:
            assert decode(file).ndim in (2, 3)
        except RequestError as caught:
            error = caught
        assert error is None or (error.param == "here" and error.status in (400, 422))


@given(st.text(max_size=200))
def test_other_texts_are_refused_by_name(text: str):
    with pytest.raises(RequestError, match="here"):
        decode_embeds(text, LIMITS, param="here")


def test_the_limit_is_of_bytes():
    assert decode_embeds(base64.b64encode(GOOD).decode(), LIMITS, param="here").shape == (2, 8)
    with pytest.raises(RequestValueError, match=r"about 1200 bytes, at most 1000 are accepted"):
        decode_embeds("A" * 1600, LIMITS, param="here")
