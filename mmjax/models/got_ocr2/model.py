"""GOT-OCR 2 (arXiv 2409.01704): SAM, two convolutions that compress its states, Qwen2."""

from collections.abc import Sequence
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.linear import Linear
from mmjax.models.got_ocr2.host_inputs import GotOcr2HostInputs
from mmjax.models.text_model import build_text_model, is_head_tied, text_rules
from mmjax.models.tower_model import WRAPPER_RULES, TowerModel
from mmjax.towers.sam import SamConfig, SamDownsampling, SamEncoder
from mmjax.weights.rules import Rule, RuleTypes, Split

_BLOCK = r"^(?:model\.)?vision_tower\.layers\.(\d+)\."
_LAYER = r"vision_tower.layers.\1."
_PROJECTOR = r"^(?:model\.)?multi_modal_projector\."
_NAMES = {
    _BLOCK + r"attn\.proj\.": _LAYER + "attn.out_proj.",
    _BLOCK + r"mlp\.lin([12])\.": _LAYER + r"mlp.fc\2.",
    _BLOCK: _LAYER,
    _PROJECTOR + r"conv_upsampler([12])\.": r"multi_modal_projector.compression.conv\1.",
    _PROJECTOR + r"multimodal_projector\.": "multi_modal_projector.linear.",
}
"""Names of HF's module and of its files -> names in the tree; the first that matches decides."""


class GotOcr2Projector(nnx.Module):
    """A state for each 4 x 4 patches, projected."""

    def __init__(self, channels: int, width: int, *, dtype: Any) -> None:
        """`channels`: of the tower's states; `width`: the decoder's."""
        self.compression = SamDownsampling((channels, 2 * channels, width), dtype=dtype)
        self.linear = Linear(width, width, use_bias=True, dtype=dtype)

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I _tokens _width"]:
        """Compress the squares of patches, which lie row by row."""
        side = round(x.shape[1] ** 0.5)
        grid = self.compression(x.reshape(len(x), side, side, -1))
        return self.linear(grid.reshape(len(x), -1, grid.shape[-1]))


class GotOcr2ForConditionalGeneration(TowerModel):
    """Served as HF's class of this name."""

    host_inputs = GotOcr2HostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        sam = SamConfig.from_hf(hf_config.vision_config, downsample_channels=None)
        width = hf_config.text_config.hidden_size
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = SamEncoder(sam, dtype=dtype)
            self.multi_modal_projector = GotOcr2Projector(sam.output_channels, width, dtype=dtype)
        self.language_model = build_text_model(
            hf_config, dtype=dtype, is_tied=is_head_tied(hf_config)
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, save_pretrained's, and the module's own names."""
        widths = [hf_config.vision_config.hidden_size] * 3
        return (
            Split.of_qkv(_BLOCK + r"attn\.qkv\.", _LAYER + "attn.", widths),
            *(Rule(pattern, name) for pattern, name in _NAMES.items()),
            *text_rules(hf_config),
            *WRAPPER_RULES,
        )
