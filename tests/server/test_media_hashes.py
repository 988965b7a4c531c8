"""What a gateway routes by: each response's media hashes, and those that the server holds."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from mmjax.cache import processor_cache_from_config
from mmjax.config.engine_config import SchedulerConfig, ServerConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.server.app import create_app
from mmjax.server.openai.media_headers import MEDIA_HASHES_HEADER
from tests.echo_engine import EchoSupervisor


@contextmanager
def server(tiny: Path, *, trusts_media_ids: bool = False, **config: Any) -> Iterator[TestClient]:
    """A server with a processor cache."""
    model = load_model_config(str(tiny), max_model_len=256)
    model = replace(model, mm=replace(model.mm, trust_media_ids=trusts_media_ids))
    cache = processor_cache_from_config(model.mm)
    processor = InputProcessor(model, cache=cache)
    client = AsyncEngineClient(processor, EchoSupervisor(mm=model.mm), SchedulerConfig())
    app = create_app(client, ChatParser.for_model(processor), ServerConfig(**config))
    with TestClient(app, raise_server_exceptions=False) as http:
        yield http


def picture(color: str, **part: Any) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), color).save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}, **part}


def ask(http: TestClient, *parts: dict[str, Any], **fields: Any) -> list[str]:
    """Return the hashes in the response's header."""
    content = [*parts, {"type": "text", "text": "what is it?"}]
    body = {"messages": [{"role": "user", "content": content}], **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    header = response.headers.get(MEDIA_HASHES_HEADER, "")
    return header.split(",") if header else []


def test_a_response_names_its_media_and_the_server_those_that_it_holds(tiny_gemma3: Path) -> None:
    with server(tiny_gemma3) as http:
        assert http.get("/internal/media").json() == {"object": "list", "media_hashes": []}
        assert ask(http) == []
        red, blue = ask(http, picture("red"), picture("blue"))
        assert red != blue
        assert ask(http, picture("blue"), stream=True) == [blue]
        held = http.get("/internal/media").json()["media_hashes"]
        assert sorted(held) == sorted([red, blue])
        part = {"type": "input_image", "image_url": picture("red")["image_url"]["url"]}
        response = http.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})
        assert response.headers[MEDIA_HASHES_HEADER] == red
    with server(tiny_gemma3) as other:
        assert ask(other, picture("red")) == [red], "the same on another server"


def test_an_id_of_any_characters_is_a_valid_header(tiny_gemma3: Path) -> None:
    with server(tiny_gemma3, trusts_media_ids=True) as http:
        (shown,) = ask(http, picture("red", uuid="Käse, rot: 1"))
        assert shown == "K%C3%A4se%2C%20rot%3A%201"


def test_what_a_server_holds_needs_its_key(tiny_gemma3: Path) -> None:
    with server(tiny_gemma3, api_keys=("secret",)) as http:
        assert http.get("/internal/media").status_code == 401
        allowed = http.get("/internal/media", headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200


@pytest.mark.parametrize("key", ["first", "second"])
def test_clients_who_share_a_server_do_not_see_each_others_media(
    tiny_gemma3: Path, key: str
) -> None:
    with server(tiny_gemma3, api_keys=("first", "second")) as http:
        refused = http.get("/internal/media", headers={"authorization": f"Bearer {key}"})
        assert refused.status_code == 403
        assert "API keys" in refused.json()["error"]["message"]
