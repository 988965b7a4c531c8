"""mmjax on Ray Serve: `serve run mmjax.deploy.ray_serve:build_app model=NAME`.

Needs `pip install 'mmjax[ray]'`. docs/scaling.md says what is promised.
"""

import asyncio
import math
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    BackpressureConfig,
    RequestRouterConfig,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.request_router import RequestRouter
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mmjax.config.engine_config import ServerConfig
from mmjax.deploy.affinity import AffinityTable, RoutingConfig, session_key
from mmjax.deploy.autoscaling import ReplicaLoad, wanted_replicas
from mmjax.deploy.config import (
    Deployment,
    read_again,
    read_deployment,
    settings_of_process,
)
from mmjax.deploy.held import HeldAnswers
from mmjax.deploy.replica import ForwardedRequest, Replica, ReplicaLostError, ResponseItem
from mmjax.deploy.router import create_router
from mmjax.deploy.workers import WorkerProcess
from mmjax.errors import CapacityError, EngineUnavailableError
from mmjax.server.flags import to_engine_config, to_server_config
from mmjax.server.shutdown import CLOSE_TIMEOUT_S

_HEALTH_PERIOD_S = 2.0
_REACH_TIMEOUT_S = 60.0
"""For a call of another host; its first one waits until the processor is loaded there."""
_METRICS_INTERVAL_S = 1.0
_LOOK_BACK_S = 3.0
_MAX_ROUTER_REQUESTS = 100_000
"""Ray's own limit, beyond the router's, whose answers clients understand."""


def build_app(args: Mapping[str, Any]) -> Any:
    """Return the application for `serve run` and for a `serve` configuration.

    Args:
        args: Settings by name: those of `mmjax.deploy.config`, and the server's.
    """
    deployment = read_deployment(args)
    server = to_server_config(deployment.server)
    served = dict(args), bool(server.api_keys)
    if deployment.config.mode == "header":
        return _replicas(HeaderReplica, deployment, server).bind(*served)
    replicas = _replicas(RoutedReplica, deployment, server).bind(*served)
    router = serve.deployment(
        name="Front",
        num_replicas=deployment.config.num_fronts,
        max_ongoing_requests=_MAX_ROUTER_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        **_lifecycle(server),
    )(Router)
    return router.bind(*served, replicas)


def _replicas(replica: type, deployment: Deployment, server: ServerConfig) -> Any:
    """Return the deployment of the replicas."""
    config = deployment.config
    return serve.deployment(
        name="Replica",
        # The replica's own limit answers first, in OpenAI's shape.
        max_ongoing_requests=2 * _max_requests(deployment),
        # Of Ray's proxy, while there is no replica; a router's own limit is lower.
        max_queued_requests=config.most_replicas * _max_requests(deployment),
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1.0),
        ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
        request_router_config=RequestRouterConfig(
            # Ray takes a name as well; its types say otherwise.
            request_router_class=cast(Any, "mmjax.deploy.ray_serve.AffinityRouter"),
            request_router_kwargs=_fields(deployment.routing),
        ),
        # New replicas are ready before old ones stop.
        max_surge_percent=100,
        **_bundles(deployment),
        **(
            {"autoscaling_config": _autoscaling(deployment)}
            if config.is_scaling
            else {"num_replicas": config.num_replicas}
        ),
        **_lifecycle(server),
    )(replica)


def _bundles(deployment: Deployment) -> dict[str, Any]:
    """Return the places of a replica's processes, on hosts of their own where there are enough."""
    num_processes = deployment.server.distributed_num_processes
    if num_processes == 1:
        return {}
    needs = {"CPU": deployment.config.num_cpus, "GPU": deployment.config.num_gpus}
    bundle = {name: number for name, number in needs.items() if number}
    return {
        "placement_group_bundles": [bundle] * num_processes,
        "placement_group_strategy": "SPREAD",
    }


def _lifecycle(server: ServerConfig) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": server.shutdown_timeout_s + CLOSE_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": _HEALTH_PERIOD_S,
    }


def _autoscaling(deployment: Deployment) -> Any:
    config = deployment.config
    return AutoscalingConfig(
        min_replicas=cast(int, config.min_replicas),
        max_replicas=cast(int, config.max_replicas),
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        metrics_interval_s=_METRICS_INTERVAL_S,
        look_back_period_s=_LOOK_BACK_S,
        policy=AutoscalingPolicy(
            policy_function="mmjax.deploy.ray_serve:ScaleByWaiting",
            policy_kwargs={
                "max_num_running": deployment.server.max_num_seqs,
                "target_num_waiting": config.target_num_waiting,
            },
        ),
    )


def _max_requests(deployment: Deployment) -> int:
    return deployment.server.max_num_seqs + deployment.server.max_num_queued_reqs


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


class _ServedReplica:
    """A replica as Ray sees it: its health, its load."""

    replica: Replica | None = None

    async def start(self, args: Mapping[str, Any], has_keys: bool) -> Replica:
        """Start it, and wait until the engine is ready; Ray sends nothing before."""
        deployment, server = read_again(args, has_keys)
        workers, flags = [], deployment.server
        if flags.distributed_num_processes > 1:
            place = _find_coordinator()
            workers = _make_workers(deployment, (dict(args), has_keys, place))
            flags = settings_of_process(flags, coordinator=place, process_id=0)
        name = serve.get_replica_context().replica_id.unique_id
        self.replica = await Replica.start(name, to_engine_config(flags), server, workers)
        return self.replica

    def check_health(self) -> None:
        """Raise if Ray should replace this replica."""
        if self.replica is not None:
            self.replica.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `ScaleByWaiting` looks at."""
        heartbeat = None if self.replica is None else self.replica.supervisor.heartbeat
        if heartbeat is None:
            return {}
        return {"running": heartbeat.num_running, "waiting": heartbeat.num_waiting}


@serve.ingress()
class HeaderReplica(_ServedReplica):
    """A replica right behind Ray's proxy, which chooses by a header."""

    def __init__(self, args: Mapping[str, Any], has_keys: bool) -> None:
        self._args = args, has_keys

    async def __serve_build_asgi_app__(self) -> Any:
        """Return the application, whose engine is ready."""
        return (await self.start(*self._args)).without_lifespan()

    async def __del__(self) -> None:
        """End the engine process, after the last request."""
        if self.replica is not None:
            await self.replica.close()


class RoutedReplica(_ServedReplica):
    """A replica that a router forwards to."""

    async def __init__(self, args: Mapping[str, Any], has_keys: bool) -> None:
        config = read_deployment(args).config
        replica = await self.start(args, has_keys)
        self._held = HeldAnswers(
            replica.name,
            replica.respond,
            seconds=config.held_answer_s,
            max_bytes=config.max_held_answer_bytes,
        )

    async def respond(
        self, request: ForwardedRequest, *, keys: list[str], avoided: list[str]
    ) -> AsyncGenerator[ResponseItem, None]:
        """Yield the response; `AffinityRouter` has read `keys` and `avoided`."""
        async with aclosing(self._held.respond(request)) as items:
            async for item in items:
                yield item

    async def __del__(self) -> None:
        """End the engine process, after the last request."""
        if self.replica is not None:
            await self._held.close()
            await self.replica.close()


class RayReplicas:
    """The replicas, for a router: `mmjax.deploy.replica.Replicas`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True)

    async def respond(
        self, request: ForwardedRequest, *, keys: list[str], avoided: list[str]
    ) -> AsyncGenerator[ResponseItem, None]:
        """Yield the response of the replica that `AffinityRouter` chooses."""
        response = self._handle.respond.remote(request, keys=keys, avoided=avoided)
        is_over = False
        try:
            async for item in response:
                yield item
            is_over = True
        except BackPressureError as error:
            raise CapacityError("too many requests wait; send it again in a moment") from error
        except DeploymentUnavailableError as error:
            raise EngineUnavailableError("no replica could be started; see their log") from error
        except (RayError, RayServeException) as error:
            is_over = True
            raise ReplicaLostError from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this call was cancelled, but its replica's end.
            is_over = True
            raise ReplicaLostError from error
        finally:
            if not is_over:
                response.cancel()


@serve.ingress()
class Router:
    """The router, as Ray sees it."""

    def __init__(self, args: Mapping[str, Any], has_keys: bool, handle: Any) -> None:
        deployment, self._server = read_again(args, has_keys)
        self._handle = handle
        num_replicas = deployment.config.most_replicas / deployment.config.num_fronts
        self._max_requests = math.ceil(num_replicas * _max_requests(deployment))
        self._max_body_bytes = deployment.config.max_front_body_bytes

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application."""
        replicas = RayReplicas(self._handle)
        return create_router(
            replicas,
            self._server,
            max_requests=self._max_requests,
            max_body_bytes=self._max_body_bytes,
        )


class AffinityRouter(RequestRouter):
    """Chooses by `AffinityTable`: from a router's keys, or from the session's header."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the settings of `RoutingConfig`."""
        self._table = AffinityTable(RoutingConfig(**kwargs))
        self._running: dict[str, set[str]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replicas, the best one first, each a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        # Else Ray asks again and again, without a pause, while all are full.
        pending_request.routing_context.should_backoff = True
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        self._running = {name: self._running.get(name, set()) for name in by_name}
        ranked = self._table.rank(
            _keys(pending_request),
            {name: len(self._running[name]) for name in by_name},
            now=time.monotonic(),
            avoided=set(pending_request.kwargs.get("avoided", ())),
        )
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Record who got it."""
        name = replica_id.unique_id
        self._table.note(_keys(pending_request), name, now=time.monotonic())
        request_id = pending_request.metadata.internal_request_id
        self._running.setdefault(name, set()).add(request_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Record that one is over."""
        self._running.get(replica_id.unique_id, set()).discard(internal_request_id)


def _keys(pending_request: Any) -> list[str]:
    keys = pending_request.kwargs.get("keys")
    if keys is not None:
        return keys
    # As long as a client likes.
    key = session_key(pending_request.metadata.session_id)
    return [] if key is None else [key]


class ScaleByWaiting:
    """Ray's autoscaling policy: `wanted_replicas` of what the replicas tell."""

    def __init__(self, **limits: Any) -> None:
        """`limits`: those of `wanted_replicas`."""
        self._limits = limits

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be, and the policy's state."""
        metrics = context.aggregated_metrics or {}
        running, waiting = metrics.get("running", {}), metrics.get("waiting", {})
        loads = [ReplicaLoad(running[name], waiting.get(name, 0.0)) for name in running]
        return wanted_replicas(loads, context.target_num_replicas, **self._limits), {}


# ---- a replica of several processes -------------------------------------------------------------


def _find_coordinator() -> str:
    """Return an address of this host with a port that is free."""
    address = ray.util.get_node_ip_address()
    with socket.socket() as one:
        one.bind(("", 0))
        return f"{address}:{one.getsockname()[1]}"


def _make_workers(deployment: Deployment, given: tuple[Any, ...]) -> list["RayWorker"]:
    """Return a replica's workers, each an actor in another place of its placement group."""
    config, group = deployment.config, cast(Any, ray.util.get_current_placement_group())
    return [
        RayWorker(
            ray.remote(WorkerActor)
            .options(
                num_cpus=config.num_cpus,
                num_gpus=config.num_gpus,
                # If its host comes back, it does, too.
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=process_id
                ),
            )
            .remote(*given, process_id)
        )
        for process_id in range(1, deployment.server.distributed_num_processes)
    ]


class WorkerActor(WorkerProcess):
    """A worker of a replica, as Ray sees it."""

    def __init__(
        self, args: Mapping[str, Any], has_keys: bool, coordinator: str, process_id: int
    ) -> None:
        deployment, _ = read_again(args, has_keys)
        place = {"coordinator": coordinator, "process_id": process_id}
        super().__init__(to_engine_config(settings_of_process(deployment.server, **place)))


class RayWorker:
    """A worker in an actor of Ray's: `mmjax.deploy.workers.Worker`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def restart(self) -> None:
        """Start it; end the one before."""
        await self._reach(self._actor.restart)

    async def is_alive(self) -> bool:
        """Whether it runs."""
        return await self._reach(self._actor.is_alive)

    async def end(self) -> None:
        """End it, and its actor."""
        try:
            await self._reach(self._actor.end)
        finally:
            ray.kill(self._actor)

    async def _reach(self, method: Any) -> Any:
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                return await method.remote()
        except (RayActorError, TimeoutError) as error:
            raise ConnectionError(f"a process of this replica: {error}") from error
