"""Media behind URLs: no address, no file and no byte beyond what is allowed."""

import ast
import asyncio
import base64
import gzip
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import CapacityError, MediaError, RequestError, RequestValueError
from mmjax.frontend.media.connector import MediaConnector, PendingMedia
from mmjax.frontend.media.http import MAX_REDIRECTS, is_public_address
from mmjax.frontend.media.urls import HttpUrl, parse_http_url
from tests.kit import draw
from tests.processing.test_media import encode
from tests.server.conftest import MakeServer
from tests.server.test_bad_input import error_of
from tests.threats.network import (
    OTHER_PUBLIC,
    PUBLIC,
    Network,
    answer,
    connected,
    fetch,
    fetch_each,
    redirect,
    traps,
)

ROOT = Path(__file__).parents[2]
PLACE = "messages[0].content[0].image_url.url"
PICTURE = encode(draw(16, 12))
SITE = {"site.example": [[PUBLIC]]}

PRIVATE_HOSTS = [
    "127.0.0.1",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "0x7f.1",
    "0",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "100.100.100.200",
    "169.254.169.254",
    "168.63.129.16",
    "192.0.0.192",
    "198.18.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b:1::a9fe:a9fe]",
    "[2002:7f00:1::]",
    "[2001:0:5ef5:79fb::]",
    "[2606::5efe:7f00:1]",
    "[fe80::1]",
    "[fc00::1]",
    "[fd00:ec2::254]",
    "[ff02::1]",
    "[2001:db8::1]",
    "localhost",
    "metadata.google.internal",
]


def network(site: Any = None, names: Any = None) -> Network:
    """Return a network whose site answers everything with a picture, unless told otherwise."""
    return Network(
        names=SITE if names is None else names, site=site or (lambda head: [PICTURE_200])
    )


PICTURE_200 = answer(PICTURE, Content_Type="text/html")


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_CVE_2025_6242_and_CVE_2026_33626_no_private_host_is_dialled(
    host: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"localhost": [["127.0.0.1", "::1"]], "metadata.google.internal": [["169.254.169.254"]]}
    net = network(names=names)
    with traps() as listening:
        for trap in listening:
            with pytest.raises(RequestValueError) as caught:
                fetch(f"{scheme}://{host}:{trap.port}/a.png", net, monkeypatch)
            assert caught.value.param == PLACE
            assert len(host) < 5 or host.strip("[]") not in caught.value.message
    assert net.dialled == []


def test_CVE_2025_6242_every_address_of_a_host_must_be_public(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for addresses in ([PUBLIC, "127.0.0.1"], ["10.0.0.1", PUBLIC], [PUBLIC, "::ffff:10.0.0.1"], []):
        net = network(names={"site.example": [addresses]})
        with pytest.raises(RequestValueError, match="public address"):
            fetch("http://site.example/a.png", net, monkeypatch)
        assert net.dialled == []


def test_CVE_2025_6242_a_public_host_is_fetched_and_a_private_one_where_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = network(names={"site.example": [[OTHER_PUBLIC]]})
    assert fetch("http://Site.Example:8080/a.png?b=1#c", net, monkeypatch) == PICTURE
    assert net.dialled == [(OTHER_PUBLIC, 8080)]
    (head,) = net.heads
    assert head.startswith("GET /a.png?b=1 HTTP/1.1\r\n")
    assert "\r\nHost: site.example:8080\r\n" in head
    assert "cookie" not in head.lower()
    assert "authorization" not in head.lower()
    with traps() as (trap, *_):
        allowed = {"allow_private_media_addresses": True, "media_fetch_timeout_s": 2.0}
        with pytest.raises(MediaError):  # it listens, and never answers
            fetch(f"http://127.0.0.1:{trap.port}/", network(), monkeypatch, **allowed)
        assert trap.has_caught()


def test_CVE_2025_6242_only_named_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {"allowed_media_domains": ("site.example",)}
    names = {**SITE, "x.site.example": [[PUBLIC]], "site.example.evil": [[PUBLIC]]}
    for host in ("site.example", "SITE.example", "site.example."):
        assert fetch(f"http://{host}/", network(), monkeypatch, **allowed) == PICTURE
    for host in ("x.site.example", "site.example.evil", "xsite.example", PUBLIC):
        net = network(names=names)
        with pytest.raises(RequestValueError, match="allowed-media-domains"):
            fetch(f"http://{host}/", net, monkeypatch, **allowed)
        assert (net.resolved, net.dialled) == ([], [])
    net = network(lambda head: [redirect("http://x.site.example/")], names)
    with pytest.raises(RequestValueError, match="allowed-media-domains"):
        fetch("http://site.example/", net, monkeypatch, **allowed)
    assert len(net.dialled) == 1


CONFUSING = [
    "http://site.example\\@127.0.0.1/",
    "http://127.0.0.1\\@site.example/",
    "http://site.example@127.0.0.1/",
    "http://a:b@site.example/",
    "http://@site.example/",
    "http://site.example:80:81/",
    "http://site.example:/",
    "http://site.example:0/",
    "http://site.example:99999/",
    "http://site.example:25/",
    "http://site.example:6000/",
    "http://site.exa\tmple/",
    "http://site.example/a\r\nHost: x",
    "http://site.example\x00.evil/",
    "http://site.example%00.evil/",
    "http://%31%32%37.0.0.1/",
    "http://site。example/",
    "http://ⓛocalhost/",
    "http://loca\u017fhost/",
    "http://127。0。0。1/",
    "http:///site.example/",
    "http:site.example",
    "http:/site.example/",
    "http://",
    "http://.",
    "http://..site.example/",
    "http://[::1",
    "http://[::1]x/",
    "http://[fe80::1%25eth0]/",
    "http://[v1.x]/",
    "http://1.2.3.4.5/",
    "http://256.1.1.1/",
    "http://site.example /",
    " http://site.example/",
    "http://" + "a" * 64 + ".example/",
    "http://site.example/" + "a" * 9000,
    "http+unix://site.example/",
    "ftp://site.example/",
    "gopher://site.example/",
    "jar:http://site.example/",
    "//site.example/",
    "\nhttp://127.0.0.1/",
]


@pytest.mark.parametrize("url", CONFUSING, ids=range(len(CONFUSING)))
def test_CVE_2026_24779_what_two_parsers_could_read_in_two_ways_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network()
    with pytest.raises(RequestValueError) as caught:
        fetch(url, net, monkeypatch)
    assert caught.value.param == PLACE
    assert (net.resolved, net.dialled) == ([], [])


def _random_urls(count: int, seed: int) -> Iterator[str]:
    """Yield URLs that try to name one host and mean another."""
    rng = random.Random(seed)
    hosts = [*PRIVATE_HOSTS, "site.example", PUBLIC, "site.example.", "SITE.EXAMPLE"]
    glue = [
        "@",
        "\\",
        "\\@",
        "#",
        "?",
        "/",
        ":",
        "%2f",
        "%40",
        "\t",
        "\x00",
        "。",
        ";",
        "",
        "&",
        "//",
    ]
    for _ in range(count):
        scheme = rng.choice(["http:", "https:", "HTTP:", "http:\\", "hTTp:", "file:", ""])
        parts = [rng.choice(hosts)]
        for _ in range(rng.randrange(3)):
            parts += [rng.choice(glue), rng.choice([*hosts, "80", "PORT", "a:b"])]
        yield scheme + rng.choice(["//", "//", "//", "/", "\\\\", "///"]) + "".join(parts)


def _try_urls(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dialled is the public address of the host in the Host header, or nothing is."""
    net = network(names={**SITE, "localhost": [["127.0.0.1", "::1"]]})
    with traps() as listening:
        ports = [str(trap.port) for trap in listening]
        urls = [
            url.replace("PORT", ports[number % len(ports)])
            for number, url in enumerate(_random_urls(count, seed=1))
        ]
        found = fetch_each(urls, net, monkeypatch, media_fetch_timeout_s=60.0)
    for url, (_, dialled, heads) in zip(urls, found, strict=True):
        assert {address for address, _ in dialled} <= {PUBLIC}, url
        for head in heads:
            assert "\r\nHost: site.example" in head or f"\r\nHost: {PUBLIC}" in head
    assert sum(isinstance(one.outcome, bytes) for one in found) > count / 100


def test_CVE_2026_25960_hundreds_of_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    _try_urls(300, monkeypatch)


@pytest.mark.slow
def test_CVE_2026_25960_thousands_of_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    _try_urls(5000, monkeypatch)


def test_CVE_2026_25960_a_parsed_url_parses_to_itself() -> None:
    for url in _random_urls(2000, seed=2):
        try:
            parsed = parse_http_url(url, param="x")
        except RequestValueError:
            continue
        again = f"{parsed.scheme}://{parsed.authority}{parsed.target}"
        assert parse_http_url(again, param="x") == parsed


def test_CVE_2026_34753_one_module_alone_opens_connections() -> None:
    clients = {"aiohttp", "http", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}
    found = set()
    for file in (ROOT / "mmjax").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.split(".")[0] in clients or name.startswith("urllib.request"):
                    found.add(str(file.relative_to(ROOT)))
    # The command `mmjax chat` connects to the server that its user names; errors of the hub's own
    # client are explained where checkpoints come from.
    explaining = "mmjax/models/model_source.py"
    assert found == {"mmjax/frontend/media/http.py", "mmjax/cli/api_client.py", explaining}


# ---- redirects and rebinding ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/",
        "http://localhost:{port}/",
        "//127.0.0.1:{port}/",
        "http://[::1]:{port}/",
        "http://site.example@127.0.0.1:{port}/",
        "http://site.example:22/",
        "file:///etc/passwd",
        "ftp://site.example/",
        "data:image/png;base64,AAAA",
        "gopher://127.0.0.1:{port}/",
        "http://169.254.169.254/latest/meta-data/",
    ],
)
def test_open_57157_a_redirect_is_checked_like_the_first_url(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with traps() as (trap, *_):
        names = {**SITE, "localhost": [["127.0.0.1"]]}
        net = network(lambda head: [redirect(location.format(port=trap.port))], names)
        with pytest.raises(RequestValueError) as caught:
            fetch("http://site.example/", net, monkeypatch)
        assert caught.value.param == PLACE
        assert net.dialled == [(PUBLIC, 80)]


def test_open_57157_a_name_is_resolved_once_for_each_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rebinding = {"site.example": [[PUBLIC], ["127.0.0.1"]]}
    net = network(names=rebinding)
    assert fetch("http://site.example/", net, monkeypatch) == PICTURE
    assert net.resolved == ["site.example"]
    net = network(lambda head: [redirect("/again")], rebinding)
    with pytest.raises(RequestValueError, match="public address"):
        fetch("http://site.example/", net, monkeypatch)
    assert net.dialled == [(PUBLIC, 80)]


def test_open_57157_redirects_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def site(head: str) -> list[bytes]:
        number = int(head.split()[1].strip("/") or 0)
        return [redirect(f"/{number + 1}")] if number < hops else [PICTURE_200]

    for hops in (1, MAX_REDIRECTS):
        net = network(site)
        assert fetch("http://site.example/", net, monkeypatch) == PICTURE
        assert len(net.heads) == hops + 1
    hops = MAX_REDIRECTS + 1
    net = network(site)
    with pytest.raises(RequestValueError, match="redirected more than"):
        fetch("http://site.example/", net, monkeypatch)
    assert len(net.heads) == MAX_REDIRECTS + 1
    hops = 1
    with pytest.raises(RequestValueError, match="does not follow"):
        fetch("http://site.example/", network(site), monkeypatch, media_url_allow_redirects=False)


def test_open_57157_never_from_https_to_http() -> None:
    https = HttpUrl("https", "site.example", 443, "/a/b")
    assert https.join("c", param="x").target == "/a/c"
    with pytest.raises(RequestValueError, match="`https` to `http`"):
        https.join("http://site.example/", param="x")


def test_open_57157_what_is_public() -> None:
    public = ["1.1.1.1", "8.8.8.8", PUBLIC, OTHER_PUBLIC, "2001:4860:4860::8888", "223.255.255.254"]
    assert [text for text in public if not is_public_address(text)] == []
    for text in ("", "a", "1", "::ffff:8.8.8.8", "64:ff9b::808:808", "fe80::1%eth0", "192.88.99.1"):
        assert not is_public_address(text), text


# ---- what comes back -----------------------------------------------------------------------------


def test_CVE_2026_100650_a_body_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    def endless(head: str) -> Iterator[bytes]:
        nonlocal sent
        yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        piece = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        while True:
            sent += len(piece)
            yield piece

    tracemalloc.start()
    try:
        with pytest.raises(RequestValueError, match=r"1\d{6} or more bytes, at most 1000000 are"):
            fetch("http://site.example/", network(endless), monkeypatch, max_image_bytes=1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
    assert sent < 50_000_000


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (
            [b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n"],
            "10000000000 bytes, at most 100000 ",
        ),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n123"], "connection failed"),
        ([answer(gzip.compress(bytes(10**6)), Content_Encoding="gzip")], "compressed"),
        ([answer(b"x", Content_Encoding="identity, br")], "compressed"),
        ([answer(b"secret of the host", "404 Not Found")], "answered 404"),
        ([answer(b"", "204 No Content")], "answered 204"),
        ([answer(b"secret", "500 Oops")], "answered 500"),
        ([b"no http at all\r\n\r\n"], "connection failed"),
        ([b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000], "connection failed"),
        ([b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n"], "connection failed"),
        ([], "connection failed"),
        ([float("inf")], "did not arrive"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", *[b"x", 0.05] * 200], "did not arrive"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" * 3, float("inf")], "did not arrive"),
    ],
    ids=range(14),
)
def test_CVE_2026_100650_hosts_that_lie_or_stall(
    pieces: list[bytes | float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(lambda head: pieces)
    # Only who stalls is to run into the limit, on a slow machine, too.
    timeout_s = 0.5 if message == "did not arrive" else 60.0
    limits = {"max_image_bytes": 100_000, "media_fetch_timeout_s": timeout_s}
    with pytest.raises(RequestError, match=message) as caught:
        fetch("http://site.example/", net, monkeypatch, **limits)
    assert caught.value.param == PLACE
    assert "secret" not in caught.value.message
    assert PUBLIC not in caught.value.message


def test_CVE_2026_100650_a_request_has_a_budget_and_all_requests_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, size = "http://site.example/", len(PICTURE)
    whole = {"max_media_request_download_bytes": size, "max_media_download_bytes": size}
    assert fetch(url, network(), monkeypatch, **whole) == PICTURE
    with pytest.raises(
        RequestValueError, match=r"\d bytes or more, at most \d+ are fetched for one"
    ):
        fetch(url, network(), monkeypatch, max_media_request_download_bytes=size - 1)
    with pytest.raises(CapacityError):
        fetch(url, network(), monkeypatch, max_media_download_bytes=size - 1)


def test_CVE_2026_100650_a_thousand_parts_are_refused_before_any_is_fetched(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    net = network()
    monkeypatch.setattr("mmjax.frontend.media.http.socket.getaddrinfo", net.look_up)
    part = {"type": "image_url", "image_url": {"url": "http://site.example/"}}
    error = error_of(server.chat(messages=[{"role": "user", "content": [part] * 1000}]))
    assert "at most 16" in error["message"].lower()
    assert net.resolved == []


async def test_CVE_2026_100650_who_leaves_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = network(lambda head: [float("inf")])
    monkeypatch.setattr("mmjax.frontend.media.http.socket.getaddrinfo", net.look_up)
    connector = MediaConnector(MultiModalConfig(media_fetch_timeout_s=3600.0))

    pending = connector.open_image("http://site.example/", "x")

    async def use() -> None:
        async with connector.fetched({"multi_modal_data": {"image": [pending]}}):
            raise AssertionError("nothing was sent")

    async with connected(net, connector):
        task = asyncio.create_task(use())
        while not net.heads:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    connector.close()


def test_CVE_2026_100650_content_is_looked_at_not_its_type(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    server.engine_client.input_processor.connector._fetcher.fetch = _give(PICTURE)  # type: ignore[method-assign]
    part = {"type": "image_url", "image_url": {"url": "http://site.example/a.txt"}}
    message = {"role": "user", "content": [part, {"type": "text", "text": "what?"}]}
    answered = server.chat(messages=[message])
    assert answered.status_code == 200, answered.text
    assert answered.json()["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    fetcher: Any = server.engine_client.input_processor.connector._fetcher
    fetcher.fetch = _give(b"<html>secret</html>")
    error = error_of(server.chat(messages=[message]), 422)
    assert error["param"] == PLACE
    assert "secret" not in error["message"]
    del fetcher.fetch


def _give(data: bytes) -> Any:
    async def give(*args: Any, **kwargs: Any) -> bytes:
        return data

    return give


def test_CVE_2025_6242_fetching_can_be_switched_off() -> None:
    connector = MediaConnector(MultiModalConfig(enable_media_fetch=False))
    for url in ("http://site.example/", "HTTPS://site.example/"):
        with pytest.raises(RequestValueError, match="does not fetch"):
            connector.open_image(url, "x")
    data = base64.b64encode(PICTURE).decode()
    opened = connector.open_image(f"data:image/png;base64,{data}", "x")
    assert not isinstance(opened, PendingMedia)
    connector.close()


# ---- file: ---------------------------------------------------------------------------------------


def read_file(url: str, root: Path | None, **settings: Any) -> bytes:
    connector = MediaConnector(MultiModalConfig(allowed_local_media_path=root, **settings))
    try:
        pending = connector.open_image(url, PLACE)
        prompt = connector.fetch_now({"multi_modal_data": {"image": [pending]}})
        assert isinstance(prompt, dict)
        return (prompt.get("multi_modal_data") or {})["image"][0].original_bytes
    finally:
        connector.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """An allowed folder with a picture, and a secret beside it."""
    root = tmp_path / "allowed"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "a b.png").write_bytes(PICTURE)
    (tmp_path / "secret.png").write_bytes(PICTURE)
    (root / "inside.png").symlink_to(root / "inner" / "a b.png")
    (root / "outside.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    (root / "empty.png").touch()
    os.mkfifo(root / "pipe.png")
    return root


def test_file_urls_within_the_folder_are_read(files: Path) -> None:
    for path in ("inner/a%20b.png", "inside.png", "inner/../inside.png"):
        assert read_file(f"file://{files}/{path}", files) == PICTURE
        assert read_file(f"file://localhost{files}/{path}", files) == PICTURE
    with pytest.raises(RequestValueError, match=f"has {len(PICTURE)} bytes, at most 10 are"):
        read_file(f"file://{files}/inside.png", files, max_image_bytes=10)


def test_file_urls_are_off_by_default(files: Path) -> None:
    with pytest.raises(RequestValueError, match="--allowed-local-media-path") as caught:
        read_file(f"file://{files}/inside.png", None)
    assert caught.value.param == PLACE


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.png",
        "/inner/../../secret.png",
        "/%2e%2e/secret.png",
        "/inner/..%2f..%2fsecret.png",
        "/outside.png",
        "/up/secret.png",
        "/inner",
        "/inner/",
        "/",
        "",
        "/pipe.png",
        "/empty.png",
        "/missing.png",
        "/inside.png%00.txt",
        "/inside.png/x",
        "/%ff.png",
        "/" + "a" * 5000,
    ],
)
def test_file_urls_outside_of_it_and_what_is_no_file(files: Path, path: str) -> None:
    with pytest.raises(RequestValueError, match="names no readable file") as caught:
        read_file(f"file://{files}{path}", files)
    assert str(files) not in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "url", ["file:///proc/self/environ", "file:///dev/zero", "file:///proc/self/mem", "file:///"]
)
def test_file_urls_of_devices_even_if_all_is_allowed(url: str) -> None:
    with pytest.raises(RequestValueError, match="names no readable file"):
        read_file(url, Path("/"))


@pytest.mark.parametrize("url", ["file:a.png", "file://host/a.png", "file:/a.png", "FILE:////a"])
def test_file_urls_of_other_forms(files: Path, url: str) -> None:
    with pytest.raises(RequestValueError, match="names no readable file"):
        read_file(url, files)


def test_file_urls_a_folder_that_becomes_a_link_after_the_check(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.path.realpath

    def swap_after(path: Any, **kwargs: Any) -> Any:
        resolved = real(path, **kwargs)
        if str(path).endswith("a.png") and (files / "swap").is_dir():
            (files / "swap" / "a.png").unlink()
            (files / "swap").rmdir()
            (files / "swap").symlink_to(files.parent)
        return resolved

    (files / "swap").mkdir()
    (files / "swap" / "a.png").write_bytes(PICTURE)
    (files.parent / "a.png").write_bytes(b"secret")
    monkeypatch.setattr("mmjax.frontend.media.local_file.os.path.realpath", swap_after)
    with pytest.raises(RequestValueError, match="names no readable file"):
        read_file(f"file://{files}/swap/a.png", files)
    assert (files / "swap").is_symlink()
