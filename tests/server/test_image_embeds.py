"""`image_embeds` parts over HTTP: what is wrong with one is told with its place."""

import base64
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from tests.server.conftest import MakeServer, Server

WIDTH, ROWS = 32, 4
PLACE = "messages[0].content[0].image_embeds"


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server(enables_mm_embeds=True)


def ask(server: Server, value: Any, **more: Any) -> Any:
    part = {"type": "image_embeds", "image_embeds": value, **more}
    content = [part, {"type": "text", "text": "What is it?"}]
    return server.chat(messages=[{"role": "user", "content": content}], max_tokens=2)


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_of(*shape: int, dtype: Any = np.float32, value: float = 0.5) -> bytes:
    return save({"rows": np.full(shape, value, dtype)})


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (1, ROWS, WIDTH)])
def test_a_tensor_is_taken(server: Server, dtype: Any, shape: tuple[int, ...]):
    answer = ask(server, encode(file_of(*shape, dtype=dtype)))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == ROWS


ENTRY = {"dtype": "F32", "shape": [ROWS, WIDTH], "data_offsets": [0, 4 * ROWS * WIDTH]}
HUGE = {"dtype": "F32", "data_offsets": [0, 0]}
BYTES = bytes(4 * ROWS * WIDTH)


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (file_of(3, WIDTH), 400, "have 3 rows; an image has 4"),
        (file_of(8, WIDTH), 400, "have 8 rows; an image has 4"),
        (file_of(0, WIDTH), 400, "of shape [0, 32], of 2 axes; send [rows, width]"),
        (file_of(*[1] * 32), 400, "of 32 axes; send [rows, width]"),
        (
            with_header({"a": {**HUGE, "shape": [1] * 3000, "data_offsets": [0, 4]}}, bytes(4)),
            400,
            "of 3000 axes",
        ),
        (with_header({"a": {**HUGE, "shape": [2**63, 0]}}), 400, "send [rows, width]"),
        (file_of(ROWS, 31), 400, "got 31, the model has 32"),
        (file_of(WIDTH), 400, "of shape [32], of 1 axes"),
        (file_of(2, ROWS, WIDTH), 400, "must be 2D"),
        (file_of(ROWS, WIDTH, value=np.nan), 400, "NaN or infinite"),
        (file_of(ROWS, WIDTH, value=np.inf), 400, "NaN or infinite"),
        (file_of(ROWS, WIDTH, dtype=np.float64), 400, "dtype F64; send one of F32, BF16, F16"),
        (file_of(ROWS, WIDTH, dtype=np.int64), 400, "dtype I64"),
        (save({"a": np.zeros(1), "b": np.zeros(1)}), 400, "of 2 tensors; send one"),
        (save({}), 400, "of 0 tensors; send one"),
        (b"", 422, "ends within its header"),
        (b"\x00" * 7, 422, "ends within its header"),
        (b"\x80\x02}q\x00.", 422, "no safetensors file"),
        (b"\xff" * 64, 422, "ends within its header"),
        (with_header(b" " * 20_000), 422, "header has more than 16384 bytes"),
        (with_header(b"not json"), 422, "no safetensors file"),
        (with_header([]), 422, "no safetensors file"),
        (with_header({"a": ENTRY}, BYTES[:-4]), 422, "no safetensors file"),
        (with_header({"a": ENTRY}, BYTES + b"more"), 422, "no safetensors file"),
        (with_header({"a": {**ENTRY, "shape": [2**40, 2**40]}}, BYTES), 422, "no safetensors"),
        (with_header({"a": {**ENTRY, "shape": [-1, WIDTH]}}, BYTES), 422, "no safetensors"),
        (with_header({"a": {**ENTRY, "data_offsets": [4, 0]}}, BYTES), 422, "no safetensors"),
        (with_header({"a": {**ENTRY, "dtype": "pickle"}}, BYTES), 422, "no safetensors"),
    ],
)
def test_CVE_2025_62372_what_is_wrong_is_named(
    server: Server, data: bytes, status: int, words: str
):
    answer = ask(server, encode(data))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, PLACE), error
    assert words in error["message"]
    assert ask(server, encode(file_of(ROWS, WIDTH))).status_code == 200


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        ("not base64!", 422, "invalid base64"),
        ("data:application/octet-stream;base64,AAAA", 422, "invalid base64"),
        (None, 400, "must be a safetensors file in base64, not NoneType"),
        ([1.0, 2.0], 400, "must be a safetensors file in base64, not list"),
        ({"image_embeds": "AAAA"}, 400, "not dict"),
        (7, 400, "not int"),
    ],
)
def test_CVE_2025_62164_only_base64_is_read(server: Server, value: Any, status: int, words: str):
    answer = ask(server, value)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, PLACE), error
    assert words in error["message"]


def test_bytes_are_limited_before_they_are_decoded(make_server: MakeServer):
    server = make_server(enables_mm_embeds=True, max_image_bytes=4096)
    assert ask(server, encode(file_of(ROWS, WIDTH))).status_code == 200
    answer = ask(server, "*" * 6000)  # no base64: nobody has looked
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, PLACE)
    assert "about 4500 bytes, at most 4096 are accepted" in error["message"]


def test_the_flag_is_named_where_it_is_off(make_server: MakeServer):
    answer = ask(make_server(), encode(file_of(ROWS, WIDTH)))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[0].type")
    assert "--enable-mm-embeds" in error["message"]


def test_unknown_fields_are_refused(server: Server):
    answer = ask(server, encode(file_of(ROWS, WIDTH)), dtype="float32")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].dtype"


def test_a_claimed_id_comes_again_without_its_rows(server: Server):
    for value in (encode(file_of(ROWS, WIDTH)), None):
        answer = ask(server, value, uuid="mine")
        assert answer.status_code == 200, answer.text
    other = ask(server, encode(file_of(ROWS, WIDTH, value=0.25)), uuid="mine")
    assert other.status_code == 409
    assert ask(server, None, uuid="nobody's").status_code == 400
