"""Pixtral's prompt side, and Mistral 3's: a token a patch, a mark behind every row.

Before: `look [IMG] please`. After, for 2 rows of 3 patches: `look [IMG] [IMG] [IMG] [IMG_BREAK]
[IMG] [IMG] [IMG] [IMG_END] please`; only `[IMG]` takes embeddings. Mistral 3's tokens and
LightOnOCR's stand for squares of patches (`spatial_merge_size`), and LightOnOCR has no marks.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from mmjax.errors import check_settings
from mmjax.models.family import FamilyInfo, make_factories
from mmjax.models.pixtral.host_inputs import (
    PixtralHostInputs,
    check_whole_pictures,
    read_merge_size,
)
from mmjax.models.pixtral.tokenizer import load_tokenizer
from mmjax.processing.chat_turns import write_chatml, write_parts, write_turns
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.image_processors.image import bad_kwarg, sliver_error
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.image_processors.pil_classes import load_class
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser
from mmjax.processing.tokenizer_file import TEKKEN_FILE
from mmjax.rounding import cdiv

IMAGE_TOKEN = "[IMG]"
_TOKENS = {
    "image_token": IMAGE_TOKEN,
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
"""Of a patch, behind a row, and behind the last; a checkpoint may name others."""
CHAT_TEMPLATE = r"""
{%- set found = namespace(system='', last=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- for part in message.content -%}
            {%- set found.system = found.system + part.text + '\n\n' -%}
        {%- endfor -%}
    {%- elif message.role == 'user' -%}
        {%- set found.last = loop.index -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '[INST]' + (found.system if loop.index == found.last else '') -}}
        {%- for part in message.content -%}
            {{- '[IMG]' if part.type == 'image' else part.text -}}
        {%- endfor -%}
        {{- '[/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {%- for part in message.content -%}
            {{- part.text -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
"""Mistral's turns; the system's text stands in the last one, as `mistral-common` has it."""
SYSTEM_START = "[SYSTEM_PROMPT]"
CHAT_TEMPLATE_7 = write_turns(
    start="{'system': '[SYSTEM_PROMPT]', 'user': '[INST]', 'assistant': ''}[message.role]",
    content=write_parts(image=IMAGE_TOKEN),
    end="{'system': '[/SYSTEM_PROMPT]', 'user': '[/INST]', 'assistant': eos_token}[message.role]",
    answer="''",
)
"""The same of its version 7, whose tokenizers have marks of a system's text."""
LIGHTON_IMAGE_TOKEN = "<|image_pad|>"
LIGHTON_CHAT_TEMPLATE = write_chatml(write_parts(image=LIGHTON_IMAGE_TOKEN))
"""Qwen3's turns, without an empty thought."""
_FIXED = frozenset({"patch_size", "do_resize", "do_center_crop", "crop_size", "do_pad", "pad_size"})
"""An image would have other sides than whole patches."""


class PixtralImageScaler:
    """HF's image processor: images scaled to whole units, and not padded to each other."""

    def __init__(self, hf_processor: Any, unit: int) -> None:
        wanted = {"do_resize": True}
        check_settings(hf_processor, wanted, where="the image processor", source="mmjax takes")
        self.hf = hf_processor
        self.unit = unit
        """The side of the square of pixels that one embedding stands for."""

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return frozenset(self.hf.valid_kwargs.__annotations__) - _FIXED

    def __call__(self, images: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return `pixel_values`, a list of uint8[C, height, width], and `image_affine`."""
        longest = self.get_longest_edge(kwargs)
        for size in (ImageSize(*image.size) for image in images):
            if max(size) > longest and min(size) * longest < max(size):
                raise sliver_error(size, longest)
        fixed = {
            "size": {"longest_edge": longest},
            "patch_size": {"height": self.unit, "width": self.unit},
            "do_resize": True,
            "do_center_crop": False,
            "do_pad": False,
            "return_tensors": None,
        }
        outputs = dict(self.hf(list(images), **{**kwargs, **fixed}))
        return {**outputs, "pixel_values": list(outputs["pixel_values"])}

    def get_longest_edge(self, kwargs: Mapping[str, Any]) -> int:
        """Return the pixels of the longer side, at most, under an HF call's kwargs."""
        size = kwargs.get("size") or dict(self.hf.size)
        longest = size.get("longest_edge") if isinstance(size, Mapping) else None
        if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
            raise bad_kwarg("size", size, "an object of a positive `longest_edge`")
        return longest


class PixtralProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser
    """Nothing says how many embeddings are a row."""
    host_inputs = PixtralHostInputs
    image_processors: ClassVar = {"Pixtral": "pixtral"}
    placeholders: ClassVar = {"image": IMAGE_TOKEN}

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        vocab = {} if ctx.tokenizer is None else ctx.tokenizer.get_vocab()
        if SYSTEM_START in vocab and self.chat_template == CHAT_TEMPLATE:
            self.chat_template = CHAT_TEMPLATE_7

    def check_sizes(self, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]) -> None:
        """Do nothing: `longest_edge` is held to what was planned, and never scales up."""

    @property
    def unit(self) -> int:
        """The side of the square of pixels that one embedding stands for."""
        config = self.get_hf_config()
        return config.vision_config.patch_size * read_merge_size(config)

    @cached_property
    def token_ids(self) -> Mapping[str, int]:
        """The ids of `image_token`, `image_break_token` and `image_end_token`."""
        settings = self.processor_settings
        names = {key: settings.get(key, default) for key, default in _TOKENS.items()}
        self.check_token(names["image_token"], "image_token_index")
        return {key: self.get_token_id(name) for key, name in names.items()}

    def load_hf_processor(self) -> ProcessorOfParts:
        """Put together what AutoProcessor would, which wants torchvision."""
        config = self.get_hf_config()
        check_whole_pictures(config)
        expected = {
            "patch_size": config.vision_config.patch_size,
            "spatial_merge_size": read_merge_size(config),
        }
        check_settings(self.processor_settings, expected)
        _ = self.token_ids
        path = self.ctx.model_config.path
        if load_image_settings(path, are_needed=False) or not (path / TEKKEN_FILE).is_file():
            return super().load_hf_processor()
        # Published with Mistral's own files alone, as Mistral Small 3.2: HF's defaults hold.
        size = {"longest_edge": config.vision_config.image_size}
        made = load_class("Pixtral", self.image_processors["Pixtral"])(size=size)
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(), image_processor=self.wrap_image_processor(made)
        )

    def wrap_image_processor(self, hf_processor: Any) -> PixtralImageScaler:
        return PixtralImageScaler(hf_processor, self.unit)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger one of the checkpoint's size and the operator's."""
        scaler: PixtralImageScaler = self.get_image_processor()
        return {"size": {"longest_edge": self.find_larger(scaler.get_longest_edge)}}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        scaler: PixtralImageScaler = self.get_image_processor()
        side = scaler.get_longest_edge(self.scope_kwargs(self.get_planned_mm_kwargs()))
        return ImageSize(width=side, height=side), cdiv(side, self.unit) ** 2

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> tuple[int, int]:
        """Return the rows and columns of embeddings."""
        _, height, width = tensors["pixel_values"].shape
        return height // self.unit, width // self.unit

    def write_item(self, modality: str, size: tuple[int, int]) -> list[int]:
        rows, columns = size
        ids = self.token_ids
        tokens = [*[ids["image_token"]] * columns, ids["image_break_token"]] * rows
        return [*tokens[:-1], ids["image_end_token"]]


class LightOnOcrProcessingInfo(PixtralProcessingInfo):
    chat_template = LIGHTON_CHAT_TEMPLATE
    placeholders: ClassVar = {"image": LIGHTON_IMAGE_TOKEN}

    @cached_property
    def token_ids(self) -> Mapping[str, int]:
        """The id of `image_token` alone."""
        self.check_token(LIGHTON_IMAGE_TOKEN)
        return {"image_token": self.get_token_id(LIGHTON_IMAGE_TOKEN)}

    def write_item(self, modality: str, size: tuple[int, int]) -> list[int]:
        rows, columns = size
        return [self.token_ids["image_token"]] * (rows * columns)


FACTORIES = make_factories(PixtralProcessingInfo)
MISTRAL3_FACTORIES = make_factories(PixtralProcessingInfo, load_tokenizer=load_tokenizer)
LIGHTON_FACTORIES = make_factories(LightOnOcrProcessingInfo)
