"""Forms of `multipart/form-data`, as clients send them, and what is none."""

import random

import pytest
from httpx2 import Request

from mmjax.errors import RequestError
from mmjax.server.openai.transcripts.form import MAX_FIELD_BYTES, MAX_FORM_PARTS, parse_form

FORM = 'multipart/form-data; boundary="mark"'


def write_part(name: str, content: bytes, more: str = "") -> bytes:
    head = f'--mark\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def test_a_form_of_httpx_is_read():
    file = bytes(range(256)) * 40 + b"\r\n--\r\n\r\n--mark"
    request = Request(
        "POST",
        "http://here",
        data={"model": "tiny", "timestamp_granularities[]": ["segment", "word"], "ü": "ö"},
        files={"file": ("a clip.wav", file, "audio/wav")},
    )
    form = parse_form(request.read(), request.headers["content-type"])
    assert form.files == {"file": file}
    assert form.fields["model"] == ["tiny"]
    assert form.fields["timestamp_granularities[]"] == ["segment", "word"]
    assert list(form.fields.values())[-1] == ["ö"]


def test_a_preamble_and_an_end():
    body = b"preamble\r\n" + write_part("a", b"1") + write_part("a", b"") + b"--mark--\r\nend"
    assert parse_form(body, FORM).fields == {"a": ["1", ""]}
    assert parse_form(b"--mark--", FORM).fields == {}


WHOLE = write_part("a", b"1") + write_part("f", b"\r\n\r\n", '; filename="x"') + b"--mark--\r\n"
REFUSED = {
    "json": (b"{}", "application/json", "must be a form"),
    "no boundary": (WHOLE, "multipart/form-data", "must be a form"),
    "a long boundary": (WHOLE, f"multipart/form-data; boundary={'b' * 71}", "must be a form"),
    "empty": (b"", FORM, "cut off"),
    "no end": (WHOLE[:-10], FORM, "cut off"),
    "another boundary": (WHOLE, "multipart/form-data; boundary=other", "cut off"),
    "within a line": (b"x" + WHOLE, FORM, "cut off"),
    "no header": (b"--mark\r\n1\r\n--mark--", FORM, "cut off"),
    "a long header": (write_part("a" * 5000, b"1") + b"--mark--", FORM, "cut off"),
    "no name": (write_part("", b"1") + b"--mark--", FORM, "no `Content-Disposition"),
    "many parts": (write_part("a", b"") * (MAX_FORM_PARTS + 1) + b"--mark--", FORM, "more than 64"),
    "a long field": (
        write_part("prompt", b"x" * (MAX_FIELD_BYTES + 1)) + b"--mark--",
        FORM,
        "`prompt` has 65537 bytes",
    ),
    "two files": (
        write_part("f", b"1", '; filename="x"') * 2 + b"--mark--",
        FORM,
        "two files `f`",
    ),
    "no UTF-8": (write_part("a", b"\xff") + b"--mark--", FORM, "`a` is not UTF-8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_form_is_refused(name: str):
    body, content_type, message = REFUSED[name]
    with pytest.raises(RequestError, match=message):
        parse_form(body, content_type)


def test_no_bytes_raise_anything_else():
    generator = random.Random(0)
    for _ in range(3000):
        body = bytearray(WHOLE)
        for _ in range(generator.randrange(1, 6)):
            place = generator.randrange(len(body))
            body[place : place + generator.randrange(3)] = generator.randbytes(
                generator.randrange(4)
            )
        try:
            parse_form(body, FORM)
        except RequestError:
            continue
