"""Gemma 3, multimodal: SigLIP, an average-pooling projector, Gemma's decoder."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.language.gemma import GemmaConfig, GemmaTextModel
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache
from mmjax.layers.embed import Embed, project_logits, soft_cap
from mmjax.layers.norm import GemmaRMSNorm
from mmjax.models.interface import EncoderSpec, SupportsMultiModal
from mmjax.towers.siglip import SiglipConfig, SiglipVisionTower
from mmjax.weights.rules import Rule


class Gemma3MultiModalProjector(nnx.Module):
    """Average-pool the patches to `mm_tokens_per_image`, norm, project to the decoder's width."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, text = hf_config.vision_config, hf_config.text_config
        self.mm_input_projection_weight = nnx.Param(
            jnp.zeros((vision.hidden_size, text.hidden_size), dtype)
        )
        self.mm_soft_emb_norm = GemmaRMSNorm(
            vision.hidden_size, eps=vision.layer_norm_eps, dtype=dtype
        )
        self.patches_per_side = vision.image_size // vision.patch_size
        self.kernel_size = self.patches_per_side // math.isqrt(hf_config.mm_tokens_per_image)

    def __call__(self, patches: Float[Array, "I P D"]) -> Float[Array, "I _tokens F"]:
        """Return the soft tokens of every image."""
        images, _, width = patches.shape
        size = self.kernel_size
        side = self.patches_per_side // size
        # AvgPool2d drops incomplete windows.
        grid = patches.reshape(images, self.patches_per_side, self.patches_per_side, width)
        grid = grid[:, : side * size, : side * size]
        windows = grid.reshape(images, side, size, side, size, width)
        pooled = windows.mean((2, 4)).reshape(images, side * side, width)
        normed = self.mm_soft_emb_norm(pooled).reshape(-1, width)
        projected = normed @ self.mm_input_projection_weight[...]
        return projected.reshape(images, side * side, -1)


class Gemma3ForConditionalGeneration(nnx.Module, SupportsMultiModal):
    """Served as HF's class of this name; see `mmjax.models.interface.MultiModalModel`.

    The soft token lies outside of the table of embeddings, and reads row 0.
    """

    RULES = (
        # the hub's layout, save_pretrained's, and the module's own names
        Rule(r"^(model\.)?vision_tower\.(vision_model\.)?head\..*", None),
        Rule(r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower."),
        Rule(r"^(language_model\.model|model\.language_model)\.", "language_model."),
        Rule(r"^model\.multi_modal_projector\.", "multi_modal_projector."),
        Rule(r"^language_model\.lm_head\.", "lm_head."),
    )
    has_bidirectional_spans = True

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.config = GemmaConfig.from_hf(hf_config.text_config)
        vision = SiglipConfig.from_hf(hf_config.vision_config)
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = SiglipVisionTower(vision, dtype=dtype)
            self.multi_modal_projector = Gemma3MultiModalProjector(hf_config, dtype=dtype)
        with self._mark_language_model(hf_config):
            self.language_model = GemmaTextModel(self.config, dtype=dtype)
        self.lm_head = (
            None
            if hf_config.tie_word_embeddings
            else Embed(self.config.vocab_size, self.config.hidden_size, dtype=dtype)
        )
        self.kv_cache_spec = self.config.kv_cache_spec
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        self.encoder_spec = EncoderSpec(
            inputs={"pixel_values": (shape, "float32")},
            tokens_per_unit=math.isqrt(hf_config.mm_tokens_per_image) ** 2,
        )

    @staticmethod
    def encoder_units(item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the image and its pan-and-scan crops as `[units, C, Y, X]`."""
        return {"pixel_values": item["pixel_values"]}

    def embed_multimodal(
        self, pixel_values: Float[Array, "I C _y _x"]
    ) -> Float[Array, "I _tokens D"]:
        """Return the soft tokens of every image or crop."""
        weight = self.vision_tower.post_layernorm.weight
        with jax.named_scope("vision_tower"):
            patches, _ = self.vision_tower(pixel_values.astype(weight.dtype))
        with jax.named_scope("multi_modal_projector"):
            return self.multi_modal_projector(patches)

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Run the decoder."""
        with jax.named_scope("language_model"):
            return self.language_model(inputs_embeds, positions[0], kv_cache, metadata)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32, soft-capped if configured."""
        head = self.lm_head if self.lm_head is not None else self.language_model.embed_tokens
        logits = project_logits(hidden_states, head.weight[...])
        return soft_cap(logits, self.config.final_logit_softcapping)
