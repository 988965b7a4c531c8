"""Gemma 4's tower: packed patches of pictures of any size, of which squares are averaged.

A block norms what attention and MLP read and what they give; heads are normed before they are
turned, the first half of each by a patch's column and the second by its row. Linear layers may cut
off what they read and give, at bounds that the checkpoint has (`use_clipped_linears`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.segments import segment_attention
from mmjax.layers.linear import ClippedLinear, Linear
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import GemmaRMSNorm, divide_by_rms
from mmjax.layers.rope import apply_rotary, inverse_frequencies, rotary_angles
from mmjax.rounding import cdiv

Angles = tuple[tuple[Float[Array, "P _turned"], Float[Array, "P _turned"]], ...]
"""Cosines and sines of every patch's column, and of its row, a quarter of a head wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4ViTConfig:
    """The keys of a `gemma4_vision` config that the arrays depend on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    hidden_activation: str
    rms_norm_eps: float
    pooling_kernel_size: int
    patch_size: int
    position_embedding_size: int
    use_clipped_linears: bool
    standardize: bool
    rope_theta: float

    @classmethod
    def from_hf(cls, hf_config: Any) -> "Gemma4ViTConfig":
        """Read HF's `Gemma4VisionConfig`; `CheckpointError` for what its tower does not do."""
        rope = hf_config.rope_parameters or {}
        if (kind := rope.get("rope_type", "axial")) != "axial":
            raise CheckpointError(
                f"`vision_config.rope_parameters.rope_type` is `{kind}`; expected `axial`"
            )
        if hf_config.num_key_value_heads != hf_config.num_attention_heads:
            raise CheckpointError(
                f"`vision_config.num_key_value_heads` is {hf_config.num_key_value_heads}; expected "
                f"{hf_config.num_attention_heads}, the number of heads"
            )
        return read_config(cls, hf_config, rope_theta=float(rope.get("rope_theta", 100.0)))

    @property
    def linear(self) -> type[Linear]:
        """The class of the blocks' linear layers."""
        return ClippedLinear if self.use_clipped_linears else Linear

    def make_norm(self, width: int, *, dtype: Any) -> GemmaRMSNorm:
        """Return a norm of so many features."""
        return GemmaRMSNorm(width, eps=self.rms_norm_eps, is_centred=False, dtype=dtype)


class Gemma4ViTAttention(nnx.Module):
    """Attention among the patches of one picture, or one frame."""

    def __init__(self, config: Gemma4ViTConfig, *, dtype: Any) -> None:
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        options = {"use_bias": False, "dtype": dtype}
        self.q_proj, self.k_proj, self.v_proj = (
            config.linear(width, inner, **options) for _ in range(3)
        )
        self.o_proj = config.linear(inner, width, **options)
        self.q_norm = config.make_norm(config.head_dim, dtype=dtype)
        self.k_norm = config.make_norm(config.head_dim, dtype=dtype)
        self.config = config

    def __call__(
        self, x: Float[Array, "P D"], angles: Angles, segment_ids: Int[Array, " P"]
    ) -> Float[Array, "P D"]:
        """Attend within each segment; scores have no scale."""
        query, key, value = (
            project(x).reshape(len(x), -1, self.config.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = self._turn(self.q_norm(query), angles), self._turn(self.k_norm(key), angles)
        value = divide_by_rms(value, self.config.rms_norm_eps).astype(x.dtype)
        out = segment_attention(query, key, value, segment_ids, scale=1.0)
        return self.o_proj(out.reshape(len(x), -1))

    def _turn(self, heads: Float[Array, "P N H"], angles: Angles) -> Float[Array, "P N H"]:
        halves = jnp.split(heads, 2, axis=-1)
        turned = [apply_rotary(x, *one) for x, one in zip(halves, angles, strict=True)]
        return jnp.concatenate(turned, axis=-1)


class Gemma4ViTBlock(nnx.Module):
    """A block with norms before and after attention and MLP."""

    def __init__(self, config: Gemma4ViTConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.self_attn = Gemma4ViTAttention(config, dtype=dtype)
        self.mlp = GatedMLP(
            width,
            config.intermediate_size,
            activation=config.hidden_activation,
            linear=config.linear,
            dtype=dtype,
        )
        self.input_layernorm = config.make_norm(width, dtype=dtype)
        self.post_attention_layernorm = config.make_norm(width, dtype=dtype)
        self.pre_feedforward_layernorm = config.make_norm(width, dtype=dtype)
        self.post_feedforward_layernorm = config.make_norm(width, dtype=dtype)

    def __call__(
        self, x: Float[Array, "P D"], angles: Angles, segment_ids: Int[Array, " P"]
    ) -> Float[Array, "P D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            out = self.self_attn(self.input_layernorm(x), angles, segment_ids)
            x = x + self.post_attention_layernorm(out)
        with jax.named_scope("mlp"):
            out = self.mlp(self.pre_feedforward_layernorm(x))
            return x + self.post_feedforward_layernorm(out)


class PatchEmbedder(nnx.Module):
    """A projection of a patch's pixels, and a learned embedding of its column and of its row."""

    def __init__(self, config: Gemma4ViTConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.input_proj = Linear(3 * config.patch_size**2, width, use_bias=False, dtype=dtype)
        self.position_embedding_table = nnx.Param(
            jnp.zeros((2, config.position_embedding_size, width), dtype)
        )

    def __call__(
        self, pixel_values: Float[Array, "P _pixels"], places: Int[Array, "P 2"]
    ) -> Float[Array, "P D"]:
        """Embed patches whose pixels are from 0 to 1, colours last; `places`: column and row."""
        columns, rows = self.position_embedding_table[...]
        scaled = (2.0 * (pixel_values - 0.5)).astype(columns.dtype)
        return self.input_proj(scaled) + (columns[places[:, 0]] + rows[places[:, 1]])


class Gemma4ViT(nnx.Module):
    """Packed patches to averages of squares; parameters bear HF's names but for `encoder_layers`.

    HF pads each picture, so that the outputs of its blocks are not ours row by row.
    """

    def __init__(self, config: Gemma4ViTConfig, *, dtype: Any) -> None:
        self.patch_embedder = PatchEmbedder(config, dtype=dtype)
        self.encoder_layers = nnx.List(
            [Gemma4ViTBlock(config, dtype=dtype) for _ in range(config.num_hidden_layers)]
        )
        if config.standardize:
            self.std_bias = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
            self.std_scale = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, "P _pixels"],
        *,
        places: Int[Array, "P 2"],
        segment_ids: Int[Array, " P"],
        item_ids: Int[Array, " P"],
    ) -> Float[Array, "_rows D"]:
        """Return the average of each square of `pooling_kernel_size` patches a side.

        Args:
            pixel_values: A patch a row, square by square.
            places: Column and row of each patch in its picture or frame.
            segment_ids: Its picture or frame.
            item_ids: Its picture or video, each of which may start at any row.
        """
        config = self.config
        x = self.patch_embedder(pixel_values, places)
        frequencies = inverse_frequencies({"rope_theta": config.rope_theta}, config.head_dim // 2)
        angles = tuple(rotary_angles(places[:, axis], frequencies) for axis in (0, 1))
        for block in self.encoder_layers:
            x = call_block(block, x, angles, segment_ids)
        squares = _gather_squares(x, item_ids, config.pooling_kernel_size**2).astype(jnp.float32)
        # Rounded as HF does: the average once, and once more at the end.
        pooled = squares.mean(1).astype(x.dtype).astype(jnp.float32) * config.hidden_size**0.5
        if config.standardize:
            bias, scale = (p[...].astype(jnp.float32) for p in (self.std_bias, self.std_scale))
            pooled = (pooled - bias[None]) * scale[None]
        return pooled.astype(x.dtype)


def _gather_squares(
    x: Float[Array, "P D"], item_ids: Int[Array, " P"], size: int
) -> Float[Array, "_rows _size D"]:
    """Return squares of `size` rows; of an item that starts at row s from `ceil(s / size)` on.

    Of 2, items - 0 0 1 1 1 1 stand in rows 1 to 6: row 0 of the squares is no one's, row 1 that of
    item 0, rows 2 and 3 those of item 1.
    """
    index, num_squares = jnp.arange(len(x), dtype=jnp.int32), cdiv(len(x), size)
    is_first = (index == 0) | (item_ids != jnp.roll(item_ids, 1))
    starts = jax.lax.cummax(jnp.where(is_first, index, 0))
    target = jnp.where(item_ids < 0, num_squares * size, index + (-starts) % size)
    source = jnp.zeros(num_squares * size, jnp.int32).at[target].set(index, mode="drop")
    return x[source].reshape(num_squares, size, -1)
