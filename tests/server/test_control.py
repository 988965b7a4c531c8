"""Sleep, pauses and other weights over HTTP, for whoever has a key, where they are allowed."""

from pathlib import Path
from typing import Any

import pytest

from mmjax.config.engine_config import ServerConfig
from mmjax.errors import ConfigError
from mmjax.transport.messages import ControlEngine
from tests.echo_engine import BAD_ADAPTER
from tests.server.conftest import MakeServer, Server

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
def weights_dir(tmp_path: Path) -> Path:
    for name in ("step-1", BAD_ADAPTER):
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "model.safetensors").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.safetensors").touch()
    (tmp_path / "weights" / "empty").mkdir()
    (tmp_path / "weights" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "weights"


@pytest.fixture
def server(make_server: MakeServer, weights_dir: Path) -> Server:
    made = make_server(allow_engine_control=True, api_keys=("secret",), weights_dir=weights_dir)
    made.http.headers.update(KEY)
    return made


def post(server: Server, path: str, **options: Any) -> Any:
    return server.http.post(path, **options)


def test_sleep_and_pauses_are_passed_on_and_told(server: Server) -> None:
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    told = post(server, "/sleep", params={"level": 2, "mode": "abort"})
    assert (told.status_code, told.json()["is_sleeping"]) == (200, True)
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert post(server, "/wake_up").json()["is_sleeping"] is False
    assert post(server, "/pause", params={"mode": "keep"}).json()["is_paused"] is True
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    assert post(server, "/resume").json()["is_paused"] is False
    changes = server.supervisor.engine.changes
    assert [(one.action, one.mode, one.level) for one in changes] == [
        ("sleep", "abort", 2),
        ("wake_up", "wait", 1),
        ("pause", "keep", 1),
        ("resume", "wait", 1),
    ]


def test_weights_are_of_a_directory_below_the_one_that_is_allowed(
    server: Server, weights_dir: Path
) -> None:
    told = post(server, "/update_weights", json={"path": "step-1", "mode": "keep"})
    assert told.json() == {"weights_version": 1, "is_sleeping": False, "is_paused": False}
    whole = post(server, "/update_weights", json={"path": str(weights_dir / "step-1")})
    assert whole.json()["weights_version"] == 2
    (first, _) = server.supervisor.engine.changes
    assert (first.path, first.mode) == (str(weights_dir.resolve() / "step-1"), "keep")
    for path in ("../elsewhere", "link", "empty", "none", "/etc", "\0"):
        refused = post(server, "/update_weights", json={"path": path})
        assert refused.status_code == 400
        assert "no directory below `--weights-dir`" in refused.json()["error"]["message"]
    refused = post(server, "/update_weights", json={"path": BAD_ADAPTER})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "it lacks a tensor"


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/sleep", {"params": {"level": 3}}),
        ("/sleep", {"params": {"mode": "soon"}}),
        ("/sleep", {"json": {"level": 2}}),
        ("/pause", {"json": {"mode": "abort"}}),
        ("/update_weights", {"json": {"path": "step-1", "mode": "soon"}}),
        ("/update_weights", {"json": {"path": "step-1", "level": 2}}),
        ("/update_weights", {"json": {}}),
    ],
)
def test_a_wrong_value_is_a_400(server: Server, path: str, options: Any) -> None:
    assert post(server, path, **options).status_code == 400
    assert not server.supervisor.engine.changes


def test_the_routes_need_a_key_and_the_flag(make_server: MakeServer, server: Server) -> None:
    paths = ("/sleep", "/wake_up", "/pause", "/resume", "/update_weights")
    server.http.headers.pop("Authorization")
    assert {post(server, path).status_code for path in paths} == {401}
    assert server.http.get("/is_sleeping").status_code == 401
    closed = make_server(api_keys=("secret",))
    closed.http.headers.update(KEY)
    for path in paths:
        refused = post(closed, path)
        assert refused.status_code == 404
        assert "start it with `--allow-engine-control`" in refused.json()["error"]["message"]
    with pytest.raises(ConfigError, match="`allow_engine_control` is set without `api_key`"):
        ServerConfig(allow_engine_control=True)
    with pytest.raises(ConfigError, match="`weights_dir` is set without `allow_engine_control`"):
        ServerConfig(weights_dir=Path("/weights"))


def test_without_a_directory_no_weights_are_loaded(make_server: MakeServer) -> None:
    made = make_server(allow_engine_control=True, api_keys=("secret",))
    made.http.headers.update(KEY)
    refused = post(made, "/update_weights", json={"path": "step-1"})
    assert "without `--weights-dir`" in refused.json()["error"]["message"]


def test_a_new_engine_is_as_the_last_one_was(server: Server) -> None:
    for _ in range(3):
        post(server, "/update_weights", json={"path": "step-1"})
    post(server, "/sleep", params={"level": 2})
    post(server, "/pause")
    changes = restart(server)
    assert [(one.action, one.level, one.weights_version) for one in changes] == [
        ("load_weights", 1, 3),
        ("sleep", 2, None),
        ("pause", 1, None),
    ]
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert post(server, "/update_weights", json={"path": "step-1"}).json()["weights_version"] == 4


def restart(server: Server) -> list[ControlEngine]:
    """Replace the engine; return what the new one is told to be like."""

    async def replace() -> None:
        server.supervisor.die(restarts=True)
        server.supervisor.health = True
        server.supervisor.become_ready()

    server.in_loop(replace)
    return server.supervisor.engine.changes


def test_weights_whose_directory_is_gone_are_not_replaced_by_those_of_the_start(
    server: Server, weights_dir: Path
) -> None:
    post(server, "/update_weights", json={"path": "step-1"})
    (weights_dir / "step-1").rename(weights_dir / "moved")
    restart(server)
    refused = server.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    for part in ("version 1", "they are gone", "/update_weights"):
        assert part in refused.json()["error"]["message"]
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, refused.json()["error"]["message"])
    assert 'mmjax:engine_up{model_name="tiny"} 0.0' in server.http.get("/metrics").text
    told = post(server, "/update_weights", json={"path": "moved"}).json()
    assert told["weights_version"] == 2
    assert server.chat().status_code == server.http.get("/ready").status_code == 200


def test_the_version_never_goes_back(server: Server) -> None:
    """As behind a deep sleep, from which the weights of the start are read again."""
    server.supervisor.engine.weights_version = 1
    assert post(server, "/wake_up").json()["weights_version"] == 1
    (again,) = restart(server)
    assert (again.action, again.path, again.weights_version) == ("load_weights", None, 1)


def test_what_sleep_has_freed_stays_so_in_the_next_engine(server: Server) -> None:
    for level in (2, 1):
        post(server, "/sleep", params={"level": level})
    assert [(one.action, one.level) for one in restart(server)] == [("sleep", 2)]
    post(server, "/wake_up")
    post(server, "/sleep", params={"level": 1})
    assert [(one.action, one.level) for one in restart(server)] == [("sleep", 1)]
    # Weights that were given to one that sleeps are in its memory.
    post(server, "/sleep", params={"level": 2})
    post(server, "/update_weights", json={"path": "step-1"})
    assert [(one.action, one.level) for one in restart(server)][-1] == ("sleep", 1)
