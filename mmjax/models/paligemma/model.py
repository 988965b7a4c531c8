"""PaliGemma 1 (arXiv 2407.07726) and 2 (2412.03555): SigLIP, one linear layer, Gemma 1 or 2.

A prompt, of images and text, sees itself in both directions; the answer is causal.
"""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.errors import check_settings
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache
from mmjax.layers.linear import Linear
from mmjax.models.host_inputs import UnitHostInputs
from mmjax.models.retrieval.vectors import RetrievalModel
from mmjax.models.tower_model import ViTModel


class PaliGemmaForConditionalGeneration(ViTModel):
    """Served as HF's class of this name."""

    host_inputs = UnitHostInputs
    sees = "prompt"

    @staticmethod
    def build_projector(hf_config: Any, *, dtype: Any) -> nnx.Module:
        vision, width = hf_config.vision_config, hf_config.text_config.hidden_size
        source = "`text_config.hidden_size` is"
        check_settings(vision, {"projection_dim": width}, where="`vision_config`", source=source)
        return Linear(vision.hidden_size, width, use_bias=True, dtype=dtype)

    def __call__(
        self,
        inputs_embeds: Float[Array, "T _wide"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        **more: Array,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """As every model; positions count from 1 (HF: modeling_paligemma.py)."""
        return super().__call__(inputs_embeds, positions + 1, kv_cache, metadata, **more)


class ColPaliForRetrieval(RetrievalModel, PaliGemmaForConditionalGeneration):
    """Served as HF's class of this name: a vector for each token."""
