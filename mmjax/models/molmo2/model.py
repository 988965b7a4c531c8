"""Molmo 2 (arXiv 2601.10611): SigLIP 2, pooling by attention, Qwen3's or OLMo 3's decoder.

An image's features are added to the embedding of the token at whose place they stand.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.connectors.pooling import AttentionPooling
from mmjax.errors import CheckpointError, check_settings
from mmjax.layers.mlp import GatedMLP
from mmjax.models.molmo2.host_inputs import CropShape, Molmo2HostInputs, read_prompt_ids
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import AddedTokensModel, molmo_rules
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes, Split

_TOWER = Rule(r"^model\.(?:vision_backbone\.image_vit|vision_tower)\.", "vision_tower.")
_CONNECTORS = Rule(r"^model\.(?:vision_backbone|multi_modal_projector)\.", "")


class Molmo2ForConditionalGeneration(AddedTokensModel):
    """Served as HF's class of this name."""

    host_inputs = Molmo2HostInputs
    sees = "all_items"

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        text, adapter = hf_config.text_config, hf_config.adapter_config
        _check_widths(hf_config)
        self.crop = CropShape.of(hf_config)
        self.prompt_ids = tuple(read_prompt_ids(hf_config))
        new = text.additional_vocab_size
        self.add_tokens(text.vocab_size, new, text.hidden_size, dtype=dtype)
        if not all(self.vocab_size <= one < self.num_token_ids for one in self.prompt_ids):
            raise CheckpointError(
                f"config.json gives the tokens of images the ids {list(self.prompt_ids)}; they "
                f"must be those of the additional table, {self.vocab_size} and up"
            )
        self.feature_layers = _read_states(hf_config)
        tower = read_config(
            ViTConfig,
            hf_config.vision_config,
            num_hidden_layers=max(self.feature_layers),
            image_size=hf_config.vision_config.image_size[0],
            has_final_norm=False,
            takes_patches=True,
        )
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = ViT(tower, dtype=dtype)
            self.image_pooling_2d = AttentionPooling(
                len(self.feature_layers) * adapter.hidden_size,
                adapter.hidden_size,
                num_heads=adapter.num_attention_heads,
                dtype=dtype,
            )
            self.image_projector = GatedMLP(
                adapter.hidden_size,
                adapter.intermediate_size,
                out_features=adapter.text_hidden_size,
                activation=adapter.hidden_act,
                dtype=dtype,
            )
        # A tied head could have no row for the tokens behind the vocabulary: HF's is its own, too.
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=False)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Cut what is fused, map the names, and drop the blocks that nobody reads."""
        text = hf_config.text_config
        # Of a published config, HF counts up to the last block that is read; files may have more.
        num_read = max(_read_states(hf_config))
        unread = range(num_read, max(hf_config.vision_config.num_hidden_layers, num_read + 2))
        return (
            *molmo_rules(_TOWER, _CONNECTORS, unread),
            *text_rules(hf_config),
            Split(
                r"^model\.language_model\.embed_tokens\.weight$",
                ["language_model.embed_tokens.weight", "new_embed_tokens.weight"],
                [text.vocab_size, text.additional_vocab_size],
            ),
            Rule(r"^model\.language_model\.", "language_model."),
            Rule(r"^lm_head\.", "language_model.lm_head."),
        )

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the embeddings of `MARKS`."""
        return self._embed_marks()[1:]

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "P _pixels"],
        pooling: Int[Array, "P _slots"],
        segment_ids: Int[Array, " P"],
    ) -> Float[Array, "_outputs D"]:
        """Return the embedding of every window: its features, and the patch token's under them."""
        with jax.named_scope("vision_tower"):
            features = self._encode_crops(pixel_values)
        windows = _number_windows(pooling, segment_ids, self.crop.rows_per_output)
        with jax.named_scope("image_pooling_2d"):
            patches = features.at[jnp.maximum(windows, 0)].get(mode="fill", fill_value=0)
            pooled = self.image_pooling_2d(patches, windows >= 0)
        with jax.named_scope("image_projector"):
            projected = self.image_projector(pooled)
        return projected + self._embed_marks()[:1]

    def _embed_marks(self) -> Float[Array, "_ids D"]:
        """Return the embeddings of the patch token and of `MARKS`, which no adapter changes."""
        places = [token_id - self.vocab_size for token_id in self.prompt_ids]
        return self.new_embed_tokens(jnp.array(places, jnp.int32))

    def _encode_crops(
        self, pixel_values: Float[Array, "P _pixels"]
    ) -> Float[Array, "_rows _width"]:
        """Return the states that are read, side by side, of each row of the crops of a pack."""
        rows, patches = self.crop.rows, self.crop.side**2
        crops = pixel_values.reshape(-1, rows, pixel_values.shape[-1])[:, :patches]
        dtype = self.new_embed_tokens.weight.dtype
        _, states = self.vision_tower(crops.astype(dtype), feature_layers=self.feature_layers)
        features = jnp.concatenate(states, axis=-1)
        padded = jnp.pad(features, ((0, 0), (0, rows - patches), (0, 0)))
        return padded.reshape(len(pixel_values), -1)


def _number_windows(
    pooling: Int[Array, "P _slots"], segment_ids: Int[Array, " P"], rows_per_output: int
) -> Int[Array, "_outputs _patches"]:
    """Return each output's patches as rows of the pack: `pooling` counts from its item's first."""
    places = jnp.arange(len(segment_ids), dtype=jnp.int32)
    is_first = segment_ids != jnp.roll(segment_ids, 1)
    first = jax.lax.cummax(jnp.where(is_first, places, 0))
    rows = jnp.where(pooling < 0, pooling, pooling + first[:, None])
    # Of padding, pooling is 0: its own rows, of which nothing reads the output.
    return rows.reshape(len(pooling) // rows_per_output, -1)


def _read_states(hf_config: Any) -> tuple[int, ...]:
    """Return which of the tower's states are read: n is the output of block n - 1."""
    num_blocks, given = hf_config.vision_config.num_hidden_layers, hf_config.adapter_config
    return tuple(layer % num_blocks + 1 for layer in given.vision_feature_layer)


def _check_widths(hf_config: Any) -> None:
    """Refuse heads that would not fill a width, and what the published layers do not have."""
    for key in ("vision_config", "adapter_config"):
        part = getattr(hf_config, key)
        heads = part.num_attention_heads
        wanted = {
            "num_key_value_heads": heads,
            "head_dim": part.hidden_size // heads,
            "attention_bias": True,
            "mlp_bias": False,
        }
        source = f"{heads} heads and a `hidden_size` of {part.hidden_size} ask for"
        check_settings(part, wanted, where=f"`{key}`", source=source)
