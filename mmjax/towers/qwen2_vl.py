"""The vision transformers of Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923).

Patches of any grid, packed; rotary places on two axes; a merger at the end. Qwen2.5-VL's differs by
keys of its config: RMS norms, gated MLPs, and blocks that look at a window only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.segments import segment_attention
from mmjax.layers.linear import Linear, linear
from mmjax.layers.mlp import MLP, GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm, RMSNorm
from mmjax.layers.rope import apply_rotary, inverse_frequencies, rotary_angles

_EPS = 1e-6
"""Of every norm; no key of the config says it."""

Angles = tuple[Float[Array, "P _half"], Float[Array, "P _half"]]
"""Cosines and sines of every patch: of its row, then of its column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VLVisionConfig:
    """The keys of a `qwen2_vl_vision` or `qwen2_5_vl_vision` config that the arrays depend on."""

    depth: int
    num_heads: int
    embed_dim: int
    """Width inside (Qwen2.5-VL: `hidden_size`)."""
    intermediate_size: int
    """Width inside an MLP (Qwen2-VL: `embed_dim * mlp_ratio`)."""
    out_features: int
    """Width of the decoder (Qwen2-VL: `hidden_size`, Qwen2.5-VL: `out_hidden_size`)."""
    in_channels: int
    temporal_patch_size: int
    patch_size: int
    spatial_merge_size: int
    hidden_act: str
    rope_theta: float
    is_gated: bool
    """Whether norms are RMS norms and MLPs are gated: Qwen2.5-VL."""
    full_attention_blocks: tuple[int, ...] | None
    """The blocks that see the whole frame (`fullatt_block_indexes`); None: all."""

    @classmethod
    def from_hf(cls, hf_config: Any) -> "Qwen2VLVisionConfig":
        """Read HF's vision config; `CheckpointError` for a rotary kind that it cannot have."""
        rope = hf_config.rope_parameters or {}
        kind = rope.get("rope_type", "axial")
        if kind != "axial":
            raise CheckpointError(
                f"`vision_config.rope_parameters.rope_type` is `{kind}`; expected `axial`"
            )
        names = ("depth", "num_heads", "hidden_act", "in_channels")
        names += ("temporal_patch_size", "patch_size", "spatial_merge_size")
        shared = {name: getattr(hf_config, name) for name in names}
        shared["rope_theta"] = float(rope.get("rope_theta", 10_000.0))
        if hf_config.model_type == "qwen2_5_vl_vision":
            return cls(
                **shared,
                embed_dim=hf_config.hidden_size,
                intermediate_size=hf_config.intermediate_size,
                out_features=hf_config.out_hidden_size,
                is_gated=True,
                full_attention_blocks=tuple(hf_config.fullatt_block_indexes),
            )
        return cls(
            **shared,
            embed_dim=hf_config.embed_dim,
            intermediate_size=int(hf_config.embed_dim * hf_config.mlp_ratio),
            out_features=hf_config.hidden_size,
            is_gated=False,
            full_attention_blocks=None,
        )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.embed_dim // self.num_heads


def _make_norm(config: Qwen2VLVisionConfig, *, dtype: Any) -> nnx.Module:
    kind = RMSNorm if config.is_gated else LayerNorm
    return kind(config.embed_dim, eps=_EPS, dtype=dtype)


class PatchEmbed(nnx.Module):
    """A convolution over frames, rows and columns whose stride is its kernel."""

    def __init__(self, config: Qwen2VLVisionConfig, *, dtype: Any) -> None:
        side = config.patch_size
        kernel = (config.in_channels, config.temporal_patch_size, side, side)
        self.weight = nnx.Param(jnp.zeros((config.embed_dim, *kernel), dtype))

    def __call__(self, pixel_values: Float[Array, "P _pixels"]) -> Float[Array, "P D"]:
        """Project patches whose pixels lie as the kernel's."""
        weight = self.weight[...]
        return linear(pixel_values.astype(weight.dtype), weight.reshape(len(weight), -1))


class VisionAttention(nnx.Module):
    """Attention among the patches of one segment, with rotary places."""

    def __init__(self, config: Qwen2VLVisionConfig, *, dtype: Any) -> None:
        width = config.embed_dim
        self.qkv = Linear(width, 3 * width, use_bias=True, dtype=dtype)
        self.proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.num_heads = config.num_heads
        self.scale = config.head_dim**-0.5

    def __call__(
        self, x: Float[Array, "P D"], angles: Angles, segment_ids: Int[Array, " P"]
    ) -> Float[Array, "P D"]:
        """Attend within each segment."""
        qkv = self.qkv(x).reshape(len(x), 3, self.num_heads, -1)
        # In float32, as HF does: bfloat16 would round the angles of every place.
        query, key = (
            apply_rotary(qkv[:, part].astype(jnp.float32), *angles).astype(x.dtype)
            for part in (0, 1)
        )
        out = segment_attention(query, key, qkv[:, 2], segment_ids, scale=self.scale)
        return self.proj(out.reshape(x.shape))


class VisionBlock(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: Qwen2VLVisionConfig, *, dtype: Any) -> None:
        self.norm1 = _make_norm(config, dtype=dtype)
        self.norm2 = _make_norm(config, dtype=dtype)
        self.attn = VisionAttention(config, dtype=dtype)
        self.mlp = (GatedMLP if config.is_gated else MLP)(
            config.embed_dim,
            config.intermediate_size,
            activation=config.hidden_act,
            use_bias=True,
            dtype=dtype,
        )

    def __call__(
        self, x: Float[Array, "P D"], angles: Angles, segment_ids: Int[Array, " P"]
    ) -> Float[Array, "P D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            x = x + self.attn(self.norm1(x), angles, segment_ids)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.norm2(x))


class PatchMerger(nnx.Module):
    """Each square of `spatial_merge_size` patches a side becomes one embedding."""

    def __init__(self, config: Qwen2VLVisionConfig, *, dtype: Any) -> None:
        width = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = _make_norm(config, dtype=dtype)
        self.fc1 = Linear(width, width, use_bias=True, dtype=dtype)
        self.fc2 = Linear(width, config.out_features, use_bias=True, dtype=dtype)
        self.activation = get_activation("gelu")
        self.width = width

    def __call__(self, x: Float[Array, "P D"]) -> Float[Array, "_rows _out"]:
        """Project squares; the patches of one stand behind each other."""
        return self.fc2(self.activation(self.fc1(self.ln_q(x).reshape(-1, self.width))))


class Qwen2VisionTransformer(nnx.Module):
    """Packed patches to embeddings; parameters bear HF's names."""

    def __init__(self, config: Qwen2VLVisionConfig, *, dtype: Any) -> None:
        self.patch_embed = PatchEmbed(config, dtype=dtype)
        self.blocks = nnx.List([VisionBlock(config, dtype=dtype) for _ in range(config.depth)])
        self.merger = PatchMerger(config, dtype=dtype)
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, "P _pixels"],
        places: Int[Array, "P 2"],
        segments: Sequence[Int[Array, " P"]],
    ) -> Float[Array, "_rows _out"]:
        """Return an embedding for each square of patches, in their order.

        Args:
            pixel_values: A patch a row, square by square.
            places: Row and column of each patch in its frame.
            segments: Ids of frames, and where the config has windows, ids of those.
        """
        x = self.patch_embed(pixel_values)
        angles = self._angles(places)
        full = self.config.full_attention_blocks
        for number, block in enumerate(self.blocks):
            sees_frame = full is None or number in full
            x = call_block(block, x, angles, segments[0 if sees_frame else 1])
        return self.merger(x)

    def _angles(self, places: Int[Array, "P 2"]) -> Angles:
        """Return the angles of rows in the first half, of columns in the second."""
        parameters = {"rope_theta": self.config.rope_theta}
        frequencies = inverse_frequencies(parameters, self.config.head_dim // 2)
        rows, columns = (rotary_angles(places[:, axis], frequencies) for axis in (0, 1))
        cos, sin = (jnp.concatenate(pair, axis=-1) for pair in zip(rows, columns, strict=True))
        return cos, sin
