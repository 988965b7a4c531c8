"""BLIP-2's vision encoder: EVA's ViT (arXiv 2211.07636), with one product for q, k and v."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import PatchEmbedding, VisionEncoder, VisionLayer

_NUM_CHANNELS = 3
"""The config has no key for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blip2VisionConfig:
    """The keys of a `blip_2_vision_model` config that the arrays depend on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    patch_size: int
    hidden_act: str
    layer_norm_eps: float
    qkv_bias: bool

    @classmethod
    def from_hf(cls, hf_config: Any) -> "Blip2VisionConfig":
        """Read HF's `Blip2VisionConfig`; `CheckpointError` for sizes that are no squares."""
        for name in ("image_size", "patch_size"):
            value = getattr(hf_config, name)
            if not isinstance(value, int):
                raise CheckpointError(
                    f"`vision_config.{name}` is {value}; BLIP-2's pictures and patches are "
                    "squares: give one integer"
                )
        return cls(**{name: getattr(hf_config, name) for name in cls.__dataclass_fields__})

    @property
    def num_positions(self) -> int:
        """Patches of an image, and the class token before them."""
        return (self.image_size // self.patch_size) ** 2 + 1


class Blip2VisionEmbeddings(nnx.Module):
    """The class token and the patches, plus learned position embeddings."""

    def __init__(self, config: Blip2VisionConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.class_embedding = nnx.Param(jnp.zeros((1, 1, width), dtype))
        self.patch_embedding = PatchEmbedding(
            _NUM_CHANNELS, width, config.patch_size, use_bias=True, dtype=dtype
        )
        self.position_embedding = nnx.Param(jnp.zeros((1, config.num_positions, width), dtype))

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Embed images of the config's `image_size`."""
        patches = self.patch_embedding(pixel_values)
        first = jnp.broadcast_to(self.class_embedding[...], (patches.shape[0], 1, patches.shape[2]))
        return jnp.concatenate([first, patches], axis=1) + self.position_embedding[...]


class Blip2Attention(nnx.Module):
    """Full attention among the rows of an image."""

    def __init__(self, config: Blip2VisionConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.qkv = Linear(width, 3 * width, use_bias=config.qkv_bias, dtype=dtype)
        self.projection = Linear(width, width, use_bias=True, dtype=dtype)
        self.num_heads = config.num_attention_heads

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Attend over `P`."""
        head_dim = x.shape[-1] // self.num_heads
        mixed = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, head_dim)
        query, key, value = (mixed[:, :, i] for i in range(3))
        out = dense_attention(query, key, value, mask=None, scale=head_dim**-0.5)
        return self.projection(out.reshape(x.shape))


class Blip2VisionModel(nnx.Module):
    """Images to features of the class token and the patches, with HF's parameter names."""

    def __init__(self, config: Blip2VisionConfig, *, dtype: Any) -> None:
        self.embeddings = Blip2VisionEmbeddings(config, dtype=dtype)
        self.encoder = VisionEncoder(
            _build_layer(config, dtype=dtype) for _ in range(config.num_hidden_layers)
        )
        self.post_layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Return the normed last hidden state."""
        hidden, _ = self.encoder(self.embeddings(pixel_values))
        return self.post_layernorm(hidden)


def _build_layer(config: Blip2VisionConfig, *, dtype: Any) -> nnx.Module:
    width, inner = config.hidden_size, config.intermediate_size
    attention = Blip2Attention(config, dtype=dtype)
    mlp = MLP(width, inner, activation=config.hidden_act, dtype=dtype)
    return VisionLayer(attention, mlp, width, eps=config.layer_norm_eps, dtype=dtype)
