"""With a key set, every route is closed but four and the page; without one, all are open."""

from collections.abc import Iterator

import pytest
from starlette.routing import Route

from mmjax.server.pages import PAGE_FILES
from tests.server.conftest import MakeServer, Server

OPEN = {"/health", "/ready", "/ping", "/version", *PAGE_FILES}


@pytest.fixture
def locked(make_server: MakeServer) -> Server:
    return make_server(api_keys=("first", "second"))


def routes_of(server: Server) -> Iterator[tuple[str, str]]:
    for route in server.app.routes:
        assert isinstance(route, Route) or hasattr(route, "methods"), route
        for method in route.methods or ():  # type: ignore[attr-defined]
            yield method, route.path.replace("{name:path}", "tiny")  # type: ignore[attr-defined]


def test_open_routes_every_route_but_four_needs_the_key(locked: Server) -> None:
    seen = set()
    for method, path in routes_of(locked):
        seen.add(path)
        status = locked.http.request(method, path).status_code
        if path in OPEN:
            assert status == 200
        else:
            assert status == 401, (method, path)
    assert seen >= OPEN | {"/v1/chat/completions", "/v1/completions", "/v1/models"}


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/v1/models/",
        "http://testserver//v1/models",
        "/%2fv1/models",
        "/health/",
        "/health/../v1/models",
        "http://testserver//health",
        "/health%2f..%2fv1/models",
        "/HEALTH",
        "/no/such/route",
        "/health;/v1/models",
    ],
)
def test_CVE_2026_48746_tricks_with_the_path(locked: Server, path: str) -> None:
    response = locked.http.get(path, headers={"host": "testserver/health"}, follow_redirects=False)
    assert response.status_code == 401


@pytest.mark.parametrize(
    "value",
    ["", "first", "Basic first", "Bearer", "Bearer third", "Bearer first second", "Bearer FIRST"],
)
def test_CVE_2025_59425_wrong_keys(locked: Server, value: str) -> None:
    response = locked.http.get("/v1/models", headers={"authorization": value})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["code"] == "invalid_api_key"
    assert error["type"] == "authentication_error"


@pytest.mark.parametrize("value", ["Bearer first", "Bearer second", "bearer first"])
def test_right_keys(locked: Server, value: str) -> None:
    assert locked.http.get("/v1/models", headers={"authorization": value}).status_code == 200


def test_two_headers_are_one_too_many(locked: Server) -> None:
    headers = [("authorization", "Bearer first"), ("authorization", "Bearer third")]
    assert locked.http.get("/v1/models", headers=headers).status_code == 401


def test_the_official_client_bears_it(locked: Server) -> None:
    assert locked.openai("second").models.list().data[0].id == "tiny"


def test_a_proxys_prefix(make_server: MakeServer) -> None:
    server = make_server(api_keys=("k",))
    for path in ("/api/v1/models", "/api/health/x", "/apihealth"):
        assert server.http.get(path).status_code == 401


def test_without_keys_all_is_open(server: Server) -> None:
    assert server.http.get("/v1/models").status_code == 200


def test_log_injection_no_origin_is_allowed_by_default(make_server: MakeServer) -> None:
    headers = {"origin": "https://example.com", "access-control-request-method": "POST"}
    plain = make_server().http.options("/v1/chat/completions", headers=headers)
    assert "access-control-allow-origin" not in plain.headers
    allowing = make_server(allowed_origins=("https://example.com",), api_keys=("k",))
    answer = allowing.http.options("/v1/chat/completions", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://example.com"
    other = {**headers, "origin": "https://evil.example"}
    refused = allowing.http.options("/v1/chat/completions", headers=other)
    assert "access-control-allow-origin" not in refused.headers
