"""DeepSeek-VL2 (Wu et al., arXiv 2412.10302): SigLIP, an MLP over 2 by 2 patches, DeepSeek-V2."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.connectors.mlp import MLPProjector
from mmjax.errors import check_settings
from mmjax.language.deepseek import DeepseekConfig
from mmjax.models.deepseek_vl2.host_inputs import DeepseekVLV2HostInputs, read_part
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule, RuleTypes, Split, Squeeze, Stack

_NORM_EPS = 1e-6
"""The tower's norms have timm's default; no key of the config names it."""


def join_squares(states: Float[Array, "I P D"], ratio: int) -> Float[Array, "I _tokens _width"]:
    """Join each square of patches into one state: by channel, then row, then column.

    Sides that are no multiple of `ratio` are padded with zeros at the bottom and the right.
    """
    images, num_patches, width = states.shape
    side = round(num_patches**0.5)
    missing = -side % ratio
    grid = states.reshape(images, side, side, width)
    grid = jnp.pad(grid, ((0, 0), (0, missing), (0, missing), (0, 0)))
    joined = (side + missing) // ratio
    squares = grid.reshape(images, joined, ratio, joined, ratio, width)
    return squares.transpose(0, 1, 3, 5, 2, 4).reshape(images, joined**2, width * ratio**2)


class DeepseekVLV2ForCausalLM(MultiModalModel):
    """Served as the published class of this name."""

    host_inputs = DeepseekVLV2HostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision, width = _read_vision(hf_config), hf_config.get_text_config().hidden_size
        projector = read_part(hf_config, "projector_config")
        read_part(hf_config, "")
        wanted = {"input_dim": vision.hidden_size, "n_embed": width}
        found = {**vars(hf_config.projector_config), **projector}
        source = "the tower and the decoder beside it need"
        check_settings(found, wanted, where="`projector_config`", source=source)
        self.ratio: int = projector["downsample_ratio"]
        with self._mark_tower_model(hf_config, "image"):
            self.vision = ViT(vision, dtype=dtype)
            features = vision.hidden_size * self.ratio**2
            self.projector = MLPProjector(features, width, "gelu", dtype=dtype)
            self.image_newline = nnx.Param(jnp.zeros((width,), dtype))
            self.view_seperator = nnx.Param(jnp.zeros((width,), dtype))  # as published
        self.language_model = build_text_model(hf_config, dtype=dtype, is_tied=False)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the published names: cut what is fused, stack the experts."""
        vision, latent = _read_vision(hf_config), _read_text(hf_config).latent
        block = r"^vision\.blocks\.(\d+)\."
        renamed = {
            r"^vision\.patch_embed\.proj\.": "vision.embeddings.patch_embedding.",
            r"^vision\.norm\.": "vision.post_layernorm.",
            block + r"attn\.proj\.": r"vision.encoder.layers.\1.self_attn.out_proj.",
            block + r"norm([12])\.": r"vision.encoder.layers.\1.layer_norm\2.",
            block: r"vision.encoder.layers.\1.",
            r"^projector\.layers\.0\.": "projector.linear_1.",
            r"^projector\.layers\.2\.": "projector.linear_2.",
            r"^language\.lm_head\.": "language_model.lm_head.",
            r"^language\.model\.": "language_model.",
        }
        attention, widths = r"vision.encoder.layers.\1.self_attn.", [vision.hidden_size] * 3
        fused = [Split.of_qkv(block + r"attn\.qkv\.", attention, widths)]
        if latent is not None:
            halves = [rf"language_model.\1.{part}_b_proj." for part in "kv"]
            sizes = [latent.nope_dim, latent.value_dim]
            fused.append(Split(r"^language\.model\.(.*)\.kv_b_proj\.", halves, sizes))
        return (
            Rule(r"^vision\.attn_pool\.", None),  # of SigLIP's pre-training
            Rule(
                r"^vision\.pos_embed$",
                "vision.embeddings.position_embedding.weight",
                Squeeze(),
            ),
            *fused,
            Stack(
                r"^language\.model\.(.*)\.experts\.(?P<index>\d+)\.(\w+_proj)\.weight$",
                r"language_model.\1.experts.\3",
            ),
            *(Rule(pattern, name) for pattern, name in renamed.items()),
        )

    def embed_multimodal(
        self, pixel_values: Float[Array, "I C _y _x"]
    ) -> Float[Array, "I _tokens D"]:
        """Return the embeddings of every tile."""
        with jax.named_scope("vision_tower"):
            states, _ = self.vision(pixel_values)
        with jax.named_scope("multi_modal_projector"):
            return self.projector(join_squares(states, self.ratio))

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the end of a row, and what stands between an image's view and its tiles."""
        return jnp.stack([self.image_newline[...], self.view_seperator[...]])


def _read_text(hf_config: Any) -> DeepseekConfig:
    return DeepseekConfig.from_hf(hf_config.get_text_config())


def _read_vision(hf_config: Any) -> ViTConfig:
    values = read_part(hf_config, "vision_config")
    return ViTConfig(
        hidden_size=values["width"],
        intermediate_size=int(values["width"] * values["mlp_ratio"]),
        num_hidden_layers=values["layers"],
        num_attention_heads=values["num_heads"],
        num_channels=3,
        image_size=values["image_size"],
        patch_size=values["patch_size"],
        layer_norm_eps=_NORM_EPS,
        hidden_act="gelu_pytorch_tanh",
    )
