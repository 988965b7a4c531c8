"""A replica's further processes on Ray: an actor for each, in the replica's placement group."""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any, cast

import ray  # pyright: ignore[reportMissingImports]  # an extra
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]  # an extra
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]  # an extra
    PlacementGroupSchedulingStrategy,
)

from mmjax.deploy.config import Deployment, read_again, settings_of_process
from mmjax.deploy.gang import Follower
from mmjax.server.flags import to_engine_config

_REACH_TIMEOUT_S = 60.0
"""For a call of another host; its first one waits until the processor is loaded there."""


def find_coordinator() -> str:
    """Return an address of this host with a port that is free."""
    address = ray.util.get_node_ip_address()
    with socket.socket() as one:
        one.bind(("", 0))
        return f"{address}:{one.getsockname()[1]}"


def make_members(deployment: Deployment, given: tuple[Any, ...]) -> list["RayMember"]:
    """Return the followers of this replica's P1, in the other places of its placement group."""
    config, group = deployment.config, cast(Any, ray.util.get_current_placement_group())
    return [
        RayMember(
            ray.remote(FollowerActor)
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


class FollowerActor:
    """A follower of a replica's P1, as Ray sees it."""

    def __init__(
        self, args: Mapping[str, Any], has_keys: bool, coordinator: str, process_id: int
    ) -> None:
        deployment, _ = read_again(args, has_keys)
        flags = settings_of_process(
            deployment.server, coordinator=coordinator, process_id=process_id
        )
        self._follower = Follower(to_engine_config(flags))

    def restart(self) -> None:
        """Start it; end the one before."""
        self._follower.restart()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._follower.is_alive()

    def end(self) -> None:
        """End it."""
        self._follower.end()


class RayMember:
    """A follower, for a gang: `mmjax.deploy.gang.Member`."""

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
