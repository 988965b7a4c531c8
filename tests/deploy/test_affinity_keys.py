"""What of a request says where it belongs."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.deploy.affinity import MAX_KEYS, affinity_keys, session_key


def keys_of(body: Any, **headers: str) -> list[str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return affinity_keys(named, json.dumps(body).encode())


def picture(data: bytes, **part: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}, **part}


def chat(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], **fields}


def test_a_session_comes_before_pictures_and_these_before_the_user() -> None:
    body = chat(picture(b"1"), user="u", prompt_cache_key="p", session_id="s")
    kinds = [key.split()[0] for key in keys_of(body, x_session_id="h")]
    assert kinds == ["session", "session", "session", "picture", "opening", "user"]
    assert keys_of(body, x_session_id="h")[:3] == ["session h", "session p", "session s"]


def test_a_header_and_a_field_of_one_name_are_one_key() -> None:
    assert keys_of({"session_id": "s"}, x_session_id="s") == ["session s"]


def test_pictures_that_differ_in_their_last_byte_have_two_keys() -> None:
    """A hash of only the first MiB would put all pictures of one camera on one replica."""
    start = bytes(2 * 2**20)
    first, second = (keys_of(chat(picture(start + end)))[0] for end in (b"1", b"2"))
    assert first.startswith("picture ")
    assert first != second
    assert first == keys_of(chat({"type": "text", "text": "?"}, picture(start + b"1")))[0]


def test_an_id_is_a_key_with_and_without_its_picture() -> None:
    assert keys_of(chat(picture(b"1", uuid="cat")))[0] == "uuid cat"
    assert keys_of(chat({"type": "image_url", "image_url": None, "uuid": "cat"}))[0] == "uuid cat"


def test_a_picture_of_a_response_has_the_key_that_it_has_in_a_chat() -> None:
    url = picture(b"1")["image_url"]["url"]
    part = {"type": "input_image", "image_url": url}
    response = {"input": [{"role": "user", "content": [part]}]}
    assert keys_of(response)[0] == keys_of(chat(picture(b"1")))[0]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "video_url", "video_url": None, "uuid": "film"},
    ],
)
def test_videos_and_embeddings_are_keys_as_pictures_are(part: dict[str, Any]) -> None:
    kind, _ = keys_of(chat({"type": "text", "text": "?"}, part))[0].split()
    assert kind == ("uuid" if "uuid" in part else "picture")
    assert keys_of(chat(part))[0] == keys_of(chat({"type": "text", "text": "?"}, part))[0]


def test_the_turns_of_a_conversation_share_a_key() -> None:
    first = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]
    answer = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    assert keys_of({"messages": first}) == keys_of({"messages": first + answer})
    assert keys_of({"messages": first}) != keys_of({"messages": first[1:]})
    assert keys_of({"prompt": "hello"}) == keys_of({"input": "hello"})


def test_long_names_are_digested() -> None:
    (key,) = keys_of({"user": "x" * 10_000})
    assert len(key) < 100
    (key,) = keys_of({}, x_session_id="x" * 10_000)
    assert key == session_key("x" * 10_000)
    assert len(key) < 100


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"messages": 1}', b"\xff", b"[" * 100_000]
)
def test_what_cannot_be_read_has_no_key(body: bytes) -> None:
    assert affinity_keys({}, body) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "content", "type", "image_url", "url", "uuid", "role", "input"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["messages", "input", "prompt", "user"]), JSON))
def test_no_body_is_too_strange(body: dict[str, Any]) -> None:
    keys = keys_of(body)
    assert len(keys) <= MAX_KEYS
    assert len(set(keys)) == len(keys)
