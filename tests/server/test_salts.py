"""Callers with keys of their own share no cache: a hit would tell one what another has asked."""

from typing import Any

import pytest

from mmjax.transport.messages import EngineCoreRequest
from tests.server.conftest import MakeServer, Server
from tests.server.test_media_ids import ALICE, BOB, mm_hash_of


def salt_of(server: Server, monkeypatch: Any, key: str, **fields: Any) -> str | None:
    """Return the salt that a request of `key` reaches the engine with."""
    seen: list[EngineCoreRequest] = []
    engine = server.supervisor.engine
    add = engine.add_request
    with monkeypatch.context() as patch:
        patch.setattr(engine, "add_request", lambda message: (seen.append(message), add(message)))
        messages = [{"role": "user", "content": "a red circle"}]
        headers = {"authorization": f"Bearer {key}"}
        path = "/v1/chat/completions"
        answer = server.http.post(path, json={"messages": messages, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    (message,) = seen
    return message.cache_salt


def test_CVE_2025_46570_every_key_has_its_own(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(api_keys=(ALICE, BOB))
    alices, bobs = (salt_of(server, monkeypatch, key) for key in (ALICE, BOB))
    assert alices
    assert bobs
    assert alices != bobs
    assert salt_of(server, monkeypatch, ALICE) == alices
    assert ALICE not in alices


def test_a_salt_that_is_given_counts(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So callers who know a secret can share, and one caller can keep conversations apart."""
    server = make_server(api_keys=(ALICE, BOB))
    salts = {salt_of(server, monkeypatch, key, cache_salt="ours") for key in (ALICE, BOB)}
    assert salts == {"ours"}


@pytest.mark.parametrize("config", [{"api_keys": (ALICE,)}, {}])
def test_who_is_alone_needs_none(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    assert salt_of(make_server(**config), monkeypatch, ALICE) is None


def test_CVE_2025_46570_equal_images_of_two_keys_are_two_items(make_server: MakeServer) -> None:
    """So the caches of processed images and of the tower's outputs keep them apart as well."""
    server = make_server(api_keys=(ALICE, BOB))
    hashes = [mm_hash_of(server, None, 1, key=key) for key in (ALICE, BOB, ALICE)]
    assert hashes[0] == hashes[2]
    assert hashes[0] != hashes[1]
    open_server = make_server()
    assert mm_hash_of(open_server, None, 1) not in hashes
