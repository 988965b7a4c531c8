"""What a cache knows a picture by, and who may ask for it."""

import random
import string
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmjax.cache.kv.block_hash import BlockHash
from mmjax.config.engine_config import MultiModalConfig
from mmjax.processing.hashing.hasher import MultiModalHasher
from mmjax.processing.media.encoded import EncodedImage, PixelRange
from mmjax.transport.messages import EngineCoreRequest
from tests.kit import draw
from tests.processing.test_media import LIMITS, encode
from tests.server.conftest import MakeServer, Server
from tests.server.test_app import image_message
from tests.server.test_bad_input import SECRETS, error_of


def hash_of(item: Any) -> str:
    return MultiModalHasher().hash_kwargs(image=item)


def paletted(colors: list[int]) -> Image.Image:
    image = Image.new("P", (4, 4))
    image.putpalette(colors)
    return image


def test_CVE_2025_46722_pictures_that_share_bytes_are_known_apart() -> None:
    flat = np.arange(90, dtype=np.uint8)
    grey = np.zeros((6, 4), np.uint8)
    items: list[Any] = [
        Image.fromarray(flat.reshape(3, 30)),
        Image.fromarray(flat.reshape(30, 3)),
        Image.fromarray(flat.reshape(5, 6, 3)),
        Image.fromarray(flat.reshape(6, 5, 3)),
        Image.fromarray(flat.reshape(6, 5, 3)[..., ::-1].copy()),
        paletted([255, 0, 0]),
        paletted([0, 255, 0]),
        Image.new("L", (4, 4)),
        Image.new("RGB", (4, 4)),
        Image.new("RGBA", (4, 4)),
        flat,
        flat.view(np.int8),
        flat.reshape(9, 10),
        flat.reshape(10, 9),
        flat.reshape(9, 10).T,
        [flat[:40], flat[40:]],
        [flat[:50], flat[50:]],
        grey,
        grey.astype(np.uint16)[:, :2],
        b"ab",
        [b"a", b"b"],
        "ab",
    ]
    assert len({hash_of(item) for item in items}) == len(items)


def test_CVE_2025_46722_what_a_file_is_scaled_to_is_part_of_its_name() -> None:
    data = encode(draw(40, 30))
    ranges = [None, PixelRange(most=100), PixelRange(most=101), PixelRange(least=100_000)]
    images = [EncodedImage(data, LIMITS, pixel_range=one) for one in ranges]
    assert len({hash_of(image) for image in images}) == len(ranges)


def test_CVE_2025_25183_keys_are_long_and_cryptographic(server: Server) -> None:
    assert BlockHash is bytes
    assert MultiModalConfig().mm_hasher_algorithm in ("blake3", "sha256", "sha512")
    body = {"messages": [image_message()]}
    (item,) = server.http.post("/v1/chat/completions/render", json=body).json()["items"]
    assert len(item["mm_hash"]) * 4 >= 128
    assert hash_of(1) != hash_of(1.0) != hash_of(True)


@pytest.mark.parametrize("field", ["cache_salt", "uuid"])
def test_CVE_2026_105756_salts_and_ids_of_any_length_and_character(
    server: Server, field: str
) -> None:
    rng = random.Random(5)
    texts = ["", "a", "a" * 128, "a" * 129, "a" * 10**6, "\x00", "a\nb", "\x7f", "é", "🙂" * 128]
    texts += ["".join(rng.choices(string.printable, k=rng.randrange(300))) for _ in range(30)]
    for text in texts:
        message = image_message()
        fields: dict[str, Any] = {"messages": [message]}
        if field == "uuid":
            message["content"][0]["uuid"] = text
        else:
            fields["cache_salt"] = text
        response = server.chat(**fields)
        is_sane = 0 < len(text) <= 128 and text.isprintable()
        assert response.status_code == (200 if is_sane else 400), ascii(text)
        assert not SECRETS.search(response.text)
        if not is_sane:
            assert error_of(response)["param"].endswith(field)
    assert server.chat().status_code == 200


def test_CVE_2026_112266_a_clients_request_id_is_a_label_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineCoreRequest] = []
    engine = server.supervisor.engine
    add = engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda message: (seen.append(message), add(message)))
    for _ in range(2):
        response = server.http.post(
            "/v1/completions",
            json={"prompt": "a", "request_id": "a"},
            headers={"x-request-id": "a"},
        )
        assert response.status_code == 200
    ids = [message.request_id for message in seen]
    assert len(set(ids)) == 2
    assert all(len(request_id) > 32 and request_id != "a" for request_id in ids)


def test_CVE_2026_111392_and_CVE_2026_115912_no_field_takes_a_key_or_a_handle(
    make_server: MakeServer,
) -> None:
    server = make_server(trusts_media_ids=True)
    names = ("mm_hash", "mm_hashes", "mm_features", "mm_placeholders", "handle", "shared_item")
    for name in names:
        error = error_of(server.chat(**{name: {"name": "x", "offset": 0}}))
        assert error["param"] == name
        part = {"type": "image_url", "image_url": {"url": "x"}, name: "x"}
        error = error_of(server.chat(messages=[{"role": "user", "content": [part]}]))
        assert error["param"] == f"messages[0].content[0].{name}"


def test_CVE_2026_105754_no_route_takes_processed_inputs(server: Server) -> None:
    for path in ("/inference/v1/generate", "/generate", "/v1/generate", "/invocations"):
        assert server.http.post(path, json={}).status_code == 404
    # A route of ours by vLLM's name, of prompts as any other: processed inputs are no field of it.
    answer = server.http.post("/pooling", json={"input": "x", "mm_features": []})
    assert error_of(answer)["param"] == "mm_features"
