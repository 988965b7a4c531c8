"""Ovis2 (Lu et al., arXiv 2405.20797): a picture's embeddings are sums over a visual vocabulary.

AIMv2 (arXiv 2411.14402), a head that gives each square of patches a probability of each visual
token, and the table of these tokens' embeddings. The last rows of the table are marks of a picture.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm
from mmjax.models.ovis2.host_inputs import MARKS, Ovis2HostInputs
from mmjax.models.text_model import is_head_tied, text_rules
from mmjax.models.tower_model import WRAPPER_RULES, ViTModel
from mmjax.towers.vit import ViTConfig
from mmjax.weights.rules import Rule, RuleTypes, Transposition

_TOWER = r"^(?:model\.)?vision_tower\."
_NORM_EPS = 1e-5
"""Of the head's norm, which no configuration names: torch's own."""


def rename_tower(prefix: str) -> list[Rule]:
    """Return rules from the names of HF's tower, behind a prefix, to the tree's."""
    names = {
        r"encoder\.layers\.(\d+)\.attention\.": r"encoder.layers.\1.self_attn.",
        r"encoder\.layers\.(\d+)\.ffn\.": r"encoder.layers.\1.mlp.",
        r"encoder\.layers\.(\d+)\.rms_norm([12])\.": r"encoder.layers.\1.layer_norm\2.",
        r"embeddings\.rms_norm\.": "embeddings.patch_norm.",
        r"rms_norm\.": "post_layernorm.",
        "": "",
    }
    return [
        Rule(rf"{prefix}transformer\.{pattern}", f"vision_tower.{name}")
        for pattern, name in names.items()
    ]


class SoftTokens(nnx.Module):
    """From squares of patches to sums of embeddings, by the probability of each visual token."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, width = hf_config.vision_config, hf_config.text_config.hidden_size
        num_tokens = vision.vocab_size - len(MARKS)
        features = vision.hidden_size * vision.hidden_stride**2
        self.head_linear = Linear(features, num_tokens, use_bias=False, dtype=dtype)
        self.head_norm = LayerNorm(num_tokens, eps=_NORM_EPS, dtype=dtype)
        self.visual_embeddings_table = Linear(vision.vocab_size, width, use_bias=False, dtype=dtype)

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P F"]:
        """Transform every square by itself; marks have the probability 0."""
        logits = self.head_norm(self.head_linear(x)).astype(jnp.float32)
        probabilities = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
        marks = ((0, 0), (0, 0), (0, len(MARKS)))
        return self.visual_embeddings_table(jnp.pad(probabilities, marks))


class Ovis2ForConditionalGeneration(ViTModel):
    """Served as HF's class of this name."""

    host_inputs = Ovis2HostInputs
    read_by_extra = ("multi_modal_projector",)
    factor_key = "vision_config.hidden_stride"
    build_projector = SoftTokens
    is_tied = staticmethod(is_head_tied)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision = hf_config.vision_config
        expected = {"tokenize_function": "softmax", "num_visual_indicator_tokens": len(MARKS)}
        for key, value in expected.items():
            if getattr(vision, key) != value:
                raise CheckpointError(
                    f"`vision_config.{key}` is {getattr(vision, key)!r}; Ovis2 is served with "
                    f"{value!r}"
                )
        super().__init__(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the module's own names."""
        table, projector = r"^(?:model\.)?visual_embeddings_table\.", "multi_modal_projector."
        return (
            Rule(f"{table}$", projector),  # the module, whose first output is a picture's
            Rule(table, f"{projector}visual_embeddings_table.", Transposition()),
            Rule(rf"{_TOWER}head_", f"{projector}head_"),
            *rename_tower(_TOWER),
            *text_rules(hf_config),
            *WRAPPER_RULES,
        )

    @staticmethod
    def read_tower(hf_config: Any) -> ViTConfig:
        return read_vision(hf_config.vision_config)

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the embeddings of `MARKS`, which no adapter changes."""
        return self.multi_modal_projector.visual_embeddings_table.weight[...][:, -len(MARKS) :].T


def read_vision(vision: Any) -> ViTConfig:
    """Read HF's `Ovis2VisionConfig`."""
    changes = {"layer_norm_eps": vision.rms_norm_eps, "mlp_bias": vision.mlp_bias}
    return ViTConfig.from_hf(vision, out_bias=vision.qkv_bias, **changes)
