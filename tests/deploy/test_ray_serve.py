"""Ray Serve with two replicas of the embedded default on this machine.

In the slow set, since Ray is not installed for the others: `make test-slow` installs it, or
`pip install --constraint constraints/py311.txt -e '.[ray]'`.
"""

import asyncio
import importlib.util
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from benchmarks import ray_serve
from benchmarks.ray_cluster import RayCluster
from mmjax.deploy.replica import ReplicaLostError
from mmjax.errors import CapacityError
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
    # The one server is asked in both modes: pictures that it had before would be known.
    seed = {"front": 11, "header": 13}[mode]
    alone = asyncio.run(ray_serve.hit_rates(one_server, num_chats=NUM_CHATS, seed=seed))
    with cluster(tmp_path, mode) as two:
        rates = ray_serve.hit_rates(two.url, num_chats=NUM_CHATS, seed=seed)
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


@pytest.mark.parametrize("ask", [ray_serve.resumed, ray_serve.not_streamed])
def test_no_answer_is_lost_with_a_front(tmp_path: Path, texts: Texts, ask: Any) -> None:
    """Where clients do as docs/scaling.md says; OpenAI's does by itself."""
    bodies, expected = texts
    with cluster(tmp_path, "front", num_fronts=2) as two:
        losses = asyncio.run(ray_serve.kill_under_streams(two, "front", bodies, expected, ask))
    assert (losses.lost, losses.num_different) == ([], 0)


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


def test_a_replica_of_two_processes_outlives_either(tmp_path: Path) -> None:
    """An actor for each; where P1 is killed, both engine processes start again and meet."""
    sizes = {"num_replicas": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    gang = {"tensor_parallel_size": 2, "distributed_num_processes": 2, "num_cpus": 1}
    bodies = ray_serve.long_bodies(4, max_tokens=24)
    with cluster(tmp_path, "front", **sizes, **gang) as one:
        expected = asyncio.run(ray_serve.undisturbed(one.url, bodies))
        losses = asyncio.run(ray_serve.kill_under_streams(one, "p1", bodies, expected))
    assert (losses.lost, losses.num_different) == ([], 0)


class Answering:
    """A deployment's handle that answers an item, and then fails."""

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure
        self.respond = self
        self.num_cancelled = 0

    def options(self, **_: Any) -> "Answering":
        return self

    def remote(self, *_: Any, **__: Any) -> "Answering":
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        yield "item"
        raise self.failure


# Of Ray's own modules, which this test imports.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_end_of_a_replica_is_a_loss_and_no_end_of_the_front() -> None:
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError, RayServeException

    from mmjax.deploy.ray_serve import RayReplicas

    async def read(failure: BaseException) -> Answering:
        handle = Answering(failure)
        request: Any = None
        items = RayReplicas(handle).respond(request, keys=[], avoided=[])
        async with aclosing(items):
            async for item in items:
                assert item == "item"
        return handle

    async def leave(handle: Answering) -> None:
        items = RayReplicas(handle).respond(cast(Any, None), keys=[], avoided=[])
        assert await anext(items) == "item"
        await items.aclose()

    for failure in (RayActorError(), RayServeException("upstream"), asyncio.CancelledError()):
        with pytest.raises(ReplicaLostError):
            asyncio.run(read(failure))
    with pytest.raises(CapacityError):
        asyncio.run(read(BackPressureError(1, 1)))
    # Of a client that leaves, the replica is told.
    handle = Answering(RayActorError())
    asyncio.run(leave(handle))
    assert handle.num_cancelled == 1


def test_errors_of_a_cluster_are_openais(tmp_path: Path) -> None:
    args = {"api_key": ["secret"], "num_replicas": 1, "precompile": "none"}
    with cluster(tmp_path, "front", **args) as one, httpx2.Client(base_url=one.url) as http:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        refused = http.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        http.headers["authorization"] = "Bearer secret"
        wrong = http.post("/v1/chat/completions", json={**body, "temperature": "hot"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
