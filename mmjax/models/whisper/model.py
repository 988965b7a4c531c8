"""Whisper (arXiv 2212.04356): its encoder over a clip, and a decoder that attends to all of it."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.whisper.alignment import read_alignment_heads
from mmjax.models.whisper.host_inputs import WhisperHostInputs
from mmjax.towers.whisper import WhisperEncoder, WhisperEncoderConfig
from mmjax.weights.rules import Rule, RuleTypes


class WhisperForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = WhisperHostInputs
    find_alignment_heads = staticmethod(read_alignment_heads)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.max_encoder_len = hf_config.max_source_positions
        with self._mark_tower_model(hf_config, "audio"):
            self.encoder = WhisperEncoder(WhisperEncoderConfig.from_hf(hf_config), dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's layout."""
        return (
            *text_rules(hf_config),
            Rule(r"^model\.encoder\.", "encoder."),
            Rule(r"^model\.decoder\.layer_norm\.", "language_model.norm."),
            Rule(r"^model\.decoder\.", "language_model."),
            Rule(r"^proj_out\.", "language_model.lm_head."),
        )

    def embed_multimodal(
        self, input_features: Float[Array, "U C _frames"]
    ) -> Float[Array, "U P D"]:
        """Return the encoder's states of clips, to which the decoder attends."""
        with jax.named_scope("encoder"):
            return self.encoder(input_features)

    def align(
        self,
        token_ids: Int[Array, " T"],
        states: Float[Array, "S D"],
        heads: Sequence[tuple[int, int]],
    ) -> Float[Array, "_heads T S"]:
        """Return how much the tokens of one transcript attend to its clip's states."""
        with jax.named_scope("align"):
            decoder: Any = self.language_model
            return decoder.align(token_ids, states, heads)

    def encode_prompts(
        self, inputs_embeds: Float[Array, "B S D"], is_token: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return the clip's states as they are: the encoder's prompt is the clip alone."""
        return inputs_embeds
