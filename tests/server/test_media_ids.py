"""A client's ids of images: good for its own key and for the content that they came with."""

import json
from typing import Any

import pytest

from tests.server.conftest import MakeServer, Server
from tests.server.test_app import data_url
from tests.server.test_bad_input import error_of

ALICE, BOB = "alices-key", "bobs-key"
PLACE = "messages[0].content[0].uuid"


@pytest.fixture
def locked(make_server: MakeServer) -> Server:
    return make_server(api_keys=(ALICE, BOB))


def ask(
    server: Server, uuid: str | None, seed: int | None = None, *, key: str = "", path: str = ""
) -> Any:
    """Ask about the image `seed`, or, with None, about the one that was sent as `uuid`."""
    url = None if seed is None else {"url": data_url(seed)}
    part = {"type": "image_url", "image_url": url, "uuid": uuid}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "a"}]}]}
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    content = json.dumps(body)  # escaped: a client can write half of a surrogate pair
    return server.http.post(f"/v1/chat/completions{path}", content=content, headers=headers)


def mm_hash_of(server: Server, uuid: str | None, seed: int | None = None, *, key: str = "") -> str:
    response = ask(server, uuid, seed, key=key, path="/render")
    assert response.status_code == 200, response.text
    (item,) = response.json()["items"]
    return item["mm_hash"]


def test_an_id_stands_for_its_image(locked: Server) -> None:
    assert ask(locked, "cat", 1, key=ALICE).status_code == 200
    for _ in range(2):
        assert ask(locked, "cat", key=ALICE).status_code == 200
    assert ask(locked, "cat", 1, key=ALICE).status_code == 200


def test_keys_do_not_see_each_others_ids(locked: Server) -> None:
    assert ask(locked, "mine", 1, key=ALICE).status_code == 200
    error = error_of(ask(locked, "mine", key=BOB))
    assert error["param"] == PLACE
    assert "Cache miss for image at index 0 but data is not provided" in error["message"]
    error_of(ask(locked, "mine", key=BOB, path="/render"))
    assert ask(locked, "mine", 2, key=BOB).status_code == 200
    assert mm_hash_of(locked, "mine", key=ALICE) == mm_hash_of(locked, None, 1, key=ALICE)
    assert mm_hash_of(locked, "mine", key=BOB) == mm_hash_of(locked, None, 2, key=BOB)


def test_another_image_contradicts(locked: Server) -> None:
    assert ask(locked, "dog", 1, key=ALICE).status_code == 200
    for path in ("", "/render"):
        error = error_of(ask(locked, "dog", 2, key=ALICE, path=path), 409)
        assert (error["code"], error["param"]) == ("media_id_conflict", PLACE)
    assert ask(locked, "dog", key=ALICE).status_code == 200


@pytest.mark.parametrize(
    "uuid",
    ["", "x" * 129, "x" * 10**6, "a\0b", "a\r\nb", "\u202etxt", ["x" * 129]],
    ids=lambda value: ascii(value)[:20],
)
@pytest.mark.parametrize("path", ["", "/render"])
def test_ids_are_short_and_printable(server: Server, uuid: Any, path: str) -> None:
    error = error_of(ask(server, uuid, 1, path=path))
    assert error["param"] == PLACE
    assert "128" in error["message"]
    assert len(error["message"]) < 500


def test_any_printable_id_will_do(server: Server) -> None:
    for uuid in ("\N{GRINNING FACE}" * 128, "../../etc/passwd", "%s{0}", "x" * 128):
        assert ask(server, uuid, 1).status_code == 200
        assert ask(server, uuid).status_code == 200


def test_without_keys_all_clients_are_one(server: Server) -> None:
    assert ask(server, "open", 1).status_code == 200
    assert ask(server, "open").status_code == 200
    error_of(ask(server, "open", 2), 409)
    error_of(ask(server, "never sent"))


def test_CVE_2026_111392_a_hash_is_no_id(locked: Server) -> None:
    secret = mm_hash_of(locked, None, 5, key=ALICE)
    assert ask(locked, None, 5, key=ALICE).status_code == 200
    error_of(ask(locked, secret, key=BOB))
    assert mm_hash_of(locked, secret, 6, key=BOB) != secret


def test_an_evicted_image_must_be_sent_again(locked: Server) -> None:
    assert ask(locked, "gone", 7, key=ALICE).status_code == 200
    cache = locked.engine_client.input_processor.cache
    assert cache is not None
    cache.invalidate(mm_hash_of(locked, "gone", 7, key=ALICE))
    assert error_of(ask(locked, "gone", key=ALICE))["param"] == "messages"
    assert ask(locked, "gone", 7, key=ALICE).status_code == 200


def test_trusted_ids_are_everybodys(make_server: MakeServer) -> None:
    server = make_server(api_keys=(ALICE, BOB), trusts_media_ids=True)
    assert ask(server, "logo", 1, key=ALICE).status_code == 200
    assert ask(server, "logo", key=BOB).status_code == 200
    assert mm_hash_of(server, "logo", key=BOB) == "logo"
    assert mm_hash_of(server, "logo", 2, key=BOB) == "logo"
