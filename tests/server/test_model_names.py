"""A model of several names: requests have any, answers and figures the first."""

from pathlib import Path
from typing import Any

import pytest

from mmjax.config.engine_config import LoRAConfig
from tests.server.conftest import BODIES, MakeServer, Server


@pytest.fixture
def server(make_server: MakeServer, tmp_path: Path) -> Server:
    lora = LoRAConfig(
        enable_lora=True,
        lora_modules=("boxed=/boxed",),
        allow_runtime_lora_updating=True,
        lora_dir=tmp_path,
    )
    return make_server(names=("first", "second", "first"), lora=lora)


def test_each_name_is_listed(server: Server) -> None:
    models = server.http.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in models] == [
        ("first", None),
        ("second", None),
        ("boxed", "first"),
    ]
    assert server.http.get("/v1/models/second").json()["id"] == "second"


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_answers_have_the_first_name(server: Server, path: str, body: dict[str, Any]) -> None:
    for name, shown in (("first", "first"), ("second", "first"), ("boxed", "boxed")):
        assert server.http.post(path, json={**body, "model": name}).json()["model"] == shown
    assert server.http.post(path, json=body).json()["model"] == "first"
    refused = server.http.post(path, json={**body, "model": "third"})
    assert refused.status_code == 404
    assert "it serves `first`, `second`, `boxed`" in refused.json()["error"]["message"]


def test_figures_have_the_first_name(server: Server) -> None:
    server.chat(model="second")
    text = server.http.get("/metrics").text
    assert 'model_name="first"' in text
    assert 'model_name="second"' not in text


def test_no_adapter_gets_a_name_of_the_models(server: Server) -> None:
    body = {"lora_name": "second", "lora_path": "x"}
    answer = server.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert "a name of the model itself" in answer.json()["error"]["message"]
