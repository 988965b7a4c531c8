"""The settings of a deployment of several replicas, and how they are given.

`serve run mmjax.deploy.ray_serve:build_app mode=front num_replicas=2 model=...`: names that are not
declared here are settings of the server.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mmjax.config.engine_config import ParallelConfig, ServerConfig
from mmjax.config.settings import Setting, check_settings, setting, settings_of
from mmjax.deploy.affinity import RoutingConfig
from mmjax.errors import ConfigError
from mmjax.server.flags import parse_mapping, to_server_config
from mmjax.system.logger import configure_logging

_PROXYS = ("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "root_path")
"""Settings of the server that Ray's proxy has instead."""
_PLACES = ("distributed_coordinator", "distributed_process_id")
"""Where the processes of one replica meet, which each deployment finds by itself."""
_UPDATES = ("allow_runtime_lora_updating",)
"""What one replica is told by HTTP the others do not hear of."""
_REASONS = {
    **dict.fromkeys(_PROXYS, "Ray's proxy has it"),
    **dict.fromkeys(_PLACES, "each replica finds its own; give `distributed_num_processes`"),
    **dict.fromkeys(
        ("batch_dir",),
        "a batch that one replica has is unknown to the others; run `mmjax run-batch`",
    ),
    **dict.fromkeys(
        _UPDATES, "an adapter that one replica loads is unknown to the others; give `lora_modules`"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """How many replicas there are, and what stands before them."""

    mode: Literal["header", "front"] = setting(
        "header",
        """`header`: Ray's proxy chooses by the header `x-session-id`. `front`: a front reads each
        body, chooses by its pictures too, and gives what a dead replica had to another one.""",
    )
    num_replicas: int = setting(1, "Replicas, without autoscaling.", minimum=1)
    min_replicas: int | None = setting(
        None, "Replicas at least, with autoscaling.", unset="no autoscaling", minimum=1
    )
    max_replicas: int | None = setting(
        None, "Replicas at most, with autoscaling.", unset="no autoscaling", minimum=1
    )
    upscale_delay_s: float = setting(
        10.0, "Seconds that more requests must wait before a replica is added.", minimum=0
    )
    downscale_delay_s: float = setting(
        600.0, "Seconds that a replica must be idle before it is taken away.", minimum=0
    )
    target_num_waiting: float = setting(
        4.0, "Requests that may wait at each replica before one is added.", above=0
    )
    num_fronts: int = setting(1, "Fronts, in the mode `front`.", minimum=1)
    max_front_body_bytes: int = setting(
        2 * 2**30,
        """Bytes of the bodies that a front keeps, of all requests together: until each is answered
        it may have to be sent again. More get a 429.""",
        minimum=1,
    )
    held_answer_s: float = setting(
        60.0,
        """Seconds for which a replica holds an answer that was asked for with an `Idempotency-Key`
        and that nobody reads, in the mode `front`; 0: none is held.""",
        minimum=0,
    )
    max_held_answer_bytes: int = setting(
        64 * 2**20,
        "Bytes of the answers that a replica holds, about; the oldest are dropped for newer ones.",
        minimum=1,
    )
    num_cpus: float = setting(
        1.0, "CPUs that a replica, or each of its processes, reserves in Ray.", minimum=0
    )
    num_gpus: float = setting(
        0.0, "GPUs that a replica, or each of its processes, reserves in Ray.", minimum=0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        low, high = self.min_replicas, self.max_replicas
        if (low is None) != (high is None):
            missing = "min_replicas" if low is None else "max_replicas"
            raise ConfigError(f"`{missing}` is missing; autoscaling needs both bounds")
        if low is not None and high is not None and low > high:
            raise ConfigError(f"`min_replicas` is {low}, more than `max_replicas` ({high})")

    @property
    def is_scaling(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be."""
        return self.max_replicas or self.num_replicas


class Deployment(NamedTuple):
    """All settings of a deployment."""

    config: DeployConfig
    routing: RoutingConfig
    server: Namespace
    """The settings of each replica, as `parse_flags` returns them."""


def deploy_settings() -> dict[str, Setting]:
    """Return the settings that a server alone does not have, by name."""
    return {
        one.name: one
        for config_class in (DeployConfig, RoutingConfig)
        for one in settings_of(config_class)
    }


def read_deployment(args: Mapping[str, Any]) -> Deployment:
    """Return the settings of a deployment; ConfigError if one is wrong.

    Args:
        args: Values by name, as texts or as YAML has them; dashes count as underscores.
    """
    known = deploy_settings()
    values: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in args.items():
        name = key.replace("-", "_")
        if name in _REASONS:
            raise ConfigError(f"`{key}` is no setting of a replica: {_REASONS[name]}; leave it out")
        if name not in known:
            others[key] = value
            continue
        values[name] = known[name].parse_any(value, key)

    def make(config_class: Any) -> Any:
        names = {one.name for one in settings_of(config_class)}
        return config_class(**{name: value for name, value in values.items() if name in names})

    server = parse_mapping(others)
    # As each replica will check it.
    ParallelConfig(
        tensor_parallel_size=server.tensor_parallel_size,
        num_processes=server.distributed_num_processes,
        coordinator_address="each replica's own",
    )
    return Deployment(
        config=make(DeployConfig),
        routing=make(RoutingConfig),
        server=server,
    )


def settings_of_process(server: Namespace, *, coordinator: str, process_id: int) -> Namespace:
    """Return the settings of one of a replica's several processes."""
    place = {"distributed_coordinator": coordinator, "distributed_process_id": process_id}
    return Namespace(**{**vars(server), **place})


def read_again(args: Mapping[str, Any], has_keys: bool) -> tuple[Deployment, ServerConfig]:
    """Return the settings in a process of Ray's; ConfigError if it lacks the API keys."""
    deployment = read_deployment(args)
    server = to_server_config(deployment.server)
    if has_keys and not server.api_keys:
        raise ConfigError(
            "the deployment was made with API keys, but Ray's processes have none; set "
            "`MMJAX_API_KEY` in their `runtime_env`"
        )
    flags = deployment.server
    configure_logging(flags.log_level, process="P0", log_format=flags.log_format)
    return deployment, server
