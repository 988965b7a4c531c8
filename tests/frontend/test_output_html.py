"""A notebook shows an output's pictures and answers, and nothing of them as markup."""

import base64
import io
import re

import numpy as np
from PIL import Image

from mmjax.frontend.output.outputs import CompletionOutput, RequestOutput
from mmjax.processing.items.items import ImageProcessorItems, MultiModalDataItems
from mmjax.processing.media.decode import MediaLimits
from mmjax.processing.media.encoded import EncodedImage
from tests.kit import draw


def make(*images: object, text: str = "red") -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt="<bos>what?",
        prompt_token_ids=[1, 2, 3],
        outputs=[CompletionOutput(index=0, text=text, token_ids=[4, 5], finish_reason="stop")],
        finished=True,
        mm_items=MultiModalDataItems(image=ImageProcessorItems(images)) if images else None,
    )


def pictures(html: str) -> list[Image.Image]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]


def test_it_shows_the_picture_and_the_answer() -> None:
    buffer = io.BytesIO()
    draw(640, 480, 1).save(buffer, "PNG")
    encoded = EncodedImage(buffer.getvalue(), MediaLimits())
    html = make(draw(30, 20, 2), encoded)._repr_html_()
    assert [image.size for image in pictures(html)] == [(30, 20), (320, 240)]
    assert ">red</div>" in html
    assert "2 tokens, stop" in html
    assert encoded.num_bytes_to_decode > 0, "its pixels are not kept"


def test_text_is_text() -> None:
    html = make(text="<script>alert(1)</script>")._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "&lt;bos&gt;what?" in html


def test_boxes_are_drawn_on_the_picture() -> None:
    plain = make(Image.new("RGB", (60, 60), "white"))
    (before,) = pictures(plain._repr_html_())
    plain.outputs[0].parsed = {"<OD>": {"bboxes": [[10, 10, 40, 40]], "labels": ["a"]}}
    (after,) = pictures(plain._repr_html_())
    assert np.asarray(before.convert("RGB")).min() == 255
    assert np.asarray(after.convert("RGB")).min() < 255


def test_what_cannot_be_shown_is_said() -> None:
    html = make(None, *(draw(4, 4, i) for i in range(9)))._repr_html_()
    assert "picture 0 is not to be shown" in html
    assert len(pictures(html)) == 7
    assert "and 2 more pictures" in html


def test_an_output_without_pictures() -> None:
    html = make()._repr_html_()
    assert "<img" not in html
    assert "red" in html
