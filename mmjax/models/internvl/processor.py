"""InternVL's processor: tiles of images, frames of videos, in the original format and in HF's.

Before: `look <image> please`. After: `look <img> <IMG_CONTEXT>*N </img> please`, where only the
N take embeddings, equally many per tile. In HF's format an image is `<IMG_CONTEXT>`. A
video is a sequence of `Frame1: <img> <IMG_CONTEXT>*N </img>`. Qianfan-OCR has HF's format, in which
an image is `<image>`, and no videos.

Conversation formats of the original layout, by the key `template` of its config.json.

The original keeps them in code (`conversation.py`, separator style MPT), not in a Jinja template.
BOS is left to the tokenizer, as there: InternLM2's writes one, Qwen2's none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from transformers import BatchFeature

from mmjax.errors import check_settings
from mmjax.models.family import FamilyProcessor, item_fields, make_factories
from mmjax.models.internvl.host_inputs import PIXEL_KEYS, InternVLHostInputs
from mmjax.models.internvl.tokenizer import load_tokenizer
from mmjax.models.tiles import TiledInfo
from mmjax.processing.answers import REF_AND_BOX
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.image_processors.tiling import (
    HFFrameCutter,
    OriginalFrameCutter,
    OriginalTileCutter,
)
from mmjax.processing.items.parse import (
    ImageEmbedsDataParser,
    ImageSize,
    MultiModalDataParser,
)
from mmjax.processing.prompt_updates.updates import as_ids
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_SYSTEM_2 = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "
    "是一个有用无害的人工智能助手。"
)
_SYSTEM_2_5 = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位"
    "联合开发的多模态大语言模型。"
)

_SYSTEM_GPT_OSS = (
    "You are InternVL, a large language model trained by Shanghai AI Laboratory.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-08-06\n\nReasoning: low\n\n"
    "# Valid channels: final. Channel must be included for every message."
)

_SOURCE = """\
{%- set starts = {'system': SYSTEM, 'user': USER, 'assistant': ASSISTANT} -%}
{%- if messages[0].role != 'system' and DEFAULT -%}
    {{- SYSTEM + DEFAULT + END -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in starts -%}
        {{- raise_exception('the role `' + message.role + '` is unknown to InternVL') -}}
    {%- endif -%}
    {{- starts[message.role] + message.content + END -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- ASSISTANT -}}
{%- endif -%}
"""
"""Names in capitals stand for the fields of `_Format`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """What stands before and behind the messages of each role."""

    system: str = "<|im_start|>system\n"
    user: str = "<|im_start|>user\n"
    assistant: str = "<|im_start|>assistant\n"
    end: str
    default: str
    """The system message of a conversation that begins with none; empty: none."""

    def to_jinja(self) -> str:
        """Return the format as a chat template over messages whose content is text."""
        source = _SOURCE
        for field in fields(self):
            literal = json.dumps(getattr(self, field.name), ensure_ascii=False)
            source = source.replace(field.name.upper(), literal)
        return source


_FORMATS: Mapping[str | None, _Format] = MappingProxyType(
    {
        None: _Format(end="<|im_end|>\n", default=""),
        "Hermes-2": _Format(end="<|im_end|>", default=_SYSTEM_2),
        "internlm2-chat": _Format(end="<|im_end|>", default=_SYSTEM_2),
        "phi3-chat": _Format(
            system="<|system|>\n",
            user="<|user|>\n",
            assistant="<|assistant|>\n",
            end="<|end|>",
            default=_SYSTEM_2,
        ),
        "internvl2_5": _Format(end="<|im_end|>\n", default=_SYSTEM_2_5),
        "internvl3_5_gpt_oss": _Format(
            system="<|start|>system<|message|>",
            user="<|start|>user<|message|>",
            # NOTE: the original lets the model write the channel, of which its system message
            # allows this one alone: here an answer is its text and no more.
            assistant="<|start|>assistant<|channel|>final<|message|>",
            end="<|end|>",
            default=_SYSTEM_GPT_OSS,
        ),
    }
)
"""By `template` of config.json; None: where it names none."""

START, CONTEXT, END = "<img>", "<IMG_CONTEXT>", "</img>"
_VIDEO_TOKENS = {
    "qwen2": "<|video_pad|>",
    "qwen3": "<|video_pad|>",
    "qwen3_moe": "<|video_pad|>",
    "gpt_oss": "<|reserved_200000|>",
}
"""By the language model's type; others were not trained on videos."""


class InternVLDataParser(MultiModalDataParser):
    embedding_fields: ClassVar = {
        "image": {"image_embeds": "values"},
        "video": {"video_embeds": "values"},
    }


class BaseInternVLProcessingInfo(TiledInfo):
    """Common to both formats."""

    chat_template = _FORMATS[None].to_jinja()
    data_parser = InternVLDataParser
    host_inputs = InternVLHostInputs
    answer_form = REF_AND_BOX
    limits: ClassVar = {"image": None, "video": None}
    embed_token = CONTEXT
    item_bounds = (START, END)
    frame_separator: ClassVar[str]
    pixel_keys: ClassVar[Mapping[str, str]]
    """Modality -> name of its pixel values."""

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand the rows of whole tiles, thumbnail included, or of whole frames."""
        part, each = {"image": "tile", "video": "frame"}[modality], self.num_unit_tokens
        most = self.get_max_image_tokens() if modality == "image" else num_embeds
        many = f", {most} rows at most" * (modality == "image")
        hint = f"{each}: give those of whole {part}s{many}"
        self.check_rows(modality, num_embeds, range(each, most + 1, each), hint, what=f"a {part}")

    def get_unit_size(self) -> ImageSize:
        return ImageSize(width=self.unit_side, height=self.unit_side)

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        fields: dict[str, MultiModalFieldConfig] = {}
        for modality, pixels in self.pixel_keys.items():
            count = f"{modality}_num_patches"
            tiles = outputs.get(count, ())
            fields |= item_fields(modality, units=[pixels], counts=tiles, on_host=[count])
            fields[f"{modality}_token_id"] = MultiModalFieldConfig.shared(modality, len(tiles))
        return fields

    def write_item(self, modality: str, size: int) -> list[int]:
        if modality == "image":
            tokens = super().write_item(modality, size)
            return [self.get_token_id(START), *tokens, self.get_token_id(END)]
        tile = START + CONTEXT * self.num_unit_tokens + END
        numbers = range(1, size // self.num_unit_tokens + 1)
        text = self.frame_separator.join(f"Frame{number}: {tile}" for number in numbers)
        return as_ids(text, self.get_tokenizer())


class InternVLProcessingInfo(BaseInternVLProcessingInfo):
    """The original format, which has no HF processor."""

    frame_separator = ""
    tile_kwargs = ("dynamic_image_size", "max_dynamic_patch")
    pixel_keys = PIXEL_KEYS["original"]
    reserves_embed_token = True
    placeholders: ClassVar = {"image": "<image>", "video": "<video>"}

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        self._format = _FORMATS.get(getattr(self.get_hf_config(), "template", None))
        self.chat_template = None if self._format is None else self._format.to_jinja()

    def get_ending_token_ids(self) -> Sequence[int]:
        """Return what ends a message of the format, by which the original's `chat` ends answers."""
        end = "" if self._format is None else self._format.end.strip()
        token_id = self.get_tokenizer().get_vocab().get(end)
        return () if token_id is None else (token_id,)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        token = _VIDEO_TOKENS.get(self.get_hf_config().get_text_config().model_type)
        tokenizer = self.get_tokenizer()
        takes_videos = token and (tokenizer is None or token in tokenizer.get_vocab())
        return self.limits if takes_videos else {"image": None}

    def load_hf_processor(self) -> ProcessorOfParts:
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=OriginalTileCutter(self.get_hf_config(), self.unit_side),
            video_processor=OriginalFrameCutter(self.unit_side),
        )


class InternVLHFProcessingInfo(BaseInternVLProcessingInfo):
    """HF's format (InternVLForConditionalGeneration)."""

    frame_separator = "\n"
    pixel_keys = PIXEL_KEYS["hf"]
    placeholders: ClassVar = {"image": CONTEXT, "video": "<video>"}

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Give frames as tiles: HF's model does not tell them apart."""
        return self.join_pixels(tensors, *self.pixel_keys.values())

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the HF processor's parts: AutoProcessor needs torchvision for videos."""
        path, hf_config = self.ctx.model_config.path, self.get_hf_config()
        facts = {
            "image_token_id": self.get_token_id(CONTEXT),
            "image_seq_length": self.num_unit_tokens,
        }
        source = "its vision_config and the tokenizer give"
        check_settings(hf_config, facts, where="config.json", source=source)
        has_videos = "video" in self.limits
        frames = HFFrameCutter.from_pretrained(path, self.unit_side) if has_videos else None
        defaults = {"images_kwargs": {"crop_to_patches": True}}  # as HF's InternVLProcessor
        return replace(super().load_hf_processor(), video_processor=frames, defaults=defaults)


class QianfanOCRProcessingInfo(InternVLHFProcessingInfo):
    tasks: ClassVar = {"Page to Markdown": "Parse this document to Markdown."}
    data_parser = ImageEmbedsDataParser
    limits: ClassVar = {"image": None}
    pixel_keys: ClassVar = {"image": PIXEL_KEYS["hf"]["image"]}
    reserves_embed_token = True
    placeholders: ClassVar = {"image": "<image>"}


class InternVLMultiModalProcessor(FamilyProcessor[BaseInternVLProcessingInfo]):
    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        outputs = super()._call_hf_processor(prompt, mm_data, mm_kwargs, tok_kwargs)
        for modality in self.info.pixel_keys:
            outputs[f"{modality}_token_id"] = np.array(self.info.get_token_id(CONTEXT))
        return outputs


FACTORIES = make_factories(
    InternVLProcessingInfo, InternVLMultiModalProcessor, load_tokenizer=load_tokenizer
)
QIANFAN_FACTORIES = make_factories(QianfanOCRProcessingInfo, InternVLMultiModalProcessor)
HF_FACTORIES = make_factories(InternVLHFProcessingInfo, InternVLMultiModalProcessor)
