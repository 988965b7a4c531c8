"""Adapters over HTTP: named as models, listed, loaded and unloaded by those who may."""

from pathlib import Path
from typing import Any

import pytest

from mmjax.config.engine_config import LoRAConfig
from mmjax.errors import ConfigError
from tests.echo_engine import BAD_ADAPTER
from tests.server.conftest import MakeServer, Server


def make_files(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (path / name).write_bytes(b"")
    return path


@pytest.fixture
def lora_dir(tmp_path: Path) -> Path:
    make_files(tmp_path / "adapters" / "poet")
    make_files(tmp_path / "adapters" / BAD_ADAPTER)
    return tmp_path / "adapters"


@pytest.fixture
def server(make_server: MakeServer, lora_dir: Path) -> Server:
    lora = LoRAConfig(
        enable_lora=True,
        lora_modules=("boxed=/boxed",),
        allow_runtime_lora_updating=True,
        lora_dir=lora_dir,
    )
    return make_server(lora=lora)


def post(server: Server, verb: str, **body: Any) -> Any:
    return server.http.post(f"/v1/{verb}_lora_adapter", json=body)


def names(server: Server) -> dict[str, str | None]:
    models = server.http.get("/v1/models").json()["data"]
    return {model["id"]: model["parent"] for model in models}


def test_a_request_names_an_adapter_as_its_model(server: Server) -> None:
    answer = server.chat(model="boxed")
    assert answer.status_code == 200
    assert answer.json()["model"] == "boxed"
    assert server.chat(model="tiny").json()["model"] == "tiny"
    body = {"model": "boxed", "prompt": "a red circle", "max_tokens": 2}
    assert server.http.post("/v1/completions", json=body).json()["model"] == "boxed"
    assert [one.lora_name for one in server.supervisor.engine.added] == ["boxed", None, "boxed"]
    refused = server.chat(model="other")
    assert refused.status_code == 404
    assert "`boxed`" in refused.json()["error"]["message"]


def test_adapters_are_listed_with_their_parent(server: Server) -> None:
    assert names(server) == {"tiny": None, "boxed": "tiny"}
    assert server.http.get("/v1/models/boxed").json()["parent"] == "tiny"


def test_an_adapter_is_loaded_and_unloaded(server: Server, lora_dir: Path) -> None:
    assert post(server, "load", lora_name="poet", lora_path="poet").status_code == 200
    assert names(server) == {"tiny": None, "boxed": "tiny", "poet": "tiny"}
    assert server.supervisor.engine.adapters == {"poet": str(lora_dir.resolve() / "poet")}
    assert server.chat(model="poet").status_code == 200
    assert post(server, "load", lora_name="poet", lora_path="poet").status_code == 400
    assert post(server, "unload", lora_name="poet").status_code == 200
    assert server.chat(model="poet").status_code == 404
    assert post(server, "unload", lora_name="poet").status_code == 404
    assert server.supervisor.engine.adapters == {}


def test_what_vllms_clients_send_beside_names_is_taken(server: Server) -> None:
    """Gateway API's sidecar names the base model, which loads adapters where its routers ask."""
    named = {"lora_name": "poet", "base_model_name": "tiny"}
    inplace = post(server, "load", **named, lora_path="poet", load_inplace=True)
    assert inplace.status_code == 400
    assert inplace.json()["error"]["param"] == "load_inplace"
    loaded = post(server, "load", **named, lora_path="poet", load_inplace=False)
    assert loaded.status_code == 200, loaded.text
    unloaded = post(server, "unload", **named, lora_int_id=1)
    assert unloaded.status_code == 200, unloaded.text
    assert names(server) == {"tiny": None, "boxed": "tiny"}


def test_a_bad_adapter_is_a_400_that_says_why(server: Server) -> None:
    refused = post(server, "load", lora_name="poet", lora_path=BAD_ADAPTER)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    assert names(server) == {"tiny": None, "boxed": "tiny"}
    assert post(server, "load", lora_name="poet", lora_path="poet").status_code == 200


@pytest.mark.parametrize("kind", ["outside", "absolute", "link", "file", "absent", "nul"])
def test_no_path_leads_out_of_the_directory(
    server: Server, lora_dir: Path, tmp_path: Path, kind: str
) -> None:
    outside = make_files(tmp_path / "outside")
    (lora_dir / "link").symlink_to(outside)
    (lora_dir / "file").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (lora_dir / "file" / name).symlink_to(outside / name)
    path = {"outside": "../outside", "absolute": str(outside), "nul": "a\0b"}.get(kind, kind)
    refused = post(server, "load", lora_name="x", lora_path=path)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    assert str(tmp_path) not in refused.text
    assert server.supervisor.engine.adapters == {}


@pytest.mark.parametrize("name", ["", "tiny", "a b", "a:b", "x" * 200])
def test_names_are_checked(server: Server, name: str) -> None:
    refused = post(server, "load", lora_name=name, lora_path="poet")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_name"


def test_nobody_loads_where_it_is_not_allowed(make_server: MakeServer) -> None:
    server = make_server(lora=LoRAConfig(enable_lora=True, lora_modules=("boxed=/boxed",)))
    for verb in ("load", "unload"):
        refused = post(server, verb, lora_name="boxed", lora_path="x")
        assert refused.status_code == 404
        assert "`--allow-runtime-lora-updating`" in refused.json()["error"]["message"]
    assert names(server) == {"tiny": None, "boxed": "tiny"}


def test_a_key_is_needed_where_the_server_has_one(make_server: MakeServer, lora_dir: Path) -> None:
    lora = LoRAConfig(enable_lora=True, allow_runtime_lora_updating=True, lora_dir=lora_dir)
    server = make_server(lora=lora, api_keys=("secret",))
    assert post(server, "load", lora_name="poet", lora_path="poet").status_code == 401
    server.http.headers["authorization"] = "Bearer secret"
    assert post(server, "load", lora_name="poet", lora_path="poet").status_code == 200


def test_a_new_engine_has_the_adapters_of_the_last_one(server: Server, lora_dir: Path) -> None:
    supervisor = server.supervisor
    post(server, "load", lora_name="poet", lora_path="poet")
    post(server, "unload", lora_name="boxed")

    async def restart() -> None:
        supervisor.die(restarts=True)
        supervisor.engine.adapters["boxed"] = "/boxed"  # as P1 loads it at its start
        supervisor.become_ready()

    server.in_loop(restart)
    assert server.chat(model="poet").status_code == 200
    assert supervisor.engine.adapters == {"poet": str(lora_dir.resolve() / "poet")}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"lora_modules": ("a=b",)}, "enable_lora"),
        ({"max_loras": 8}, "`max_loras` is set without `enable_lora`"),
        ({"lora_dir": Path("/adapters")}, "enable_lora"),
        ({"enable_lora": True, "allow_runtime_lora_updating": True}, "lora_dir"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "NAME=PATH"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a"}',)}, "JSON object"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a", "path": "b"',)}, "JSON object"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a b", "path": "b"}',)}, "JSON object"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a", "path": "b", "x": 1}',)}, "JSON"),
        ({"enable_lora": True, "lora_modules": ("a=b", '{"name": "a", "path": "c"}')}, "own name"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LoRAConfig(**settings)


def test_modules_have_both_of_vllms_forms() -> None:
    named = '{"name": "sql/b", "path": "owner/sql=1", "base_model_name": "owner/model"}'
    lora = LoRAConfig(enable_lora=True, lora_modules=("poet=/a=b", named))
    assert lora.modules == [("poet", "/a=b"), ("sql/b", "owner/sql=1")]
