"""SigLIP's vision encoder (Zhai et al., arXiv 2303.15343)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import PatchEmbedding


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipConfig:
    """The keys of a `siglip_vision_model` config that the arrays depend on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    hidden_act: str

    @classmethod
    def from_hf(cls, hf_config: Any) -> "SiglipConfig":
        """Read HF's `SiglipVisionConfig`."""
        return cls(**{name: getattr(hf_config, name) for name in cls.__dataclass_fields__})

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class SiglipEmbeddings(nnx.Module):
    """Patch embeddings plus learned position embeddings."""

    def __init__(self, config: SiglipConfig, *, dtype: Any) -> None:
        self.patch_embedding = PatchEmbedding(
            config.num_channels, config.hidden_size, config.patch_size, use_bias=True, dtype=dtype
        )
        self.position_embedding = PositionTable(config.num_patches, config.hidden_size, dtype=dtype)

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Embed images of the config's `image_size`."""
        patches = self.patch_embedding(pixel_values)
        return patches + self.position_embedding.weight[...][None, :, :]


class PositionTable(nnx.Module):
    """Learned position embeddings: parameter `weight[P, D]`."""

    def __init__(self, num_positions: int, dim: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((num_positions, dim), dtype))


class SiglipAttention(nnx.Module):
    """Full attention among the patches of an image."""

    def __init__(self, config: SiglipConfig, *, dtype: Any) -> None:
        width = config.hidden_size
        self.q_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.k_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.v_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.out_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.num_heads = config.num_attention_heads

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Attend over `P`."""
        head_dim = x.shape[-1] // self.num_heads
        split = (*x.shape[:2], self.num_heads, head_dim)
        query, key, value = (
            project(x).reshape(split) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = dense_attention(query, key, value, mask=None, scale=head_dim**-0.5)
        return self.out_proj(out.reshape(x.shape))


class SiglipMLP(nnx.Module):
    """Two linear layers and an activation."""

    def __init__(self, config: SiglipConfig, *, dtype: Any) -> None:
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, use_bias=True, dtype=dtype)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, use_bias=True, dtype=dtype)
        self.activation = get_activation(config.hidden_act)

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Transform every patch by itself."""
        return self.fc2(self.activation(self.fc1(x)))


class SiglipLayer(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: SiglipConfig, *, dtype: Any) -> None:
        eps, width = config.layer_norm_eps, config.hidden_size
        self.layer_norm1 = LayerNorm(width, eps=eps, dtype=dtype)
        self.self_attn = SiglipAttention(config, dtype=dtype)
        self.layer_norm2 = LayerNorm(width, eps=eps, dtype=dtype)
        self.mlp = SiglipMLP(config, dtype=dtype)

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        """Return the residual stream after this block."""
        with jax.named_scope("attn"):
            x = x + self.self_attn(self.layer_norm1(x))
        with jax.named_scope("mlp"):
            return x + self.mlp(self.layer_norm2(x))


class SiglipEncoder(nnx.Module):
    """The stack of blocks."""

    def __init__(self, config: SiglipConfig, *, dtype: Any) -> None:
        blocks = [SiglipLayer(config, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.layers = nnx.List(blocks)


class SiglipVisionTower(nnx.Module):
    """Images to patch features, with HF's parameter names."""

    def __init__(self, config: SiglipConfig, *, dtype: Any) -> None:
        self.embeddings = SiglipEmbeddings(config, dtype=dtype)
        self.encoder = SiglipEncoder(config, dtype=dtype)
        self.post_layernorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(
        self, pixel_values: Float[Array, "I C _y _x"], *, feature_layers: Sequence[int] = ()
    ) -> tuple[Float[Array, "I P D"], list[Float[Array, "I P D"]]]:
        """Return the normed last hidden state, and those of `feature_layers`.

        `feature_layers` counts as HF's `hidden_states`: 0 is the embedding, n the output of
        block n - 1.
        """
        hidden = self.embeddings(pixel_values)
        states = [hidden]
        for layer in self.encoder.layers:
            hidden = layer(hidden)
            states.append(hidden)
        return self.post_layernorm(hidden), [states[layer] for layer in feature_layers]
