"""Choose the attention backend, from what is known before tracing."""

from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import jax.numpy as jnp

from mmjax.layers.attention.kv_cache import LANES
from mmjax.layers.gpu.capability import compiles_triton, gpu_attribute

Backend = Literal["xla", "ragged", "triton", "cudnn"]
"""Plain XLA on any platform; the kernels for paged attention on TPU and CUDA; cuDNN for dense."""

_CUDA = ("cuda", "gpu")
_MAX_TRITON_ROW = 1152
"""Bytes of a key, as DeepSeek's latent has in bfloat16: the smallest tiles of wider ones would not
fit into every GPU's shared memory."""

_HALF = (jnp.bfloat16, jnp.float16)


def choose_backend(
    platform: str,
    *,
    is_paged: bool,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    soft_cap: float | None = None,
) -> Backend:
    """Return the fastest attention that a platform has for these shapes."""
    if platform == "tpu" and is_paged and _ragged_takes(num_kv_heads, head_dim, dtype):
        return "ragged"
    if platform in _CUDA and is_paged and triton_takes(head_dim, dtype):
        return "triton"
    if platform in _CUDA and not is_paged and soft_cap is None:
        is_half = any(dtype == half for half in _HALF)
        if is_half and head_dim % 8 == 0 and head_dim <= _cudnn_max_head_dim():
            return "cudnn"
    return "xla"


def _ragged_takes(num_kv_heads: int, head_dim: int, dtype: Any) -> bool:
    """Return whether interleaved keys and values fill whole registers of the kernel.

    It reads every other row of them, which Mosaic compiles for rows of one register alone.
    """
    if dtype not in (jnp.float32, jnp.bfloat16) or head_dim > LANES:
        return False
    registers, rest = divmod(2 * num_kv_heads * jnp.dtype(dtype).itemsize, 4)
    return rest == 0 and (registers in (1, 2, 4, 8) or registers % 8 == 0)


def triton_takes(head_dim: int, dtype: Any) -> bool:
    """Return whether our kernels for CUDA take such keys."""
    is_known = any(dtype == known for known in (jnp.float32, *_HALF))
    fits = head_dim * jnp.dtype(dtype).itemsize <= _MAX_TRITON_ROW
    return is_known and fits and compiles_triton()


@cache
def _cudnn_max_head_dim() -> int:
    """Return cuDNN's maximum head dimension; 0 if JAX has no CUDA, or the GPU is before Ampere."""
    if not any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return 0
    # Where there is no GPU, JAX lowers for no newer one than this.
    capability = float(gpu_attribute("compute_capability", 8.0))
    if capability < 8.0:
        return 0
    return 256 if capability >= 9.0 else 128
