r"""Gemma 3's processor: soft tokens for an image, and for its pan-and-scan crops.

Before: `look <start_of_image>`. After: `look \n\n <start_of_image> <image_soft_token>*256
<end_of_image> \n\n`; only the soft tokens take embeddings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from transformers import BatchFeature

from mmjax.errors import CheckpointError, RequestRuntimeError, RequestValueError
from mmjax.models.registry import ProcessorFactories
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.dummy_inputs import ImageDummyInputsBuilder
from mmjax.processing.image_processors.affine import keep_bytes
from mmjax.processing.items.parse import (
    ImageEmbedsDataParser,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
)
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.prompt_updates.matching import (
    MultiModalPromptUpdatesApplyResult,
    find_mm_placeholders,
)
from mmjax.processing.prompt_updates.updates import (
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
    as_ids,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tensors.inputs import MultiModalKwargsItem, MultiModalKwargsItems

_MAX_NEWLINES = 64
"""Longest run of newlines to look for in the vocabulary (Gemma's has 31)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanAndScan:
    """Settings of pan-and-scan: crops of long images, each encoded like an image."""

    is_enabled: bool
    min_crop_size: int
    max_num_crops: int
    min_ratio: float

    @staticmethod
    def from_kwargs(defaults: Mapping[str, Any], kwargs: Mapping[str, Any]) -> "PanAndScan":
        """Merge processor kwargs with the HF processor's defaults."""
        values = {**defaults, **kwargs.get("images_kwargs", {}), **kwargs}
        return PanAndScan(
            is_enabled=bool(values["do_pan_and_scan"]),
            min_crop_size=values["pan_and_scan_min_crop_size"],
            max_num_crops=values["pan_and_scan_max_num_crops"],
            min_ratio=values["pan_and_scan_min_ratio_to_activate"],
        )

    def count_crops(self, size: ImageSize) -> int:
        """Return the number of crops of an image (HF: `Gemma3ImageProcessorPil.pan_and_scan`)."""
        long, short = max(size), min(size)
        if not self.is_enabled or long / short < self.min_ratio:
            return 0
        wanted = min(math.floor(long / self.min_crop_size), math.floor(long / short + 0.5))
        num_crops = min(max(wanted, 2), self.max_num_crops)
        if min(math.ceil(long / num_crops), short) < self.min_crop_size:
            return 0
        return num_crops


CHAT_TEMPLATE = r"""
{%- set system = namespace(text='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- for part in message.content -%}
            {%- set system.text = system.text + part.text -%}
        {%- endfor -%}
        {%- set system.text = system.text + '\n\n' -%}
    {%- else -%}
        {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) -}}
        {{- '\n' + system.text -}}
        {%- set system.text = '' -%}
        {%- for part in message.content -%}
            {{- '<start_of_image>' if part.type == 'image' else part.text | trim -}}
        {%- endfor -%}
        {{- '<end_of_turn>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\n' -}}
{%- endif -%}
"""
"""The published one's turns; a system's text begins the next turn."""


class Gemma3ProcessingInfo(BaseProcessingInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImageEmbedsDataParser

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Require a multiple of one image's rows: those of the image, then of each crop."""
        per_crop = self.get_hf_config().mm_tokens_per_image
        most = self.get_mm_max_tokens_per_item()[modality]
        if 0 < num_embeds <= most and num_embeds % per_crop == 0:
            return
        many = f", and {per_crop} for each pan-and-scan crop, {most} at most" * (most > per_crop)
        raise RequestValueError(
            f"{modality} embeddings have {num_embeds} rows; an image has {per_crop}{many}: give "
            "what the model's own tower and projector give",
            param="multi_modal_data",
        )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return "<start_of_image>" if modality == "image" else None

    def get_reserved_tokens(self) -> Mapping[str, int]:
        tokenizer = self.get_tokenizer()
        return {tokenizer.image_token: tokenizer.image_token_id}

    def load_hf_processor(self) -> Any:
        """Assemble the HF processor: AutoProcessor needs torchvision."""
        # Imported here: they import torch if it is installed.
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        path = self.ctx.model_config.path
        settings, _ = Gemma3Processor.get_processor_dict(path)
        hf_config, tokenizer = self.get_hf_config(), self.get_tokenizer()
        num_soft_tokens = settings.get("image_seq_length", 256)
        if num_soft_tokens != hf_config.mm_tokens_per_image:
            raise CheckpointError(
                f"`image_seq_length` of processor_config.json is {num_soft_tokens}, but "
                f"`mm_tokens_per_image` of config.json is {hf_config.mm_tokens_per_image}; "
                "make them equal"
            )
        if tokenizer.image_token_id != hf_config.image_token_id:
            raise CheckpointError(
                f"`{tokenizer.image_token}` is token {tokenizer.image_token_id}, but "
                f"`image_token_index` of config.json is {hf_config.image_token_id}"
            )
        return Gemma3Processor(
            image_processor=keep_bytes(Gemma3ImageProcessorPil).from_pretrained(path),
            tokenizer=tokenizer,
            chat_template=self.ctx.model_config.chat_template,
            image_seq_length=num_soft_tokens,
        )

    def get_pan_and_scan(self, mm_kwargs: Mapping[str, object]) -> PanAndScan:
        """Return the settings of a request's kwargs, merged with the operator's."""
        defaults = self.get_hf_processor().images_kwargs
        return PanAndScan.from_kwargs(defaults, self.ctx.merge_mm_kwargs(mm_kwargs))

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return kwargs with the larger number of crops of the checkpoint's and the operator's."""
        name = "pan_and_scan_max_num_crops"
        own = self.get_hf_processor().images_kwargs[name]
        most = max(own, self.get_pan_and_scan({}).max_num_crops)
        return {"do_pan_and_scan": True, name: most}

    def get_largest_pan_and_scan(self) -> PanAndScan:
        """Return the settings with which an image has the most tokens."""
        return self.get_pan_and_scan(self.get_planned_mm_kwargs())

    def get_image_size_with_most_features(self) -> ImageSize:
        """Return the size of an image with the most crops: tall, crops of the input size."""
        pan_and_scan = self.get_largest_pan_and_scan()
        size = self.get_hf_processor().image_processor.size
        if not pan_and_scan.is_enabled:
            return ImageSize(width=size.width, height=size.height)
        side = max(size.width, pan_and_scan.min_crop_size)
        ratio = max(pan_and_scan.max_num_crops, math.ceil(pan_and_scan.min_ratio))
        return ImageSize(width=side, height=side * ratio)

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        size = self.get_image_size_with_most_features()
        num_patches = self.get_largest_pan_and_scan().count_crops(size) + 1
        return {"image": num_patches * self.get_hf_config().mm_tokens_per_image}

    @cached_property
    def newline_counts(self) -> Mapping[int, int]:
        """Token id -> number of newlines, of tokens that are only newlines."""
        tokenizer = self.get_tokenizer()
        runs = {k: as_ids("\n" * k, tokenizer) for k in range(1, _MAX_NEWLINES + 1)}
        return {ids[0]: k for k, ids in runs.items() if len(ids) == 1}


class Gemma3DummyInputsBuilder(ImageDummyInputsBuilder[Gemma3ProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.info.get_hf_processor().boi_token * mm_counts.get("image", 0)

    def get_largest_image(self) -> ImageSize:
        return self.info.get_image_size_with_most_features()


class Gemma3MultiModalProcessor(BaseMultiModalProcessor[Gemma3ProcessingInfo]):
    only_tokenizes_text = True

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        outputs = super()._call_hf_processor(prompt, mm_data, mm_kwargs, tok_kwargs)
        if "pixel_values" in outputs:
            images = ImageProcessorItems(mm_data["images"])  # pyright: ignore[reportArgumentType]
            pan_and_scan = self.info.get_pan_and_scan(mm_kwargs)
            sizes = [images.get_image_size(index) for index in range(len(images))]
            # HF computes these numbers, but does not return them.
            outputs["num_patches"] = np.array([pan_and_scan.count_crops(s) + 1 for s in sizes])
            num_patches, num_pixels = outputs["num_patches"].sum(), len(outputs["pixel_values"])
            if num_patches != num_pixels:
                raise RequestRuntimeError(
                    f"pan-and-scan made {num_pixels} images and crops of {len(sizes)} images, "
                    f"where {pan_and_scan} gives {num_patches}; change the `pan_and_scan_...` "
                    "settings, or leave them out",
                    param="mm_processor_kwargs",
                )
        return outputs

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        num_patches = hf_inputs.get("num_patches", np.empty(0, np.int64))
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", num_patches),
            "num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            "image_embeds": MultiModalFieldConfig.batched("image"),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        processor = self.info.get_hf_processor()
        tokenizer = self.info.get_tokenizer()
        contents: dict[int, PromptUpdateDetails] = {}  # shared by images of equal crop counts

        def get_replacement(item_idx: int) -> PromptUpdateDetails:
            num_crops = self._count_patches(out_mm_kwargs.get_item("image", item_idx)) - 1
            if num_crops not in contents:
                text = processor.replace_image_token({"num_crops": [num_crops]}, 0)
                contents[num_crops] = PromptUpdateDetails.select_token_id(
                    as_ids(text, tokenizer), tokenizer.image_token_id
                )
            return contents[num_crops]

        return [PromptReplacement("image", [tokenizer.boi_token_id], get_replacement)]

    def _count_patches(self, item: MultiModalKwargsItem) -> int:
        """Return the number of an item's encoder inputs: the image and its crops."""
        if "image_embeds" in item:
            return len(item["image_embeds"].data) // self.info.get_hf_config().mm_tokens_per_image
        return int(item["num_patches"].data)

    def _apply_token_matches(
        self, prompt: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[list[int], MultiModalPromptUpdatesApplyResult]:
        """Replace, then merge tokens as the tokenizer would have at the replacements' ends."""
        if self._has_crops(mm_prompt_updates):
            # The text around crops may merge with the user's, so only text gives HF's tokens.
            # Token ids that do not round-trip through text are not replaced this way.
            tokenizer = self.info.get_tokenizer()
            text = tokenizer.decode(prompt)
            if as_ids(text, tokenizer) == prompt:
                new_text, result = self._apply_text_matches(text, mm_prompt_updates)
                return as_ids(new_text, tokenizer), result
        token_ids, result = super()._apply_token_matches(prompt, mm_prompt_updates)
        return self._merge_newlines(token_ids), result

    def _has_crops(self, mm_prompt_updates: MultiModalPromptUpdates) -> bool:
        boi_id = self.info.get_tokenizer().boi_token_id
        return any(
            update.content.full.count(boi_id) > 1
            for alternatives in mm_prompt_updates.get("image", ())
            for update in alternatives
            if isinstance(update.content.full, list)
        )

    def _merge_newlines(self, token_ids: list[int]) -> list[int]:
        r"""Re-tokenize each run of newlines next to an image as the tokenizer does.

        `\n, \n\n, <start_of_image>` -> `\n\n\n, <start_of_image>`.
        """
        counts = self.info.newline_counts
        tokenizer = self.info.get_tokenizer()
        merged: list[int] = []
        previous = None
        runs = [(key, list(run)) for key, run in groupby(token_ids, counts.__contains__)]
        for place, (is_newlines, run) in enumerate(runs):
            following = runs[place + 1][1][0] if place + 1 < len(runs) else None
            touches = previous == tokenizer.eoi_token_id or following == tokenizer.boi_token_id
            if is_newlines and touches and len(run) > 1:
                run = as_ids("\n" * sum(counts[token_id] for token_id in run), tokenizer)
            merged += run
            previous = merged[-1]
        return merged

    def _find_mm_placeholders(
        self, token_ids: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> Mapping[str, list[PlaceholderFeaturesInfo]]:
        r"""Find images from their first to their last special token; text around may be merged.

        With `\n\n <boi> soft <eoi> \n\n` as the content and `\n\n\n <boi> soft <eoi> \n\n\n\n
        <boi> soft <eoi> \n\n` in the prompt, the ranges are offset=0 and offset=4, of length=5
        each: they overlap in the token that both share.
        """
        tokenizer = self.info.get_tokenizer()
        boi_id, eoi_id = tokenizer.boi_token_id, tokenizer.eoi_token_id
        leads: list[int] = []
        cores = []
        for alternatives in mm_prompt_updates.get("image", ()):
            (update,) = alternatives
            full = as_ids(update.content.full, tokenizer)
            leads.append(full.index(boi_id))
            end = len(full) - full[::-1].index(eoi_id)
            cores.append([update.with_content(full[leads[-1] : end])])
        found = find_mm_placeholders(token_ids, {"image": cores}, tokenizer).get("image", [])
        placeholders = []
        for core, lead in zip(found, leads, strict=False):
            content = mm_prompt_updates["image"][core.item_idx][0].content
            placeholders.append(
                PlaceholderFeaturesInfo(
                    modality="image",
                    item_idx=core.item_idx,
                    start_idx=core.start_idx - lead,
                    tokens=as_ids(content.full, tokenizer),
                    is_embed=content.is_embed and content.is_embed(tokenizer, content.full),
                )
            )
        return {"image": placeholders} if placeholders else {}


FACTORIES = ProcessorFactories(
    info=Gemma3ProcessingInfo,
    dummy_inputs=Gemma3DummyInputsBuilder,
    processor=Gemma3MultiModalProcessor,
)
