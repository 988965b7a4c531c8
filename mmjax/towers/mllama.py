"""Llama 3.2 Vision's tower (Meta, 2024; arXiv 2407.21783, section 7): tiles that see each other.

Blocks over the patches of all of a picture's tiles, then gated blocks. A row is the last state,
and states of several blocks beside it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import PatchEmbedding
from mmjax.rounding import round_up

_ROWS_ALIKE = 8
"""A tile's rows are padded to a multiple of this, and its own rows see the padding, too (HF)."""
_EPS = 1e-5
"""Of the norms around the blocks, which no key names: torch's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MllamaVisionConfig:
    """What the arrays depend on."""

    hidden_size: int
    hidden_act: str
    num_hidden_layers: int
    num_global_layers: int
    attention_heads: int
    num_channels: int
    intermediate_size: int
    vision_output_dim: int
    image_size: int
    patch_size: int
    norm_eps: float
    max_num_tiles: int
    intermediate_layers_indices: tuple[int, ...]
    """Of the first blocks, those whose outputs are part of a row."""
    tile_counts: tuple[int, ...]
    """How many tiles a picture has, by its `aspect_ratio_ids`; 0 is nobody's."""

    @classmethod
    def from_hf(cls, hf_config: Any) -> "MllamaVisionConfig":
        """Read HF's config; `CheckpointError` for an output that is not as wide as its parts."""
        counts = [rows * columns for rows, columns in hf_config.supported_aspect_ratios]
        config = read_config(cls, hf_config, tile_counts=(1, *counts))
        num_parts = 1 + len(config.intermediate_layers_indices)
        if config.vision_output_dim != num_parts * config.hidden_size:
            raise CheckpointError(
                f"`vision_config.vision_output_dim` is {config.vision_output_dim}; it must be "
                f"{num_parts * config.hidden_size}: {num_parts} states of `hidden_size` "
                f"{config.hidden_size}, those of `intermediate_layers_indices` among them"
            )
        if max(counts) > config.max_num_tiles:
            raise CheckpointError(
                f"`vision_config.supported_aspect_ratios` has one of {max(counts)} tiles; "
                f"`max_num_tiles` is {config.max_num_tiles}"
            )
        return config

    @property
    def num_rows(self) -> int:
        """Rows of a tile: its patches, and the class token before them."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def num_padded_rows(self) -> int:
        """Rows of a tile with their padding."""
        return round_up(self.num_rows, _ROWS_ALIKE)


class TileEmbedding(nnx.Module):
    """What is added to all patches of a tile, by the tiles' arrangement and its place in it."""

    def __init__(self, config: MllamaVisionConfig, *, dtype: Any) -> None:
        width = config.max_num_tiles * config.hidden_size
        self.embedding = Embed(len(config.tile_counts), width, dtype=dtype)
        self.gate = nnx.Param(jnp.zeros((1,), dtype))

    def __call__(
        self, x: Float[Array, "I _tiles P D"], aspect_ratio_ids: Int[Array, " I"]
    ) -> Float[Array, "I _tiles P D"]:
        """Add it."""
        added = self.embedding(aspect_ratio_ids).reshape(*x.shape[:2], 1, x.shape[3])
        return x + added * jnp.tanh(self.gate[...])[None, None, None]


class PositionEmbedding(nnx.Module):
    """Learned positions in a tile, and others in the tiles of each arrangement."""

    def __init__(self, config: MllamaVisionConfig, *, dtype: Any) -> None:
        shape = (config.num_rows, config.hidden_size)
        self.embedding = nnx.Param(jnp.zeros(shape, dtype))
        width = config.max_num_tiles * config.num_rows * config.hidden_size
        self.tile_embedding = Embed(len(config.tile_counts), width, dtype=dtype)
        self.gate = nnx.Param(jnp.zeros((1,), dtype))

    def __call__(
        self, x: Float[Array, "I _tiles P D"], aspect_ratio_ids: Int[Array, " I"]
    ) -> Float[Array, "I _tiles P D"]:
        """Add both, weighed by the gate."""
        gate = jnp.tanh(self.gate[...])
        x = x + ((1 - gate)[None] * self.embedding[...])[None, None]
        return x + gate[None, None, None] * self.tile_embedding(aspect_ratio_ids).reshape(x.shape)


class MllamaVisionAttention(nnx.Module):
    """Attention among all rows of a picture; those of padding do not see each other."""

    def __init__(self, config: MllamaVisionConfig, *, dtype: Any) -> None:
        width, options = config.hidden_size, {"use_bias": False, "dtype": dtype}
        self.q_proj = Linear(width, width, **options)
        self.k_proj = Linear(width, width, **options)
        self.v_proj = Linear(width, width, **options)
        self.o_proj = Linear(width, width, **options)
        self.num_heads = config.attention_heads
        self.num_tiles = config.max_num_tiles

    def __call__(
        self, x: Float[Array, "I S D"], is_row: Bool[Array, "I S"]
    ) -> Float[Array, "I S D"]:
        """Attend tile by tile: the scores of all would take gigabytes. `is_row`: no padding."""
        head_dim = x.shape[-1] // self.num_heads
        query, key, value = (
            project(x).reshape(*x.shape[:2], self.num_heads, head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )

        def attend(tile: tuple[Array, Array]) -> Array:
            query, is_own_row = tile
            mask = is_own_row[:, :, None] | is_row[:, None, :]
            return dense_attention(query, key, value, mask=mask, scale=head_dim**-0.5)

        out = jax.lax.map(attend, (self._by_tile(query), self._by_tile(is_row)))
        return self.o_proj(jnp.moveaxis(out, 0, 1).reshape(x.shape))

    def _by_tile(self, x: Any) -> Any:
        tiles = x.reshape(len(x), self.num_tiles, -1, *x.shape[2:])
        return jnp.moveaxis(tiles, 1, 0)


class MllamaVisionLayer(nnx.Module):
    """A pre-norm block, whose branches may be gated."""

    def __init__(self, config: MllamaVisionConfig, *, is_gated: bool, dtype: Any) -> None:
        width, options = config.hidden_size, {"eps": config.norm_eps, "dtype": dtype}
        self.self_attn = MllamaVisionAttention(config, dtype=dtype)
        self.mlp = MLP(width, config.intermediate_size, activation=config.hidden_act, dtype=dtype)
        self.input_layernorm = LayerNorm(width, **options)
        self.post_attention_layernorm = LayerNorm(width, **options)
        self.gate_attn, self.gate_ffn = (
            nnx.Param(jnp.zeros((1,), dtype)) if is_gated else None for _ in range(2)
        )

    def __call__(
        self, x: Float[Array, "I S D"], is_row: Bool[Array, "I S"]
    ) -> Float[Array, "I S D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            x = x + _pass(self.self_attn(self.input_layernorm(x), is_row), self.gate_attn)
        with jax.named_scope("mlp"):
            return x + _pass(self.mlp(self.post_attention_layernorm(x)), self.gate_ffn)


def _pass(x: Float[Array, "I S D"], gate: nnx.Param | None) -> Float[Array, "I S D"]:
    return x if gate is None else jnp.tanh(gate[...])[None, None] * x


class MllamaVisionEncoder(nnx.Module):
    """A stack of blocks."""

    def __init__(
        self, config: MllamaVisionConfig, num_layers: int, *, is_gated: bool, dtype: Any
    ) -> None:
        self.layers = nnx.List(
            MllamaVisionLayer(config, is_gated=is_gated, dtype=dtype) for _ in range(num_layers)
        )

    def __call__(
        self, x: Float[Array, "I S D"], is_row: Bool[Array, "I S"]
    ) -> list[Float[Array, "I S D"]]:
        """Return what every block gives."""
        states = [x]
        for layer in self.layers:
            states.append(call_block(layer, states[-1], is_row))
        return states[1:]


class MllamaVisionTower(nnx.Module):
    """Pictures of several tiles to rows; parameters bear HF's names."""

    def __init__(self, config: MllamaVisionConfig, *, dtype: Any) -> None:
        width, options = config.hidden_size, {"eps": _EPS, "dtype": dtype}
        self.config = config
        self.patch_embedding = PatchEmbedding(
            config.num_channels, width, config.patch_size, use_bias=False, dtype=dtype
        )
        self.class_embedding = nnx.Param(jnp.zeros((width,), dtype))
        self.gated_positional_embedding = PositionEmbedding(config, dtype=dtype)
        self.pre_tile_positional_embedding = TileEmbedding(config, dtype=dtype)
        self.post_tile_positional_embedding = TileEmbedding(config, dtype=dtype)
        self.layernorm_pre = LayerNorm(width, **options)
        self.layernorm_post = LayerNorm(width, **options)
        self.transformer = MllamaVisionEncoder(
            config, config.num_hidden_layers, is_gated=False, dtype=dtype
        )
        self.global_transformer = MllamaVisionEncoder(
            config, config.num_global_layers, is_gated=True, dtype=dtype
        )

    def __call__(
        self, pixel_values: Float[Array, "I C _y X"], aspect_ratio_ids: Int[Array, " I"]
    ) -> Float[Array, "I P F"]:
        """Return the rows of all tiles, tile by tile; those of tiles that are not there, too.

        `pixel_values`: the tiles one below the other. `F` is `vision_output_dim`.
        """
        counts = jnp.asarray(self.config.tile_counts, jnp.int32)[aspect_ratio_ids]
        tile = jnp.arange(self.config.max_num_tiles, dtype=jnp.int32)[None, :]
        is_tile = tile < counts[:, None]  # I tiles
        x, is_row = self._pad(self._embed(pixel_values, aspect_ratio_ids, is_tile), is_tile)
        padded = x.shape
        states = self.transformer(x.reshape(len(x), -1, x.shape[-1]), is_row)
        x = self.layernorm_post(states[-1]).reshape(padded)
        x = self.post_tile_positional_embedding(x, aspect_ratio_ids)
        last = self.global_transformer(x.reshape(len(x), -1, x.shape[-1]), is_row)[-1]
        # HF's order: of a row's other states the first numbers of all come first.
        others = [states[number] for number in self.config.intermediate_layers_indices]
        beside = jnp.stack(others, axis=-1).reshape(*last.shape[:2], -1)
        rows = jnp.concatenate([last, beside], axis=-1).reshape(*padded[:3], -1)
        return rows[:, :, : self.config.num_rows].reshape(len(x), -1, rows.shape[-1])

    def _embed(
        self,
        pixel_values: Float[Array, "I C _y X"],
        aspect_ratio_ids: Int[Array, " I"],
        is_tile: Bool[Array, "I _tiles"],
    ) -> Float[Array, "I _tiles P D"]:
        """Return what the first block reads, without padding."""
        patches = self.patch_embedding(pixel_values)
        x = patches.reshape(*is_tile.shape, -1, patches.shape[-1])
        # Tiles that are not there are zeros behind the pixels' arithmetic, too.
        x = jnp.where(is_tile[:, :, None, None], x, 0)
        x = self.pre_tile_positional_embedding(x, aspect_ratio_ids)
        first = jnp.broadcast_to(self.class_embedding[...], (*x.shape[:2], 1, x.shape[-1]))
        x = jnp.concatenate([first, x], axis=2)
        return self.layernorm_pre(self.gated_positional_embedding(x, aspect_ratio_ids))

    def _pad(
        self, x: Float[Array, "I _tiles P D"], is_tile: Bool[Array, "I _tiles"]
    ) -> tuple[Float[Array, "I _tiles _padded D"], Bool[Array, "I S"]]:
        """Pad each tile's rows; return also which rows are no padding."""
        num_padded = self.config.num_padded_rows
        x = jnp.pad(x, ((0, 0), (0, 0), (0, num_padded - x.shape[2]), (0, 0)))
        is_own = jnp.arange(num_padded, dtype=jnp.int32) < self.config.num_rows
        is_row = is_tile[:, :, None] & is_own[None, None, :]
        return x, is_row.reshape(len(x), -1)
