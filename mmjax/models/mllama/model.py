"""Llama 3.2 Vision (arXiv 2407.21783, section 7): rows of pictures are keys of cross-attention."""

from typing import Any

from jaxtyping import Array, Bool, Float

from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.models.mllama.host_inputs import NUM_MORE_TOKENS, MllamaHostInputs
from mmjax.models.text_model import build_text_model
from mmjax.models.tower_model import TowerModel
from mmjax.towers.mllama import MllamaVisionConfig, MllamaVisionTower


class MllamaForConditionalGeneration(TowerModel):
    """Served as HF's class of this name."""

    host_inputs = MllamaHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, width = hf_config.vision_config, hf_config.text_config.hidden_size
        self.max_encoder_len = MllamaHostInputs(hf_config).max_encoder_len
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = MllamaVisionTower(MllamaVisionConfig.from_hf(vision), dtype=dtype)
            self.multi_modal_projector = Linear(
                vision.vision_output_dim, width, use_bias=True, dtype=dtype
            )
        # Whatever the configuration says: the table of tokens has more rows than there are logits.
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=False)
        self.num_token_ids = hf_config.text_config.vocab_size + NUM_MORE_TOKENS
        self.language_model.embed_tokens = Embed(self.num_token_ids, width, dtype=dtype)

    def encode_prompts(
        self, inputs_embeds: Float[Array, "B S D"], is_token: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return the rows of a prompt's pictures as they are."""
        return inputs_embeds
