"""Ray Serve with two replicas of the embedded default on this machine.

In the slow set, since Ray is not installed for the others: `make test-slow` installs it, or
`pip install --constraint constraints/py311.txt -e '.[ray]'`.
"""

import asyncio
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks import ray_serve
from benchmarks.ray_cluster import RayCluster
from tests.test_examples import example_environment

MODES = ["front", "header"]
NUM_CHATS = 30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

Texts = tuple[list[dict[str, Any]], list[str]]


@pytest.fixture(autouse=True, scope="module")
def ray_is_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.fail(__doc__ or "Ray is not installed")


@pytest.fixture(autouse=True)
def user_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our strict settings are for our own tests, not for processes that a user starts."""
    import os

    kept = example_environment()
    for name in set(os.environ) - set(kept):
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ray_serve.one_server(tmp_path_factory.mktemp("one")) as url:
        yield url


@pytest.fixture(scope="module")
def texts(one_server: str) -> Texts:
    bodies = ray_serve.long_bodies(16, max_tokens=48)
    return bodies, asyncio.run(ray_serve.undisturbed(one_server, bodies))


@contextmanager
def cluster(folder: Path, mode: str, **args: Any) -> Iterator[RayCluster]:
    with ray_serve.cluster_of(folder, mode, **args) as found:
        yield found


@pytest.mark.parametrize("mode", MODES)
def test_two_replicas_hit_as_one_server_does(tmp_path: Path, one_server: str, mode: str) -> None:
    alone = asyncio.run(ray_serve.hit_rates(one_server, num_chats=NUM_CHATS, seed=11))
    with cluster(tmp_path, mode) as two:
        rates = ray_serve.hit_rates(two.url, num_chats=NUM_CHATS, seed=11)
        together = asyncio.run(rates)
    assert together.processor == alone.processor == 0.5
    assert together.prefix == pytest.approx(alone.prefix, abs=0.02)


def test_a_front_finds_pictures_without_a_session(tmp_path: Path) -> None:
    with cluster(tmp_path, "front") as two:
        rates = ray_serve.hit_rates(two.url, num_chats=NUM_CHATS, seed=12, sends_session=False)
        assert asyncio.run(rates).processor == 0.5


@pytest.mark.parametrize("which", ["p0", "p1"])
def test_no_stream_is_lost_with_a_process(tmp_path: Path, texts: Texts, which: str) -> None:
    bodies, expected = texts
    with cluster(tmp_path, "front") as two:
        losses = asyncio.run(ray_serve.kill_under_streams(two, which, bodies, expected))
        assert losses.lost == []
        assert losses.num_different == 0
        # And both replicas serve again.
        two.wait_for_replicas(2)
        again = asyncio.run(ray_serve.undisturbed(two.url, bodies[:4]))
        assert again == expected[:4]


@pytest.mark.parametrize("mode", MODES)
def test_a_rolling_update_loses_nothing(tmp_path: Path, texts: Texts, mode: str) -> None:
    bodies, expected = texts
    with cluster(tmp_path, mode) as two:
        args = {"mode": mode, "num_replicas": 2, **ray_serve.REPLICA_ARGS, "max_num_seqs": 8}
        change = ray_serve.under_load(
            two.url, bodies, expected, lambda: ray_serve.update(two, args)
        )
        losses = asyncio.run(change)
    assert losses.num_requests > 0
    assert (losses.lost, losses.num_different) == ([], 0)


@pytest.mark.parametrize("mode", MODES)
def test_replicas_follow_the_load(tmp_path: Path, texts: Texts, mode: str) -> None:
    bodies, expected = texts
    scaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1.0}
    args = {**scaling, "downscale_delay_s": 5.0, "max_num_seqs": 2, "target_num_waiting": 2.0}
    with cluster(tmp_path, mode, **args) as growing:
        losses = asyncio.run(ray_serve.scale(growing, bodies, expected))
    assert (losses.lost, losses.num_different) == ([], 0)


def test_errors_of_a_cluster_are_openais(tmp_path: Path) -> None:
    args = {"api_key": ["secret"], "num_replicas": 1, "precompile": "none"}
    with cluster(tmp_path, "front", **args) as one, httpx2.Client(base_url=one.url) as http:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        refused = http.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        http.headers["authorization"] = "Bearer secret"
        wrong = http.post("/v1/chat/completions", json={**body, "temperature": "hot"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
