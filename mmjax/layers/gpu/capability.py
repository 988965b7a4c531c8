"""What the GPU can do, or the one that programs are lowered for."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import jax

_AMPERE, _HOPPER = 8.0, 9.0


def gpu_attribute(name: str, of_hopper: Any) -> Any:
    """Return an attribute of the GPU; an H100's where programs are lowered without one."""
    return getattr(jax.local_devices()[0], name, of_hopper)


def compiles_triton() -> bool:
    """Return whether our kernels for CUDA can be used, which Triton compiles from Ampere on."""
    return _capability() >= _AMPERE and _has_pallas_triton()


def widens_float8() -> bool:
    """Return whether XLA's kernels of products read float8 and widen it, which others write first.

    By its compiler (0.10.2): on an H100, and neither on an L4 nor an A100.
    """
    return _capability() >= _HOPPER


@cache
def _has_pallas_triton() -> bool:
    """Return whether this version of JAX has the backend: it is deprecated from JAX 0.11 on."""
    return find_spec("jax.experimental.pallas.triton") is not None


def _capability() -> float:
    """Return the GPU's compute capability; 0 for AMD's GPUs, which have names instead."""
    name = str(gpu_attribute("compute_capability", 9.0))
    return float(name) if name[0].isdigit() else 0.0
