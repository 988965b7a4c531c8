"""The page's files: small, open, from here alone, under a strict policy."""

import re
from posixpath import dirname, normpath

import pytest

from mmjax.server.pages import PAGE_FILES
from tests.server.conftest import MakeServer, Server


def test_the_page_is_small_and_whole(server: Server) -> None:
    assert sum(map(len, PAGE_FILES.values())) < 150_000
    for path, content in PAGE_FILES.items():
        response = server.http.get(path)
        assert response.status_code == 200
        assert response.content == content
    assert server.http.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert server.http.get("/page/app.js").headers["content-type"].startswith("text/javascript")


def test_nothing_comes_from_outside_or_stands_inline(server: Server) -> None:
    policy = server.http.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    html = PAGE_FILES["/"].decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    for path, content in PAGE_FILES.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://\w", text), path
        # Text of a model, or of a user, is never parsed as HTML or code.
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), (
            path
        )


def test_every_file_that_the_page_asks_for_is_there() -> None:
    for path, content in PAGE_FILES.items():
        text = content.decode()
        found = re.findall(r'(?:src|href)="(page/[^"]+)"', text)
        imported = re.findall(r'from "(\.[^"]+)"', text)
        found += [normpath(f"page/{dirname(path[6:])}/{name}") for name in imported]
        assert found or path not in ("/", "/page/app.js")
        assert all(f"/{name}" in PAGE_FILES for name in found), path


def test_a_known_page_is_not_sent_again(server: Server) -> None:
    etag = server.http.get("/page/page.css").headers["etag"]
    again = server.http.get("/page/page.css", headers={"if-none-match": etag})
    assert again.status_code == 304
    assert again.content == b""


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/../app.py", "/page/app.js/"])
def test_other_paths_need_the_key(make_server: MakeServer, path: str) -> None:
    locked = make_server(api_keys=("secret",))
    assert locked.http.get("/").status_code == 200
    assert locked.http.get(path).status_code == 401
