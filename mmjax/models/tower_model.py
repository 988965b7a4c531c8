"""HF's layout since LLaVA: a `vision_tower`, a `multi_modal_projector`, a `language_model`."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.connectors.mlp import MLPProjector
from mmjax.errors import CheckpointError
from mmjax.layers.embed import Embed
from mmjax.layers.vision import join_squares
from mmjax.models.host_inputs import choose_features
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes

TOWER = r"^(model\.)?vision_(?:tower|encoder|model)\.(vision_model\.)?"
"""Before a tower's names in the hub's layout, in save_pretrained's, and in the module's own."""
WRAPPER_RULES = (
    Rule(r"^(language_model\.)?lm_head\.", "language_model.lm_head."),
    Rule(r"^(language_model\.model|model\.(?:language|text)_model)\.", "language_model."),
    # Of HF's projectors that are one layer, the layer.
    Rule(
        r"^(model\.)?(multi_modal_projector|vision_projection|connector)\."
        r"(linear\.|modality_projection\.proj\.)?",
        "multi_modal_projector.",
    ),
    Rule(r"^model\.(vision_tower|vision_embed_tokens)\.", r"\1."),
)
"""What stands around a tower, in the same three layouts."""
_BLOCK = TOWER + r"encoder\.layers\.(\d+)\."
PACKED_SIGLIP_RULES = (
    Rule(TOWER + r"embeddings\.patch_embedding\.", "vision_tower.patch_embed."),
    Rule(TOWER + r"embeddings\.position_embedding\.", "vision_tower.pos_embed."),
    Rule(TOWER + r"embeddings\.$", None),  # HF's module of both has no output here
    Rule(_BLOCK + r"layer_norm([12])\.", r"vision_tower.blocks.\3.norm\4."),
    Rule(_BLOCK + r"self_attn\.out_proj\.", r"vision_tower.blocks.\3.attn.proj."),
    Rule(_BLOCK + r"self_attn\.", r"vision_tower.blocks.\3.attn."),
    Rule(_BLOCK, r"vision_tower.blocks.\3."),
)
"""A SigLIP's names in the same layouts, of a `PackedViT`; the first decides."""


def molmo_rules(tower: Rule, connectors: Rule, unread: Iterable[int]) -> list[Rule]:
    """Return rules from names in Molmo's files, or HF's module, to the tree's; the first decides.

    `tower` is of what stands before the tower's names, `connectors` of what does before those of
    pooling and projector. The blocks of these numbers are left out.
    """
    (prefix, tree), (before, ours) = ((x.pattern, x.replacement) for x in (tower, connectors))
    blocks = prefix + r"(?:transformer\.resblocks|layers)\."
    block, layer = blocks + r"(\d+)\.", rf"{tree}encoder.layers.\1."
    names = {
        block + r"(?:attention\.wo|self_attn\.o_proj)\.": layer + "self_attn.out_proj.",
        block + r"(?:attention\.w|self_attn\.)([qkv])(?:_proj)?\.": layer + r"self_attn.\2_proj.",
        block + r"(?:attention_norm|layer_norm1)\.": layer + "layer_norm1.",
        block + r"(?:ffn_norm|layer_norm2)\.": layer + "layer_norm2.",
        block + r"(?:feed_forward\.w|mlp\.fc)([12])\.": layer + r"mlp.fc\2.",
        block: layer,
        prefix + r"positional_embedding$": f"{tree}embeddings.position_embedding.weight",
        prefix + r"(class|patch)_embedding": rf"{tree}embeddings.\1_embedding",
        prefix + r"pre_ln\.": f"{tree}pre_layrnorm.",
        before + r"image_pooling_2d\.([qkvo])_proj\.": rf"{ours}image_pooling_2d.w\1.",
        before + r"image_projector\.w1\.": f"{ours}image_projector.gate_proj.",
        before + r"image_projector\.w2\.": f"{ours}image_projector.down_proj.",
        before + r"image_projector\.w3\.": f"{ours}image_projector.up_proj.",
    }
    return [
        *(Rule(rf"{blocks}{number}\.", None) for number in unread),
        *(Rule(pattern, name) for pattern, name in names.items()),
        connectors,
    ]


class AddedTokensModel(MultiModalModel):
    """Tokens behind the vocabulary have embeddings and no logits: they are never sampled."""

    vocab_size: int
    new_embed_tokens: Embed

    def add_tokens(self, vocab_size: int, number: int, width: int, *, dtype: Any) -> None:
        """Build the table of so many tokens behind a vocabulary."""
        self.vocab_size, self.num_token_ids = vocab_size, vocab_size + number
        self.new_embed_tokens = Embed(number, width, dtype=dtype)

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens, those behind the vocabulary in a table of their own."""
        is_new = token_ids >= self.vocab_size
        new = self.new_embed_tokens(token_ids - self.vocab_size)
        return jnp.where(is_new[:, None], new, super().embed_input_ids(token_ids))


class TowerModel(MultiModalModel):
    """A tower's states, projected."""

    vision_tower: Any
    multi_modal_projector: Any
    modality_names: ClassVar[Sequence[str]] = ("image",)

    def _set_parts(self, tower: nnx.Module, hf_config: Any, *, dtype: Any) -> None:
        """Set the tower, and what `build_projector` and `is_tied` say of the others."""
        with self._mark_tower_model(hf_config, {*self.modality_names}):
            self.vision_tower = tower
            self.multi_modal_projector = self.build_projector(hf_config, dtype=dtype)
        is_tied = self.is_tied(hf_config)
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=is_tied)

    @staticmethod
    def build_projector(hf_config: Any, *, dtype: Any) -> nnx.Module:
        """Return what makes embeddings of what `encode_units` gives."""
        raise NotImplementedError

    @staticmethod
    def is_tied(hf_config: Any) -> bool:
        """Return whether the head is the table of tokens."""
        return hf_config.tie_word_embeddings

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the three layouts; a pooling head of the tower is not read."""
        return (
            Rule(TOWER + r"head\.", None),
            Rule(TOWER, "vision_tower."),
            *text_rules(hf_config),
            *WRAPPER_RULES,
        )

    # As every signature that a family gives it.
    def embed_multimodal(self, *args: Any, **inputs: Any) -> Array:
        """Return the embeddings of every unit, or of every patch of a pack."""
        with jax.named_scope("vision_tower"):
            states = self.encode_units(*args, **inputs)
        with jax.named_scope("multi_modal_projector"):
            return self.multi_modal_projector(states)

    def encode_units(self, *args: Any, **inputs: Any) -> Array:
        """Return what the projector reads of the tower."""
        return self.vision_tower(*args, **inputs)


class ViTModel(TowerModel):
    """The projector reads a ViT's last states: each patch's, or those of squares of patches."""

    factor_key: ClassVar[str | None] = None
    """Of the config: how many patches are along a square's side; None: a patch is one."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.factor = 1 if self.factor_key is None else attrgetter(self.factor_key)(hf_config)
        self._set_parts(ViT(self.read_tower(hf_config), dtype=dtype), hf_config, dtype=dtype)

    @staticmethod
    def read_tower(hf_config: Any) -> ViTConfig:
        """Return the tower's configuration."""
        return ViTConfig.from_hf(hf_config.vision_config)

    def encode_units(
        self, pixel_values: Float[Array, "I C _y _x"]
    ) -> Float[Array, "I _tokens _width"]:
        """Return the states of every unit, those of a square beside each other."""
        states, _ = self.vision_tower(pixel_values)
        return states if self.factor_key is None else join_squares(states, self.factor)


class FeatureLayersModel(TowerModel):
    """LLaVA's: the projector reads one or several states of the tower (`vision_feature_layer`)."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.feature_layers = read_feature_layers(hf_config)
        self.strategy = getattr(hf_config, "vision_feature_select_strategy", "full")
        # No further than the last state that is read.
        tower = self.build_tower(hf_config, max(self.feature_layers), dtype=dtype)
        self._set_parts(tower, hf_config, dtype=dtype)

    @staticmethod
    def build_tower(hf_config: Any, num_layers: int, *, dtype: Any) -> nnx.Module:
        """Return the first so many blocks of the tower."""
        raise NotImplementedError

    @staticmethod
    def build_projector(hf_config: Any, *, dtype: Any) -> nnx.Module:
        """Return what makes embeddings of the states that are read, side by side."""
        return MLPProjector(
            hf_config.vision_config.hidden_size * len(read_feature_layers(hf_config)),
            hf_config.text_config.hidden_size,
            hf_config.projector_hidden_act,
            use_bias=hf_config.multimodal_projector_bias,
            dtype=dtype,
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the three layouts; blocks behind the last that is read are left out."""
        return (
            *drop_unread_blocks(hf_config, read_feature_layers(hf_config)),
            Rule(TOWER + r"post_layernorm\.", None),
            *TowerModel.rules(hf_config),
        )

    def encode_units(
        self, pixel_values: Float[Array, "..."], **packed: Array
    ) -> Float[Array, "..."]:
        _, states = self.vision_tower(pixel_values, feature_layers=self.feature_layers, **packed)
        kept = choose_features(states[0].shape[-2], self.strategy)
        return jnp.concatenate([state[..., kept, :] for state in states], axis=-1)


def drop_unread_blocks(hf_config: Any, feature_layers: Sequence[int]) -> list[Rule]:
    """Return rules that leave out the tower's blocks behind the last state that is read."""
    unread = range(max(feature_layers), hf_config.vision_config.num_hidden_layers)
    blocks = TOWER + r"(encoder|transformer)\.layers"
    return [Rule(rf"{blocks}\.{number}\.", None) for number in unread]


def read_feature_layers(hf_config: Any) -> tuple[int, ...]:
    """Return which of the tower's states are read: 0 is the embedding, n block n - 1's output.

    `vision_feature_layer` is one or a list, and may count from the end; without the key: the last.
    """
    given = getattr(hf_config, "vision_feature_layer", -1)
    return number_states(hf_config, "vision_feature_layer", given)


def number_states(hf_config: Any, key: str, given: Any) -> tuple[int, ...]:
    """Return the numbers of the tower's states that `given` says, the value of a key."""
    num_layers = hf_config.vision_config.num_hidden_layers
    layers = [given] if isinstance(given, int) else list(given)
    if not layers or any(not -num_layers - 1 <= layer <= num_layers for layer in layers):
        raise CheckpointError(
            f"`{key}` is {given}, and the tower has {num_layers} layers; give one or several of "
            f"{-num_layers - 1} to {num_layers}"
        )
    return tuple(layer % (num_layers + 1) for layer in layers)
