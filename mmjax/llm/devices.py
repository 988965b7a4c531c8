"""Which of the process's devices an engine has, where its caller says so."""

from collections.abc import Sequence

import jax

from mmjax.errors import ConfigError
from mmjax.weights.sharding import Device


def choose_devices(
    devices: Sequence[Device] | None, mesh: jax.sharding.Mesh | None, size: int | None
) -> Sequence[Device] | None:
    """Return the devices that the caller gives, None if it gives none; ConfigError for wrong ones.

    `size`: the `tensor_parallel_size` that it gives, if any.
    """
    if devices is not None and mesh is not None:
        raise ConfigError("`devices` and `mesh` are given; give one of them")
    given = devices if mesh is None else list(mesh.devices.flat)
    if given is None:
        return None
    if not given or not all(isinstance(one, jax.Device) for one in given):
        raise ConfigError(
            f"`devices` is {given!r}; give some of `jax.local_devices()`, as in "
            "`devices=jax.local_devices()[:2]`"
        )
    strange = [one for one in given if one.process_index != jax.process_index()]
    if strange or len(set(given)) < len(given) or len({one.platform for one in given}) > 1:
        raise ConfigError(
            f"`devices` is {given!r}; give each device once, of this process and of one platform"
        )
    if size is not None and size != len(given):
        raise ConfigError(
            f"`tensor_parallel_size` is {size}, and {len(given)} devices are given; leave it out"
        )
    return given
