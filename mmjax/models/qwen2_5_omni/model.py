"""Qwen2.5-Omni's thinker (arXiv 2503.20215): Qwen2.5-VL's tower, Whisper's encoder, and Qwen2."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from mmjax.layers.linear import Linear
from mmjax.models.grid_model import GridModel
from mmjax.models.qwen2_5_omni.host_inputs import Qwen25OmniHostInputs
from mmjax.models.text_model import text_rules
from mmjax.towers.whisper import WhisperEncoder, WhisperEncoderConfig
from mmjax.weights.rules import Rule, RuleTypes

_ANY = r"^(thinker\.)?(model\.)?"


class Qwen2_5OmniThinkerForConditionalGeneration(GridModel):
    """Served as HF's class of this name: text comes out, no speech."""

    host_inputs = Qwen25OmniHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        audio = hf_config.audio_config
        config = WhisperEncoderConfig.from_hf(
            audio, max_source_positions=audio.n_window, pool_size=2, is_chunked=True
        )
        super().__init__(hf_config, dtype=dtype)
        with self._mark_tower_model(hf_config, "audio"):
            self.audio_tower = WhisperEncoder(config, dtype=dtype)
            self.audio_proj = Linear(config.d_model, audio.output_dim, use_bias=True, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, where all is in a `thinker`, and HF's module's."""
        audio, visual = _ANY + r"audio_tower\.", _ANY + r"visual\."
        return (
            Rule(r"^(talker|token2wav)\.", None),
            Rule(audio + r"audio_bos_eos_token\.", None),
            Rule(audio + r"layers\.", "audio_tower.encoder_layers."),
            Rule(audio + r"ln_post\.", "audio_tower.layer_norm."),
            Rule(audio + r"proj\.", "audio_proj."),
            Rule(audio, "audio_tower."),
            Rule(visual + r"patch_embed\.proj\.", "visual.patch_embed."),
            Rule(visual + r"merger\.mlp\.0\.", "visual.merger.fc1."),
            Rule(visual + r"merger\.mlp\.2\.", "visual.merger.fc2."),
            Rule(visual + r"(blocks\.\d+\.attn)\.([qkv])\.", r"visual.\3.\4_proj."),
            Rule(visual, "visual."),
            *text_rules(hf_config),
            Rule(r"^(thinker\.)?lm_head\.", "language_model.lm_head."),
            Rule(_ANY + r"(language_model\.)?", "language_model."),
        )

    # The inputs of either encoder, by name.
    def embed_multimodal(self, **inputs: Array) -> Float[Array, "..."]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the embeddings of packed pictures and videos, or of chunks of clips."""
        if "input_features" in inputs:
            return self._embed_clips(**inputs)
        return super().embed_multimodal(**inputs)

    def _embed_clips(
        self, *, input_features: Float[Array, "U C _frames"], num_frames: Int[Array, " U"]
    ) -> Float[Array, "U P D"]:
        with jax.named_scope("audio_tower"):
            num_keys = (num_frames + 1) // 2
            states = self.audio_tower(input_features, num_keys, num_frames)
        return self.audio_proj(states)
