"""Ultravox (github.com/fixie-ai/ultravox): Whisper's encoder, stacked states, before a decoder."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear
from mmjax.layers.norm import RMSNorm
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import WRAPPER_RULES
from mmjax.models.ultravox.host_inputs import UltravoxConfig, UltravoxHostInputs
from mmjax.rounding import cdiv
from mmjax.towers.whisper import FRAMES_PER_STATE, WhisperEncoder, WhisperEncoderConfig
from mmjax.weights.rules import Rule, RuleTypes

_EPS = 1e-6
"""The epsilon of the projector's norms; no key of the config names it."""
_WHISPER = r"^audio_tower\.(?:model\.)?"
"""Before the names of a Whisper's files, of which the encoder's alone are read."""


class UltravoxProjector(nnx.Module):
    """Stacked states to embeddings, by the published names."""

    def __init__(self, config: UltravoxConfig, state_width: int, width: int, *, dtype: Any) -> None:
        features, inner = state_width * config.stack_factor, config.hidden_size
        middle = inner // 2 if config.is_gated else inner
        has_mid = config.projector_ln_mid
        self.ln_pre = RMSNorm(features, eps=_EPS, dtype=dtype)
        self.linear_1 = Linear(features, inner, use_bias=False, dtype=dtype)
        self.ln_mid = RMSNorm(middle, eps=_EPS, dtype=dtype) if has_mid else None
        self.linear_2 = Linear(middle, width, use_bias=False, dtype=dtype)
        self.ln_post = None if has_mid else RMSNorm(width, eps=_EPS, dtype=dtype)
        self.config = config
        self.activation = get_activation("silu" if config.is_gated else config.projector_act)

    def __call__(self, states: Float[Array, "U _states D"]) -> Float[Array, "U P F"]:
        """Stack states, zeros behind the last, and transform every stack by itself."""
        num_units, num_states, width = states.shape
        size = self.config.stack_factor
        num_rows = cdiv(num_states, size)
        padded = jnp.pad(states, ((0, 0), (0, num_rows * size - num_states), (0, 0)))
        x = self.linear_1(self.ln_pre(padded.reshape(num_units, num_rows, size * width)))
        if self.config.is_gated:
            value, gate = jnp.split(x, 2, axis=-1)
            x = self.activation(gate) * value
        else:
            x = self.activation(x)
        x = self.linear_2(x if self.ln_mid is None else self.ln_mid(x))
        return x if self.ln_post is None else self.ln_post(x)


class UltravoxModel(MultiModalModel):
    """Served as the published class of this name, which transformers has none of."""

    host_inputs = UltravoxHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        config = UltravoxConfig.from_hf(hf_config)
        audio, text_config = hf_config.audio_config, hf_config.get_text_config()
        widths = (audio.d_model, text_config.hidden_size)
        with self._mark_tower_model(hf_config, "audio"):
            self.audio_tower = WhisperEncoder(WhisperEncoderConfig.from_hf(audio), dtype=dtype)
            self.multi_modal_projector = UltravoxProjector(config, *widths, dtype=dtype)
        # The decoder is a model of its own, whose own key says so.
        is_tied = text_config.tie_word_embeddings
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=is_tied)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the published layout, and the files of the checkpoints that config.json names."""
        return (
            Rule(_WHISPER + r"(?:decoder\.|proj_out\.)", None),
            Rule(_WHISPER + r"(?:encoder\.)?", "audio_tower."),
            *text_rules(hf_config),
            *WRAPPER_RULES,
        )

    def embed_multimodal(
        self,
        input_features: Float[Array, "U C _frames"],
        num_keys: Int[Array, " U"],
        num_frames: Int[Array, " U"],
    ) -> Float[Array, "U P D"]:
        """Return the embeddings of chunks of 30 seconds; those behind a clip's end are cut later.

        `num_frames`: of a chunk, behind which nothing is computed: zeros stand there.
        """
        with jax.named_scope("audio_tower"):
            states = self.audio_tower(input_features, num_keys, num_frames)
            places = jnp.arange(states.shape[1], dtype=jnp.int32)
            num_states = (num_frames - 1) // FRAMES_PER_STATE + 1
            is_computed = places[None, :] < num_states[:, None]
            states = jnp.where(is_computed[:, :, None], states, 0)
        return self.multi_modal_projector(states)
