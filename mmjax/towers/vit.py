"""Vision transformers over images of one size, which differ by their configuration alone.

CLIP's (arXiv 2103.00020), SigLIP's (arXiv 2303.15343), OpenCLIP's as Qwen-VL has it (arXiv
2308.12966), BLIP-2's, which is EVA's (arXiv 2211.07636), InternViT (arXiv 2312.14238), the SigLIP
of Idefics3 (arXiv 2408.12637), the AIMv2 of Ovis2 (arXiv 2411.14402), the CLIP of DeepSeek-OCR
(arXiv 2510.18234), whose patches are another tower's states, and Llama 4's, whose patches turn by
their rows and columns (Meta, 2025).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP, GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm, RMSNorm
from mmjax.layers.rope import apply_interleaved_rotary, inverse_frequencies
from mmjax.layers.vision import PatchEmbedding, PositionTable, antialiased_matrix, resize_square

_NORMS: Mapping[str, type[LayerNorm | RMSNorm]] = MappingProxyType(
    {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
)
"""By `norm_type`."""
_KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "clip_vision_model": {
            **{"has_class_token": True, "has_patch_bias": False, "has_first_norm": True},
            "has_final_norm": False,  # of the pooled feature, which is not computed
        },
        "siglip_vision_model": {},
        "granite_docling_vision": {},
        "blip_2_vision_model": {"has_class_token": True, "num_channels": 3},
        # NOTE: HF finds a patch's position by its float32 place in the image, which of a whole tile
        # must be the patch's own (`models/idefics3/host_inputs.py`).
        "idefics3_vision": {},
        "smolvlm_vision": {},
        "llama4_vision_model": {
            **{"has_class_token": True, "is_class_last": True, "has_patch_bias": False},
            "has_first_norm": True,
            # HF's, whatever the config says of `norm_eps` and `hidden_act`.
            **{"layer_norm_eps": 1e-5, "hidden_act": "gelu"},
        },
        "ovis2_vision": {
            **{"norm_type": "rms_norm", "final_norm_type": "rms_norm"},
            **{"has_patch_norm": True, "is_gated": True},
        },
        # NOTE: HF resizes positions by a kernel that is wider where they become fewer, else equal.
        "unlimited_ocr_vision_encoder": {
            **{"has_class_token": True, "has_patches": False, "has_first_norm": True},
            **{"has_final_norm": False, "resizes_positions": True},
        },
    }
)
"""By `model_type`, what HF's config does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig:
    """What the arrays depend on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    """May be those up to the last that is read."""
    num_attention_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    hidden_act: str
    norm_type: str = "layer_norm"
    """Of the blocks, and of patches."""
    final_norm_type: str = "layer_norm"
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    is_gated: bool = False
    """Whether MLPs are."""
    qk_norm_eps: float | None = None
    """Of the norms of queries and keys, over all heads together; None: they are not normed."""
    has_class_token: bool = False
    """Whether there is one, before the patches."""
    is_class_last: bool = False
    """Whether it comes behind them."""
    has_patch_bias: bool = True
    has_patch_norm: bool = False
    """Whether patches are normed before their positions are added; `has_first_norm`: behind."""
    has_first_norm: bool = False
    has_final_norm: bool = True
    has_scales: bool = False
    """Whether each branch of a block is scaled before it is added (arXiv 2103.17239)."""
    has_patches: bool = True
    """Whether images are cut into patches here; else rows are given in their place."""
    takes_patches: bool = False
    """Whether patches come cut already, their pixels by row, column and channel."""
    has_positions: bool = True
    rope_theta: float | None = None
    """The base of the angles by which neighbours in a head turn, half of the pairs by the patch's
    column, half by its row, both from 1; the class token's are 0. None: nothing turns."""
    num_positions: int | None = None
    """Rows of the table of positions, which is resized to the patches; None: one for each row."""
    resizes_positions: bool = False
    """Whether a table behind a class token's is resized to images of other sizes, antialiased."""

    def __post_init__(self) -> None:
        if self.norm_type not in _NORMS:
            known = ", ".join(f"`{name}`" for name in _NORMS)
            raise CheckpointError(f"`norm_type` is `{self.norm_type}`; mmjax knows {known}")

    @staticmethod
    def from_hf(hf_config: Any, **changes: Any) -> "ViTConfig":
        """Read the `vision_config` of a kind in `_KINDS`; `CheckpointError` for no squares."""
        for name in ("image_size", "patch_size"):
            if not isinstance(getattr(hf_config, name), int):
                raise CheckpointError(
                    f"`vision_config.{name}` is {getattr(hf_config, name)!r}; a "
                    f"`{hf_config.model_type}` has one number there, the side of a square"
                )
        own = {**_KINDS[hf_config.model_type], **changes}
        return read_config(ViTConfig, hf_config, "qkv_bias", **own)

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class ViTEmbeddings(nnx.Module):
    """The patches, a class token before them where there is one, and learned positions."""

    def __init__(self, config: ViTConfig, *, dtype: Any) -> None:
        width, channels, size = config.hidden_size, config.num_channels, config.patch_size
        has_class = config.has_class_token
        self.class_embedding = nnx.Param(jnp.zeros((width,), dtype)) if has_class else None
        options = {"use_bias": config.has_patch_bias, "dtype": dtype}
        self.patch_embedding = (
            None
            if not config.has_patches
            else Linear(channels * size**2, width, **options)
            if config.takes_patches
            else PatchEmbedding(channels, width, size, **options)
        )
        self.patch_norm = (
            _NORMS[config.norm_type](width, eps=config.layer_norm_eps, dtype=dtype)
            if config.has_patch_norm
            else None
        )
        rows = config.num_positions or config.num_patches + has_class
        self.position_embedding = (
            PositionTable(rows, width, dtype=dtype) if config.has_positions else None
        )
        self.config = config

    def __call__(self, pixel_values: Float[Array, "I ..."]) -> Float[Array, "I P D"]:
        """Embed images of the config's size; or rows, of squares of any size."""
        rows = pixel_values if self.patch_embedding is None else self.patch_embedding(pixel_values)
        rows = rows if self.patch_norm is None else self.patch_norm(rows)
        if self.class_embedding is not None:
            shape = (len(rows), 1, rows.shape[-1])
            first = jnp.broadcast_to(self.class_embedding[...][None, None, :], shape)
            parts = [rows, first] if self.config.is_class_last else [first, rows]
            rows = jnp.concatenate(parts, axis=1)
        if self.position_embedding is None:
            return rows
        table = self.position_embedding.weight[...]
        if self.config.num_positions is not None:
            table = resize_square(table, self.config.image_size // self.config.patch_size)
        if self.config.resizes_positions:
            side = round((rows.shape[1] - 1) ** 0.5)
            patches = resize_square(table[1:], side, make_matrix=antialiased_matrix)
            table = jnp.concatenate([table[:1], patches])
        return rows + table[None, :, :]


class ViTAttention(nnx.Module):
    """Full attention among the rows of one image."""

    def __init__(self, config: ViTConfig, *, dtype: Any) -> None:
        width, options = config.hidden_size, {"use_bias": config.qkv_bias, "dtype": dtype}
        self.q_proj = Linear(width, width, **options)
        self.k_proj = Linear(width, width, **options)
        self.v_proj = Linear(width, width, **options)
        self.out_proj = Linear(width, width, use_bias=config.out_bias, dtype=dtype)
        eps = config.qk_norm_eps
        self.q_norm, self.k_norm = (
            None if eps is None else RMSNorm(width, eps=eps, dtype=dtype) for _ in range(2)
        )
        self.num_heads = config.num_attention_heads
        self.config = config

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Attend over `P`."""
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        head_dim = x.shape[-1] // self.num_heads
        split = (*x.shape[:2], self.num_heads, head_dim)
        query, key, value = (part.reshape(split) for part in (query, key, value))
        if self.config.rope_theta is not None:
            query, key = (self._turn(part) for part in (query, key))
        out = dense_attention(query, key, value, mask=None, scale=head_dim**-0.5)
        return self.out_proj(out.reshape(x.shape))

    def _turn(self, x: Float[Array, "I P N H"]) -> Float[Array, "I P N H"]:
        """Rotate queries or keys by their places, in float32, as in HF."""
        cos_sin = (jnp.tile(part, (len(x), 1)) for part in _find_angles(self.config, x.shape[-1]))
        rows = x.reshape(-1, *x.shape[2:]).astype(jnp.float32)
        return apply_interleaved_rotary(rows, *cos_sin).reshape(x.shape).astype(x.dtype)


def _find_angles(config: ViTConfig, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float32[P, H / 2]: the cosines and sines of patches and a class token behind them."""
    side = config.image_size // config.patch_size
    frequencies = inverse_frequencies({"rope_theta": config.rope_theta}, head_dim // 2)
    rows, columns = (1 + np.indices((side, side)).reshape(2, -1, 1)).astype(np.float32)
    angles = np.concatenate([columns * frequencies, rows * frequencies], axis=1)
    angles = np.pad(angles, ((0, int(config.is_class_last)), (0, 0)))
    return np.cos(angles), np.sin(angles)


class ViTLayer(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: ViTConfig, *, dtype: Any) -> None:
        width, make_norm = config.hidden_size, _NORMS[config.norm_type]
        self.layer_norm1 = make_norm(width, eps=config.layer_norm_eps, dtype=dtype)
        self.self_attn = ViTAttention(config, dtype=dtype)
        self.layer_norm2 = make_norm(width, eps=config.layer_norm_eps, dtype=dtype)
        self.mlp = (GatedMLP if config.is_gated else MLP)(
            width,
            config.intermediate_size,
            activation=config.hidden_act,
            use_bias=config.mlp_bias,
            dtype=dtype,
        )
        self.lambda_1, self.lambda_2 = (
            nnx.Param(jnp.zeros((width,), dtype)) if config.has_scales else None for _ in range(2)
        )

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            x = x + _scale(self.self_attn(self.layer_norm1(x)), self.lambda_1)
        with jax.named_scope("mlp"):
            return x + _scale(self.mlp(self.layer_norm2(x)), self.lambda_2)


def _scale(x: Float[Array, "I P D"], factors: nnx.Param | None) -> Float[Array, "I P D"]:
    return x if factors is None else factors[...][None, None] * x


class ViTEncoder(nnx.Module):
    """The stack of blocks."""

    def __init__(self, config: ViTConfig, *, dtype: Any) -> None:
        self.layers = nnx.List(
            ViTLayer(config, dtype=dtype) for _ in range(config.num_hidden_layers)
        )


class ViT(nnx.Module):
    """Images to the states of their rows; parameters bear the names of HF's CLIP."""

    def __init__(self, config: ViTConfig, *, dtype: Any) -> None:
        options = {"eps": config.layer_norm_eps, "dtype": dtype}
        self.embeddings = ViTEmbeddings(config, dtype=dtype)
        # HF's name is misspelt, and so are the checkpoints' tensors.
        self.pre_layrnorm = (
            LayerNorm(config.hidden_size, **options) if config.has_first_norm else None
        )
        self.encoder = ViTEncoder(config, dtype=dtype)
        self.post_layernorm = (
            _NORMS[config.final_norm_type](config.hidden_size, **options)
            if config.has_final_norm
            else None
        )

    def __call__(
        self, pixel_values: Float[Array, "I ..."], *, feature_layers: Sequence[int] = ()
    ) -> tuple[Float[Array, "I P D"], list[Float[Array, "I P D"]]]:
        """Return the last hidden state, normed if there is a norm, and the states asked for.

        `feature_layers` counts as HF's `hidden_states`: 0 is the embedding, n the output of
        block n - 1. A class token is row 0.
        """
        x = self.embeddings(pixel_values)
        states = [x if self.pre_layrnorm is None else self.pre_layrnorm(x)]
        for layer in self.encoder.layers:
            states.append(call_block(layer, states[-1]))
        last = states[-1] if self.post_layernorm is None else self.post_layernorm(states[-1])
        return last, [states[layer] for layer in feature_layers]
