"""The thinkers of Qwen's that see and hear, which answer in text.

Qwen2.5-Omni (arXiv 2503.20215): Qwen2.5-VL's tower, Whisper's encoder, and Qwen2. Qwen3-Omni (arXiv
2509.17765): Qwen3-VL's tower, which feeds the first layers of its decoder, an encoder of its own,
and Qwen3 with experts.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.connectors.mlp import MLPProjector
from mmjax.layers.linear import Linear
from mmjax.models.grid_model import GridModel
from mmjax.models.qwen2_5_omni.host_inputs import Qwen3OmniHostInputs, Qwen25OmniHostInputs
from mmjax.models.text_model import text_rules
from mmjax.towers.whisper import (
    Qwen3AudioConfig,
    Qwen3AudioEncoder,
    WhisperEncoder,
    WhisperEncoderConfig,
)
from mmjax.weights.rules import Rule, RuleTypes

_ANY = r"^(thinker\.)?(model\.)?"
_TEXT = (
    Rule(r"^(thinker\.)?lm_head\.", "language_model.lm_head."),
    Rule(_ANY + r"(language_model\.)?", "language_model."),
)


class OmniModel(GridModel):
    """A model of grids that hears, too."""

    # The inputs of either encoder, by name.
    def embed_multimodal(self, **inputs: Array) -> Float[Array, "..."]:  # pyrefly: ignore[bad-override]
        """Return the embeddings of packed pictures and videos, or of chunks of clips."""
        if "input_features" in inputs:
            return self.embed_clips(**inputs)
        return super().embed_multimodal(**inputs)

    def embed_clips(self, **inputs: Array) -> Float[Array, "U P _wide"]:
        """Return the embeddings of the units of clips."""
        raise NotImplementedError


class Qwen2_5OmniThinkerForConditionalGeneration(OmniModel):
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
            *_TEXT,
        )

    def embed_clips(  # pyrefly: ignore[bad-override]
        self, *, input_features: Float[Array, "U C _frames"], num_frames: Int[Array, " U"]
    ) -> Float[Array, "U P D"]:
        """Return the embeddings of chunks."""
        with jax.named_scope("audio_tower"):
            num_keys = (num_frames + 1) // 2
            states = self.audio_tower(input_features, num_keys, num_frames)
        return self.audio_proj(states)


class Qwen3OmniMoeThinkerForConditionalGeneration(OmniModel):
    """Served as HF's class of this name: text comes out, no speech."""

    host_inputs = Qwen3OmniHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        audio = hf_config.audio_config
        config = Qwen3AudioConfig.from_hf(audio)
        super().__init__(hf_config, dtype=dtype)
        self.language_model.fed_layers = self.host_inputs(hf_config).fed_layers
        with self._mark_tower_model(hf_config, "audio"):
            self.audio_tower = Qwen3AudioEncoder(config, dtype=dtype)
            self.audio_proj = MLPProjector(
                config.d_model,
                audio.output_dim,
                config.activation_function,
                inner=config.d_model,
                dtype=dtype,
            )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, where all is in a `thinker`, and HF's module's."""
        audio, visual = _ANY + r"audio_tower\.", _ANY + r"visual\."
        fed = visual + r"merger_list\.(\d+)\."
        return (
            Rule(r"^(talker|code2wav)\.", None),
            Rule(audio + r"layers\.", "audio_tower.encoder_layers."),
            Rule(audio + r"proj([12])\.", r"audio_proj.linear_\3."),
            Rule(audio, "audio_tower."),
            Rule(visual + r"patch_embed\.proj\.", "visual.patch_embed."),
            Rule(fed + r"mlp\.0\.", r"visual.deepstack_merger_list.\3.fc1."),
            Rule(fed + r"mlp\.2\.", r"visual.deepstack_merger_list.\3.fc2."),
            Rule(fed, r"visual.deepstack_merger_list.\3."),
            Rule(visual + r"merger\.mlp\.0\.", "visual.merger.fc1."),
            Rule(visual + r"merger\.mlp\.2\.", "visual.merger.fc2."),
            Rule(visual + r"blocks\.(\d+)\.mlp\.linear_(fc[12])\.", r"visual.blocks.\3.mlp.\4."),
            Rule(visual, "visual."),
            *text_rules(hf_config),
            *_TEXT,
        )

    def embed_clips(  # pyrefly: ignore[bad-override]
        self,
        *,
        input_features: Float[Array, "U C _frames"],
        num_frames: Int[Array, " U"],
        num_seen: Int[Array, " U"],
    ) -> Float[Array, "U P _wide"]:
        """Return the embeddings of windows; clips feed nothing to the decoder's first layers."""
        with jax.named_scope("audio_tower"):
            states = self.audio_tower(input_features, num_frames, num_seen)
        embeds = self.audio_proj(states)
        fed_width = len(self.language_model.fed_layers) * embeds.shape[-1]
        return jnp.pad(embeds, ((0, 0), (0, 0), (0, fed_width)))
