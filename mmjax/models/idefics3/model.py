"""Idefics3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): SigLIP, a pixel shuffle, Llama."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from mmjax.connectors.shuffle import pixel_shuffle
from mmjax.layers.linear import Linear
from mmjax.models.idefics3.host_inputs import Idefics3HostInputs
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes


class Idefics3SimpleMLP(nnx.Module):
    """A product; parameter `proj`."""

    def __init__(self, in_features: int, out_features: int, *, dtype: Any) -> None:
        self.proj = Linear(in_features, out_features, use_bias=False, dtype=dtype)


class Idefics3Connector(nnx.Module):
    """Each square of `scale_factor` x `scale_factor` patches becomes one embedding."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.factor = hf_config.scale_factor
        width, text = hf_config.vision_config.hidden_size, hf_config.text_config
        self.modality_projection = Idefics3SimpleMLP(
            width * self.factor**2, text.hidden_size, dtype=dtype
        )

    def __call__(self, patches: Float[Array, "I P D"]) -> Float[Array, "I _tokens F"]:
        """Return the embeddings of every unit; the patches of a square lie row by row."""
        return self.modality_projection.proj(pixel_shuffle(patches, self.factor))


class Idefics3ForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name; parameters bear its names."""

    host_inputs = Idefics3HostInputs
    modality_names = ("image",)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        with self._mark_tower_model(hf_config, {*self.modality_names}):
            self.vision_model = ViT(ViTConfig.from_hf(hf_config.vision_config), dtype=dtype)
            self.connector = Idefics3Connector(hf_config, dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        return (
            Rule(r"^model\.text_model\.", "language_model."),
            Rule(r"^lm_head\.", "language_model.lm_head."),
            Rule(r"^model\.", ""),
        )

    def embed_multimodal(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        with jax.named_scope("vision_model"):
            states, _ = self.vision_model(pixel_values)
        with jax.named_scope("connector"):
            return self.connector(states)


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """SmolVLM2, which also takes videos."""

    modality_names = ("image", "video")
