"""The prompt side of GLM-4.1V, 4.5V, 4.6V and GLM-OCR: grids, whose steps have seconds behind them.

Before: `<|begin_of_image|> <|image|> <|end_of_image|>`. After: `<|begin_of_image|> <|image|>*N
<|end_of_image|>`, all N take embeddings; N is the item's grid over merge_size^2. A video's
`<|video|>` becomes such an image for each step, and its second: `12`, GLM-4.6V's `12.5 seconds`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from mmjax.models.family import make_factories
from mmjax.models.glm4v.host_inputs import Glm4vHostInputs
from mmjax.models.glm4v.image_processor import (
    Glm4vVideoPatcher,
    Glm46VVideoPatcher,
    GlmImagePatcher,
)
from mmjax.models.grid_family import StampedGridInfo
from mmjax.models.grid_inputs import GridHostInputs

CHAT_TEMPLATE = r"""
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
    {{- '<|' + message.role + '|>\n' -}}
    {%- for part in message.content -%}
        {%- if part.type == 'image' -%}
            {{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
        {%- elif part.type == 'video' -%}
            {{- '<|begin_of_video|><|video|><|end_of_video|>' -}}
        {%- else -%}
            {{- part.text -}}
        {%- endif -%}
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>\n' -}}
{%- endif -%}
"""


class Glm4vProcessingInfo(StampedGridInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = Glm4vHostInputs
    box_unit = "thousandths"
    image_processors: ClassVar = {"Glm4v": "glm4v"}
    image_patcher = GlmImagePatcher
    video_defaults: ClassVar = {
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000}
    }
    placeholders: ClassVar = {
        "image": "<|begin_of_image|><|image|><|end_of_image|>",
        "video": "<|begin_of_video|><|video|><|end_of_video|>",
    }
    marks = ("image_start_token_id", "image_end_token_id")
    has_time_behind = True

    def get_embed_token_id(self, modality: str) -> int:
        """Return `<|image|>`, at whose places videos go, too."""
        return self.get_hf_config().image_token_id

    def get_target(self, modality: str) -> list[int]:
        return [getattr(self.get_hf_config(), f"{modality}_token_id")]

    def choose_video_patcher(self, settings: Mapping[str, Any]) -> type[Glm4vVideoPatcher]:
        """Return GLM-4.6V's where the files name its processors: its config.json may be 4.5V's."""
        named = [settings.get("video_processor_type"), settings.get("processor_class")]
        named += [self.processor_settings.get("processor_class"), self._architecture]
        name = next(filter(None, named))
        return Glm46VVideoPatcher if name.startswith("Glm46V") else Glm4vVideoPatcher

    @property
    def _architecture(self) -> str:
        return self.ctx.model_config.architecture

    def write_time(self, second: float) -> str:
        is_4_6 = isinstance(self.get_hf_processor().video_processor, Glm46VVideoPatcher)
        return f"{second:.1f} seconds" if is_4_6 else f"{int(second)}"


class GlmGroundingProcessingInfo(Glm4vProcessingInfo):
    """GLM-4.5V's and 4.6V's, which were trained to find what is described."""

    tasks: ClassVar = {
        "Boxes": "Help me to locate {the red cup} in the image and give me its bounding boxes."
    }


class GlmOcrProcessingInfo(Glm4vProcessingInfo):
    host_inputs = GridHostInputs
    box_unit = None
    tasks: ClassVar = {
        "Read text": "Text Recognition:",
        "Table": "Table Recognition:",
        "Formula": "Formula Recognition:",
    }


FACTORIES = make_factories(Glm4vProcessingInfo)
GROUNDING_FACTORIES = make_factories(GlmGroundingProcessingInfo)
OCR_FACTORIES = make_factories(GlmOcrProcessingInfo)
