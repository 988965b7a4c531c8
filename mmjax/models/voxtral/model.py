"""Voxtral (arXiv 2507.13264): Whisper's encoder, four states an embedding, before Llama."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from mmjax.connectors.mlp import MLPProjector
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import WRAPPER_RULES
from mmjax.models.voxtral.host_inputs import VoxtralHostInputs
from mmjax.towers.whisper import WhisperEncoder, WhisperEncoderConfig
from mmjax.weights.rules import Rule, RuleTypes


class VoxtralForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = VoxtralHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        audio, width = hf_config.audio_config, hf_config.get_text_config().hidden_size
        with self._mark_tower_model(hf_config, "audio"):
            self.audio_tower = WhisperEncoder(WhisperEncoderConfig.from_hf(audio), dtype=dtype)
            self.multi_modal_projector = MLPProjector(
                audio.intermediate_size,
                width,
                hf_config.projector_hidden_act,
                use_bias=False,
                dtype=dtype,
            )
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
        self, input_features: Float[Array, "U C _frames"]
    ) -> Float[Array, "U P D"]:
        """Return the embeddings of 30 seconds each, those of silence behind a clip among them."""
        with jax.named_scope("audio_tower"):
            states = self.audio_tower(input_features)
        inner = self.multi_modal_projector.linear_1.weight.shape[-1]
        return self.multi_modal_projector(states.reshape(len(states), -1, inner))
