"""LLaVA's processors: each `<image>` is repeated for each of the tower's features.

Before: `look <image> please`. After: `look <image>*576 please`; all of them take embeddings. Of
LLaVA-NeXT also for each of those of the tiles, but for padding, and at the end of their rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import check_settings
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.llava.host_inputs import LlavaHostInputs, LlavaNextHostInputs
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.image_processors.image import check_resized_pixels, check_squared_pixels
from mmjax.processing.items.items import ImageSize
from mmjax.processing.tensors.fields import MultiModalFieldConfig

CHAT_TEMPLATE = write_turns(
    start="{'user': 'USER: ', 'assistant': 'ASSISTANT: '}[message.role]",
    content="message.content",
    end="eos_token if message.role == 'assistant' else ' '",
    answer="'ASSISTANT:'",
)
"""Vicuna's turns, in which LLaVA-1.5 was trained."""
MISTRAL_TEMPLATE = write_turns(
    start="'[INST] ' if message.role == 'user' else ''",
    content=write_parts(image=r"<image>\n"),
    end="{'system': ' ', 'user': ' [/INST]', 'assistant': eos_token}[message.role]",
    answer="''",
)
GRANITE_TEMPLATE = write_turns(
    start=r"'<|' + message.role + '|>\n'",
    content=write_parts(image=r"<image>\n"),
    end=r"eos_token if message.role == 'assistant' else '\n'",
    answer=r"'<|assistant|>\n'",
    first="{%- if messages[0].role != 'system' -%}"
    r"{{- '<|system|>\nA chat between a curious user and an artificial intelligence assistant. "
    r"The assistant gives helpful, detailed, and polite answers to the user\'s questions.\n' -}}"
    "{%- endif -%}",
)
_TEMPLATES: Mapping[str, str] = {"granite": GRANITE_TEMPLATE, "mistral": MISTRAL_TEMPLATE}
"""Of LLaVA-NeXT, by the decoder; that of others is Vicuna's."""
_ARITHMETIC = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
_PART: Mapping[str, str] = {"where": "the image processor", "source": "the model takes"}


class BaseLlavaProcessingInfo(FamilyInfo):
    """Common to all of them."""

    chat_template = CHAT_TEMPLATE
    placeholders: ClassVar = {"image": "<image>"}

    def load_hf_processor(self) -> Any:
        hf_config = self.get_hf_config()
        facts = {
            "patch_size": hf_config.vision_config.patch_size,
            "vision_feature_select_strategy": hf_config.vision_feature_select_strategy,
        }
        check_settings(self.processor_settings, facts)
        self.check_token(self.find_token("image_token", "<image>"), "image_token_index")
        return super().load_hf_processor()


class LlavaProcessingInfo(BaseLlavaProcessingInfo):
    host_inputs = LlavaHostInputs
    image_processors: ClassVar = {"CLIP": "clip", "Llava": "llava", "Siglip": "siglip"}

    def check_sizes(self, mm_data: Mapping[str, Any], mm_kwargs: Mapping[str, object]) -> None:
        """Refuse also what HF would pad or scale to a bomb."""
        image_processor = self.get_image_processor()
        images = mm_data.get("images", ())
        max_pixels = self.ctx.get_mm_config().max_image_pixels
        if image_processor.do_pad:
            check_squared_pixels(images, max_pixels)
        else:
            check_resized_pixels(images, image_processor.size.shortest_edge, max_pixels)
        super().check_sizes(mm_data, mm_kwargs)


class CanvasCutter:
    """HF's `LlavaNextImageProcessorPil`, without the tiles of zeros that make pictures alike."""

    valid_kwargs = frozenset({"resample", "do_convert_rgb", *_ARITHMETIC})

    def __init__(self, hf_processor: Any, host_inputs: LlavaNextHostInputs) -> None:
        self.hf = hf_processor
        self.host_inputs = host_inputs

    def __call__(self, images: Sequence[Any], **kwargs: Any) -> dict[str, np.ndarray]:
        """Return the whole of each picture and its tiles.

        `pixel_values` uint8[tiles, 3, S, S]; `image_num_patches` int64[images]: how many are a
        picture's; `image_sizes` int64[images, 2]: its height and width.
        """
        outputs = self.hf(list(images), **{**kwargs, "do_pad": True})
        sizes = np.asarray(outputs["image_sizes"], np.int64)
        found = [ImageSize(width=width, height=height) for height, width in sizes.tolist()]
        counts = [1 + math.prod(self.host_inputs.count_tiles(size)) for size in found]
        tiles = [one[:count] for one, count in zip(outputs["pixel_values"], counts, strict=True)]
        return {
            "pixel_values": np.concatenate(tiles),
            "image_num_patches": np.array(counts, np.int64),
            "image_sizes": sizes,
            "image_affine": outputs["image_affine"],
        }


class LlavaNextProcessingInfo(BaseLlavaProcessingInfo):
    """LLaVA-NeXT's, and Granite Vision's."""

    host_inputs = LlavaNextHostInputs
    image_processors: ClassVar = {"LlavaNext": "llava_next"}

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        decoder = self.get_hf_config().get_text_config().model_type
        self.chat_template = _TEMPLATES.get(decoder, CHAT_TEMPLATE)

    @property
    def _canvases(self) -> LlavaNextHostInputs:
        made = self._own_host_inputs
        assert isinstance(made, LlavaNextHostInputs)
        return made

    def wrap_image_processor(self, hf_processor: Any) -> CanvasCutter:
        hf_config, side = self.get_hf_config(), self._canvases.tile
        canvases = [list(one) for one in hf_config.image_grid_pinpoints]
        found = [list(one) for one in hf_processor.image_grid_pinpoints]
        check_settings({"image_grid_pinpoints": found}, {"image_grid_pinpoints": canvases}, **_PART)
        for name in ("size", "crop_size"):
            sides = {value for value in dict(getattr(hf_processor, name) or {}).values() if value}
            check_settings({name: [*sides] or None}, {name: [side]}, **_PART)
        return CanvasCutter(hf_processor, self._canvases)

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand rows for the whole of a picture at least, and for the largest at most."""
        fewest, most = self.num_unit_tokens, self.get_max_image_tokens()
        hint = f"{fewest}, those of its tiles that are no padding, and one more in each line, "
        self.check_rows(modality, num_embeds, range(fewest, most + 1), f"{hint}{most} at most")

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of a picture that fills its canvas, of those the one of most patches."""
        made = self._canvases
        size = max(made.canvases, key=lambda canvas: len(made.arrange(canvas)))
        return size, len(made.arrange(size))

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        counts, on_host = "image_num_patches", ("image_num_patches", "image_sizes")
        tiles = outputs.get(counts, ())
        return item_fields("image", units=("pixel_values",), counts=tiles, on_host=on_host)

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return len(self._canvases.embed_rows(tensors))


FACTORIES = make_factories(LlavaProcessingInfo)
NEXT_FACTORIES = make_factories(LlavaNextProcessingInfo)
