"""Qwen2-Audio (arXiv 2407.10759): Whisper's encoder, averaged in pairs, before Qwen2."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from mmjax.layers.linear import Linear
from mmjax.models.interface import MultiModalModel
from mmjax.models.qwen2_audio.host_inputs import Qwen2AudioHostInputs
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import WRAPPER_RULES
from mmjax.towers.whisper import WhisperEncoder, WhisperEncoderConfig
from mmjax.weights.rules import Rule, RuleTypes


class Qwen2AudioForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = Qwen2AudioHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        config = WhisperEncoderConfig.from_hf(hf_config.audio_config, pool_size=2)
        width = hf_config.get_text_config().hidden_size
        with self._mark_tower_model(hf_config, "audio"):
            self.audio_tower = WhisperEncoder(config, dtype=dtype)
            self.multi_modal_projector = Linear(config.d_model, width, use_bias=True, dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=False)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's layouts."""
        return (
            Rule(r"^(model\.)?audio_tower\.", "audio_tower."),
            *text_rules(hf_config),
            *WRAPPER_RULES,
        )

    def embed_multimodal(
        self, input_features: Float[Array, "U C _frames"], num_keys: Int[Array, " U"]
    ) -> Float[Array, "U P D"]:
        """Return the embeddings of 30 seconds each; those behind a clip's end are cut later."""
        with jax.named_scope("audio_tower"):
            states = self.audio_tower(input_features, num_keys)
        return self.multi_modal_projector(states)
