"""Qwen3-ASR (arXiv 2601.21337): Qwen3-Omni's encoder of sounds before Qwen3."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from mmjax.connectors.mlp import MLPProjector
from mmjax.models.interface import MultiModalModel
from mmjax.models.qwen3_asr.host_inputs import Qwen3ASRHostInputs
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import WRAPPER_RULES
from mmjax.towers.whisper import Qwen3AudioConfig, Qwen3AudioEncoder
from mmjax.weights.rules import Rule, RuleTypes


class Qwen3ASRForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = Qwen3ASRHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        audio = hf_config.audio_config
        config = Qwen3AudioConfig.from_hf(audio)
        with self._mark_tower_model(hf_config, "audio"):
            self.audio_tower = Qwen3AudioEncoder(config, dtype=dtype)
            self.audio_proj = MLPProjector(
                config.d_model,
                audio.output_dim,
                config.activation_function,
                inner=config.d_model,
                dtype=dtype,
            )
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's layouts."""
        return (
            Rule(r"^(model\.)?audio_tower\.layers\.", "audio_tower.encoder_layers."),
            Rule(r"^(model\.)?audio_tower\.", "audio_tower."),
            # HF projects the states of all clips in a row, which are not these row by row.
            Rule(r"^(model\.)?multi_modal_projector\.", "audio_proj."),
            *text_rules(hf_config),
            *WRAPPER_RULES,
        )

    def embed_multimodal(
        self,
        input_features: Float[Array, "U C _frames"],
        num_frames: Int[Array, " U"],
        num_seen: Int[Array, " U"],
    ) -> Float[Array, "U P D"]:
        """Return the embeddings of windows; those behind a clip's end are cut later."""
        with jax.named_scope("audio_tower"):
            states = self.audio_tower(input_features, num_frames, num_seen)
        return self.audio_proj(states)
