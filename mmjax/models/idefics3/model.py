"""Idefics3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): SigLIP, a pixel shuffle, Llama."""

from typing import Any

from flax import nnx

from mmjax.layers.linear import Linear
from mmjax.models.idefics3.host_inputs import Idefics3HostInputs
from mmjax.models.tower_model import ViTModel


class Idefics3ForConditionalGeneration(ViTModel):
    """Served as HF's class of this name."""

    host_inputs = Idefics3HostInputs
    factor_key = "scale_factor"

    @staticmethod
    def build_projector(hf_config: Any, *, dtype: Any) -> nnx.Module:
        squares = hf_config.vision_config.hidden_size * hf_config.scale_factor**2
        return Linear(squares, hf_config.text_config.hidden_size, use_bias=False, dtype=dtype)


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """SmolVLM2, which also takes videos."""

    modality_names = ("image", "video")
