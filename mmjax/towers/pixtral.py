"""Pixtral's vision encoder (arXiv 2410.07073): pictures of any size, packed; rotary in 2-D."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.attention.segments import segment_attention
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import RMSNorm
from mmjax.layers.rope import apply_rotary, inverse_frequencies, multimodal_angles
from mmjax.layers.vision import PatchEmbedding

Angles = tuple[Float[Array, "P _turned"], Float[Array, "P _turned"]]
"""Cosines and sines of every patch's place, half a head wide."""

_NORM_EPS = 1e-5
"""No key of the config says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig:
    """The keys of a `pixtral` vision config that the arrays depend on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    patch_size: int
    hidden_act: str
    rope_theta: float

    @classmethod
    def from_hf(cls, hf_config: Any) -> "PixtralConfig":
        """Read HF's `PixtralVisionConfig`; `CheckpointError` for another rope or patch."""
        if not isinstance(hf_config.patch_size, int):
            raise CheckpointError(
                f"`vision_config.patch_size` is {hf_config.patch_size!r}; a `pixtral` has one "
                "number there, the side of a square"
            )
        rope = hf_config.rope_parameters
        if rope["rope_type"] not in ("axial", "default"):
            raise CheckpointError(
                f"`vision_config.rope_parameters.rope_type` is {rope['rope_type']!r}; "
                "Pixtral's tower has `axial`"
            )
        names = [name for name in cls.__dataclass_fields__ if name != "rope_theta"]
        return cls(
            **{name: getattr(hf_config, name) for name in names}, rope_theta=rope["rope_theta"]
        )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads


class PixtralAttention(nnx.Module):
    """Full attention among the patches of one picture, with rotary places."""

    def __init__(self, config: PixtralConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.q_proj = Linear(width, width, use_bias=False, dtype=dtype)
        self.k_proj = Linear(width, width, use_bias=False, dtype=dtype)
        self.v_proj = Linear(width, width, use_bias=False, dtype=dtype)
        self.o_proj = Linear(width, width, use_bias=False, dtype=dtype)
        self.head_dim = config.head_dim

    def __call__(
        self, x: Float[Array, "P D"], angles: Angles, segment_ids: Int[Array, " P"]
    ) -> Float[Array, "P D"]:
        """Attend within each segment."""
        query, key, value = (
            project(x).reshape(len(x), -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary(query, *angles), apply_rotary(key, *angles)
        out = segment_attention(query, key, value, segment_ids, scale=self.head_dim**-0.5)
        return self.o_proj(out.reshape(x.shape))


class PixtralLayer(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: PixtralConfig, *, dtype: Any) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, eps=_NORM_EPS, dtype=dtype)
        self.attention = PixtralAttention(config, dtype=dtype)
        self.ffn_norm = RMSNorm(config.hidden_size, eps=_NORM_EPS, dtype=dtype)
        self.feed_forward = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        )

    def __call__(
        self, x: Float[Array, "P D"], angles: Angles, segment_ids: Int[Array, " P"]
    ) -> Float[Array, "P D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            x = x + self.attention(self.attention_norm(x), angles, segment_ids)
        with jax.named_scope("mlp"):
            return x + self.feed_forward(self.ffn_norm(x))


class PixtralTransformer(nnx.Module):
    """The stack of blocks."""

    def __init__(self, config: PixtralConfig, *, dtype: Any) -> None:
        blocks = [PixtralLayer(config, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.layers = nnx.List(blocks)


class PixtralVisionTower(nnx.Module):
    """Packed patches to patch features; parameters bear HF's names."""

    def __init__(self, config: PixtralConfig, *, dtype: Any) -> None:
        """`config.num_hidden_layers` may be what is read, and not what there is."""
        self.config = config
        self.patch_conv = PatchEmbedding(
            config.num_channels, config.hidden_size, config.patch_size, use_bias=False, dtype=dtype
        )
        self.ln_pre = RMSNorm(config.hidden_size, eps=_NORM_EPS, dtype=dtype)
        self.transformer = PixtralTransformer(config, dtype=dtype)

    def __call__(
        self,
        pixel_values: Float[Array, "P _pixels"],
        *,
        places: Int[Array, "P 2"],
        segment_ids: Int[Array, " P"],
        feature_layers: Sequence[int] = (),
    ) -> tuple[Float[Array, "P D"], list[Float[Array, "P D"]]]:
        """Return the last hidden state, which is not normed, and the states asked for.

        Args:
            pixel_values: The pixels of each patch: channels, rows, columns.
            places: Its row and its column in its picture.
            segment_ids: Its picture.
            feature_layers: As HF's `hidden_states`: 0 is the normed embedding, n the output of
                block n - 1.
        """
        angles = self._angles(places)
        states = [self.ln_pre(self.patch_conv.project(pixel_values))]
        for layer in self.transformer.layers:
            states.append(call_block(layer, states[-1], angles, segment_ids))
        return states[-1], [states[layer] for layer in feature_layers]

    def _angles(self, places: Int[Array, "P 2"]) -> Angles:
        """Return the angles: every second frequency turns by the row, the others by the column."""
        theta = {"rope_theta": self.config.rope_theta}
        frequencies = inverse_frequencies(theta, self.config.head_dim)
        by_row, by_column = frequencies[0::2], frequencies[1::2]
        rows, columns = places.T
        return multimodal_angles(
            jnp.stack([rows, columns, columns]),
            np.concatenate([by_row, by_column]),
            (len(by_row), len(by_column), 0),
        )
