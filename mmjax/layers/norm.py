"""Normalisations; statistics in float32 whatever the input's dtype, as in HF."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.cpu.rows import norm_rows


def _scale(weight: Array, rank: int) -> Array:
    return weight.astype(jnp.float32).reshape((1,) * (rank - 1) + weight.shape)


class LayerNorm(nnx.Module):
    """Ba et al., 2016: `(x - mean) / sqrt(var + eps) * weight + bias`."""

    def __init__(self, dim: int, *, eps: float, has_bias: bool = True, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), dtype)) if has_bias else None
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise the last axis."""

        def norm(x: Array, weight: Array, bias: Array | None = None) -> Array:
            wide = x.astype(jnp.float32)
            mean = wide.mean(-1, keepdims=True)
            variance = jnp.square(wide - mean).mean(-1, keepdims=True)
            normed = (wide - mean) * jax.lax.rsqrt(variance + self.eps)
            out = normed * _scale(weight, x.ndim)
            return (out if bias is None else out + _scale(bias, x.ndim)).astype(x.dtype)

        bias = None if self.bias is None else self.bias[...]
        return norm_rows(x, self.weight[...], bias, norm, eps=self.eps, centres=True)


class RMSNorm(nnx.Module):
    """Zhang and Sennrich, 2019: `x / rms(x) * weight`, rounded before the weight, as in Llama."""

    def __init__(self, dim: int, *, eps: float, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise the last axis."""

        def norm(x: Array, weight: Array) -> Array:
            normed = divide_by_rms(x, self.eps).astype(x.dtype)
            return normed * weight.reshape((1,) * (x.ndim - 1) + (-1,))

        return norm_rows(x, self.weight[...], None, norm, eps=self.eps, rounds_first=True)


class GemmaRMSNorm(nnx.Module):
    """Zhang and Sennrich, 2019, with Gemma's centred weight: `x / rms(x) * (1 + weight)`.

    Rounded to the input's dtype once, at the end (Llama: before the weight).
    """

    def __init__(self, dim: int, *, eps: float, is_centred: bool = True, dtype: Any) -> None:
        """`is_centred` false: `x / rms(x) * weight`, as from Gemma 4 on."""
        self.weight = nnx.Param(jnp.full((dim,), 0.0 if is_centred else 1.0, dtype))
        self.eps = eps
        self.is_centred = is_centred

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise the last axis."""
        offset = 1.0 if self.is_centred else 0.0

        def norm(x: Array, weight: Array) -> Array:
            return (divide_by_rms(x, self.eps) * (offset + _scale(weight, x.ndim))).astype(x.dtype)

        return norm_rows(x, self.weight[...], None, norm, eps=self.eps, offset=offset)


def divide_by_rms(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """Return `x / rms(x)` of the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)


class UnitNorm(nnx.Module):
    """`x / rms(x)`, without a weight."""

    def __init__(self, *, eps: float) -> None:
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalise the last axis."""
        return divide_by_rms(x, self.eps).astype(x.dtype)


class GroupNorm(nnx.Module):
    """Wu and He, arXiv 1803.08494: each group of a picture's channels is normed as one."""

    def __init__(self, num_groups: int, num_channels: int, *, eps: float, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones((num_channels,), dtype))
        self.bias = nnx.Param(jnp.zeros((num_channels,), dtype))
        self.num_groups = num_groups
        self.eps = eps

    def __call__(self, x: Float[Array, "I C _y _x"]) -> Float[Array, "I C _y _x"]:
        """Normalise over rows, columns and the channels of a group."""
        groups = x.astype(jnp.float32).reshape(x.shape[0], self.num_groups, -1)
        mean = groups.mean(-1, keepdims=True)
        variance = jnp.square(groups - mean).mean(-1, keepdims=True)
        normed = ((groups - mean) * jax.lax.rsqrt(variance + self.eps)).reshape(x.shape)
        weight, bias = (p[...].astype(jnp.float32) for p in (self.weight, self.bias))
        out = normed * weight[None, :, None, None] + bias[None, :, None, None]
        return out.astype(x.dtype)


class HeadNorm(nnx.Module):
    """LayerNorm over each head, with parameters of its own for each: Chameleon's."""

    def __init__(self, num_heads: int, head_dim: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones((num_heads, head_dim), dtype))
        self.bias = nnx.Param(jnp.zeros((num_heads, head_dim), dtype))
        self.eps = 1e-5  # no key of the config

    def __call__(self, x: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Normalise the last axis; rounded before the weight, as in HF."""
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        variance = jnp.square(wide - mean).mean(-1, keepdims=True)
        normed = ((wide - mean) * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype)
        return normed * self.weight[...][None] + self.bias[...][None]
