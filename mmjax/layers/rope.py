"""Rotary position embeddings (Su et al., arXiv 2104.09864), in the half-split form of HF.

Angles are always float32: in bfloat16 position 257 equals 256.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.cpu.prevent_fusion import prevent_fusion


def inverse_frequencies(parameters: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Return float32[H/2] from an entry of config.json's `rope_parameters`.

    Kinds: `default` (theta ** (-2i/H)) and `linear` (the same, over `factor`: position
    interpolation, arXiv 2306.15595). The power is rounded from float64, which is torch's float32
    value in all but one entry of 128; numpy's own float32 power misses one in six, and at position
    8191 an error of one bit there turns an angle by 1e-3.
    """
    kind = parameters.get("rope_type", "default")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(parameters["rope_theta"]), exponents.astype(np.float64))
    frequencies = np.float32(1.0) / powers.astype(np.float32)
    if kind == "linear":
        frequencies = frequencies / np.float32(parameters["factor"])
    elif kind != "default":
        raise CheckpointError(f"`rope_type` is `{kind}`; mmjax knows `default` and `linear`")
    return frequencies.astype(np.float32)


def rotary_angles(
    positions: Int[Array, " T"], frequencies: Float[np.ndarray, " P"]
) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
    """Return the cosines and sines of every position, float32."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    # Fused into every head of every layer, this would take 5% of a step of 64 tokens.
    return prevent_fusion(_cos_sin, angles, angles[0, 0] >= 0)


def _cos_sin(angles: Float[Array, "T P"]) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(
    x: Float[Array, "T N H"], cos: Float[Array, "T P"], sin: Float[Array, "T P"]
) -> Float[Array, "T N H"]:
    """Rotate the pairs (x[i], x[i + H/2]) of every head by the position's angles."""
    half = x.shape[-1] // 2
    cos, sin = cos.astype(x.dtype)[:, None, :], sin.astype(x.dtype)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
