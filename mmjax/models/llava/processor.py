"""LLaVA's processors: each `<image>` is repeated for each of the tower's features.

Before: `look <image> please`. After: `look <image>*576 please`; all of them take embeddings. Of
LLaVA-NeXT also for each of those of the tiles, but for padding, and at the end of their rows. Of
LLaVA-OneVision several pictures are not cut, and each `<video>` is repeated for its frames. Of
Granite 4 Vision windows of patches have fewer embeddings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import check_settings
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.llava.host_inputs import (
    Granite4VisionHostInputs,
    LlavaHostInputs,
    LlavaNextHostInputs,
    LlavaOnevisionHostInputs,
)
from mmjax.models.tiles import FewCutProcessor
from mmjax.processing.chat_turns import (
    GRANITE4_TURNS,
    QWEN_SYSTEM,
    write_chatml,
    write_parts,
    write_turns,
)
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.image_processors.affine import ARITHMETIC
from mmjax.processing.image_processors.image import (
    check_bool,
    check_resized_pixels,
    check_squared_pixels,
)
from mmjax.processing.image_processors.tiling import HFFrameCutter
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import PixelsOnlyDataParser
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
"""Of LLaVA-NeXT; that of other decoders is Vicuna's."""
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

    valid_kwargs = frozenset({"resample", "do_convert_rgb", *ARITHMETIC})

    def __init__(self, hf_processor: Any, host_inputs: LlavaNextHostInputs) -> None:
        self.hf = hf_processor
        self.host_inputs = host_inputs

    def __call__(self, images: Sequence[Any], **kwargs: Any) -> dict[str, np.ndarray]:
        """Return the whole of each picture and its tiles.

        `pixel_values` uint8[tiles, 3, S, S]; `image_num_patches` int64[images]: how many are a
        picture's; `image_sizes` int64[images, 2]: its height and width.
        """
        outputs = self.hf(list(images), **{**kwargs, "do_pad": True})
        found = [ImageSize(*image.size) for image in images]
        counts = [1 + math.prod(self.host_inputs.count_tiles(size)) for size in found]
        return self.join(outputs, found, counts)

    @staticmethod
    def join(
        outputs: Mapping[str, Any], found: Sequence[ImageSize], counts: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return what HF's class gave, without the tiles that no picture has."""
        tiles = [one[:count] for one, count in zip(outputs["pixel_values"], counts, strict=True)]
        return {
            "pixel_values": np.concatenate(tiles),
            "image_num_patches": np.array(counts, np.int64),
            "image_sizes": np.array([(size.height, size.width) for size in found], np.int64),
            "image_affine": outputs["image_affine"],
        }


class FewCanvasCutter(CanvasCutter):
    """HF's `LlavaOnevisionImageProcessorPil`; a picture of several is padded to a square."""

    valid_kwargs = CanvasCutter.valid_kwargs | {"cropping"}

    def __call__(
        self, images: Sequence[Any], *, cropping: Any = None, **kwargs: Any
    ) -> dict[str, np.ndarray]:
        """Return the same; of pictures that are not cut (`cropping` false) one tile each."""
        if self.is_cut({"cropping": cropping}):
            return super().__call__(images, **kwargs)
        # HF's cuts the only picture of a prompt: a second one says that it is none.
        outputs = self.hf([[*images, images[0]]], **{**kwargs, "do_pad": True})
        return self.join(
            {**outputs, "pixel_values": outputs["pixel_values"][: len(images)]},
            [ImageSize(*image.size) for image in images],
            [1] * len(images),
        )

    @staticmethod
    def is_cut(kwargs: Mapping[str, Any]) -> bool:
        """Return whether a picture is cut; RequestValueError for no truth value."""
        cropping = kwargs.get("cropping")
        return cropping is None or check_bool("cropping", cropping)


class LlavaNextProcessingInfo(BaseLlavaProcessingInfo):
    """LLaVA-NeXT's, and Granite Vision's."""

    host_inputs = LlavaNextHostInputs
    cutter: ClassVar[type[CanvasCutter]] = CanvasCutter
    image_processors: ClassVar = {"LlavaNext": "llava_next"}
    templates: ClassVar[Mapping[str, str]] = _TEMPLATES
    """By the decoder; that of others is `chat_template`."""

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        decoder = self.get_hf_config().get_text_config().model_type
        self.chat_template = self.templates.get(decoder, self.chat_template)

    def wrap_image_processor(self, hf_processor: Any) -> CanvasCutter:
        hf_config, side = self.get_hf_config(), self.own_inputs.tile
        canvases = [list(one) for one in hf_config.image_grid_pinpoints]
        found = [list(one) for one in hf_processor.image_grid_pinpoints]
        check_settings({"image_grid_pinpoints": found}, {"image_grid_pinpoints": canvases}, **_PART)
        for name in ("size", "crop_size"):
            sides = {value for value in dict(getattr(hf_processor, name) or {}).values() if value}
            check_settings({name: [*sides] or None}, {name: [side]}, **_PART)
        return self.cutter(hf_processor, self.own_inputs)

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand rows for the whole of a picture at least, and for the largest at most."""
        fewest, most = self.num_unit_tokens, self.get_max_image_tokens()
        hint = f"{fewest}, those of its tiles that are no padding, and one more in each line, "
        self.check_rows(modality, num_embeds, range(fewest, most + 1), f"{hint}{most} at most")

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of a picture that fills its canvas, of those the one of most patches."""
        made = self.own_inputs
        size = max(made.canvases, key=lambda canvas: len(made.arrange(canvas)))
        return size, len(made.arrange(size))

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        counts, on_host = "image_num_patches", ("image_num_patches", "image_sizes")
        tiles = outputs.get(counts, ())
        return item_fields("image", units=("pixel_values",), counts=tiles, on_host=on_host)

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return len(self.own_inputs.embed_rows(tensors))


class Granite4VisionProcessingInfo(LlavaNextProcessingInfo):
    """Granite 4 Vision's."""

    chat_template = GRANITE4_TURNS
    host_inputs = Granite4VisionHostInputs
    templates: ClassVar = {}

    def load_hf_processor(self) -> Any:
        facts = {"downsample_rate": self.get_hf_config().downsample_rate}
        check_settings(self.processor_settings, facts)
        return super().load_hf_processor()


class LlavaOnevisionProcessingInfo(LlavaNextProcessingInfo):
    """LLaVA-OneVision's: with videos, and several pictures."""

    chat_template = write_chatml(
        write_parts(image=r"<image>\n", video=r"<video>\n"), first=QWEN_SYSTEM
    )
    data_parser = PixelsOnlyDataParser
    host_inputs = LlavaOnevisionHostInputs
    cutter = FewCanvasCutter
    image_processors: ClassVar = {"LlavaOnevision": "llava_onevision"}
    limits: ClassVar = {"image": None, "video": None}
    placeholders: ClassVar = {"image": "<image>", "video": "<video>"}
    templates: ClassVar = {}

    @property
    def num_unit_tokens(self) -> int:
        return self.own_inputs.tile_patches**2

    @property
    def num_frame_room(self) -> int:
        """How many tokens a frame has at most, with the newline behind the last one."""
        return self.num_frame_tokens + 1

    def get_max_video_tokens(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        return super().get_max_video_tokens(seq_len, mm_counts) + 1

    def find_largest_frame(self) -> tuple[ImageSize, int]:
        made = self.own_inputs
        return ImageSize(width=made.tile, height=made.tile), made.pooled_side**2

    def load_hf_processor(self) -> Any:
        hf_config = self.get_hf_config()
        self.check_token(self.find_token("video_token", "<video>"), "video_token_index")
        facts = {
            "num_image_tokens": self.num_unit_tokens,
            "vision_aspect_ratio": hf_config.vision_aspect_ratio,
        }
        check_settings(self.processor_settings, facts)
        path, side = self.ctx.model_config.path, self.own_inputs.tile
        frames = HFFrameCutter.from_pretrained(path, side)
        return replace(super().load_hf_processor(), video_processor=frames)

    def check_sizes(self, mm_data: Mapping[str, Any], mm_kwargs: Mapping[str, object]) -> None:
        """Refuse also what would be padded to a bomb."""
        if not FewCanvasCutter.is_cut(self.scope_kwargs(mm_kwargs)):
            most = self.ctx.get_mm_config().max_image_pixels
            check_squared_pixels(mm_data.get("images", ()), most)
        super().check_sizes(mm_data, mm_kwargs)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return tiles."""
        return {"cropping": True}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of the picture with the most embeddings, and how many it has."""
        made = self.own_inputs
        if not FewCanvasCutter.is_cut(self.scope_kwargs(self.get_planned_mm_kwargs())):
            return ImageSize(width=made.tile, height=made.tile), self.num_unit_tokens + 1
        size = self._largest_image
        return size, made.count_embeds(size)

    @cached_property
    def _largest_image(self) -> ImageSize:
        return self.own_inputs.find_largest()

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        counts = "video_num_patches"
        frames = outputs.get(counts, ())
        videos = item_fields(
            "video", units=("pixel_values_videos",), counts=frames, on_host=(counts,)
        )
        return {**super().get_fields(outputs), **videos}

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Give HF's model as many tiles of every picture, and say how many pictures there are."""
        found = dict(tensors)
        for modality, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if name in found:
                counts = np.asarray(found[f"{modality}_num_patches"])
                parts = np.split(found[name], np.cumsum(counts)[:-1])
                behind = [((0, max(counts) - n), *[(0, 0)] * 3) for n in counts]
                found[name] = np.stack([np.pad(*one) for one in zip(parts, behind, strict=True)])
        if "image_sizes" in found:
            found["batch_num_images"] = np.array([len(found["image_sizes"])])
        return found


class LlavaOnevisionMultiModalProcessor(FewCutProcessor[LlavaOnevisionProcessingInfo]):
    max_cut_images = 1


FACTORIES = make_factories(LlavaProcessingInfo)
GRANITE4_FACTORIES = make_factories(Granite4VisionProcessingInfo)
NEXT_FACTORIES = make_factories(LlavaNextProcessingInfo)
ONEVISION_FACTORIES = make_factories(
    LlavaOnevisionProcessingInfo, LlavaOnevisionMultiModalProcessor
)
