r"""Gemma 3's processor: soft tokens for an image, and for its pan-and-scan crops.

Before: `look <start_of_image>`. After: `look \n\n <start_of_image> <image_soft_token>*256
<end_of_image> \n\n`; only the soft tokens take embeddings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from transformers import BatchFeature

from mmjax.errors import RequestRuntimeError, check_settings
from mmjax.models.family import (
    FamilyInfo,
    FamilyProcessor,
    Target,
    item_fields,
    make_factories,
)
from mmjax.models.gemma3.host_inputs import Gemma3HostInputs
from mmjax.processing.items.parse import ImageProcessorItems, ImageSize
from mmjax.processing.prompt_updates.matching import (
    MultiModalPromptUpdatesApplyResult,
    find_mm_placeholders,
)
from mmjax.processing.prompt_updates.updates import (
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    as_ids,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig

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
    def from_kwargs(kwargs: Mapping[str, Any]) -> "PanAndScan":
        """Read the image processor's kwargs, all of which are given."""
        return PanAndScan(
            is_enabled=bool(kwargs["do_pan_and_scan"]),
            min_crop_size=kwargs["pan_and_scan_min_crop_size"],
            max_num_crops=kwargs["pan_and_scan_max_num_crops"],
            min_ratio=kwargs["pan_and_scan_min_ratio_to_activate"],
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


class Gemma3ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = Gemma3HostInputs
    image_processors: ClassVar = {"Gemma3": "gemma3"}
    placeholders: ClassVar = {"image": "<start_of_image>"}

    @property
    def num_crop_tokens(self) -> int:
        """How many soft tokens the image has, and each crop."""
        return self.get_hf_config().mm_tokens_per_image

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Require a multiple of one image's rows: those of the image, then of each crop."""
        per_crop, most = self.num_crop_tokens, self.get_mm_max_tokens_per_item()[modality]
        many = f", and {per_crop} for each pan-and-scan crop, {most} at most" * (most > per_crop)
        hint = f"{per_crop}{many}: give what the model's own tower and projector give"
        self.check_rows(modality, num_embeds, range(per_crop, most + 1, per_crop), hint)

    def get_reserved_tokens(self) -> Mapping[str, int]:
        tokenizer = self.get_tokenizer()
        return {tokenizer.image_token: tokenizer.image_token_id}

    def load_hf_processor(self) -> Any:
        # On use only: it brings an installed torch along.
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        tokenizer = self.get_tokenizer()
        facts = {"image_seq_length": self.num_crop_tokens}
        source = "`mm_tokens_per_image` of config.json is"
        check_settings({"image_seq_length": 256, **self.processor_settings}, facts, source=source)
        self.check_token(tokenizer.image_token, "image_token_index")
        defaults = {"images_kwargs": dict(Gemma3Processor.images_kwargs)}
        return replace(super().load_hf_processor(), defaults=defaults)

    def get_pan_and_scan(self, mm_kwargs: Mapping[str, object]) -> PanAndScan:
        """Return the settings of a request's kwargs, merged with the operator's."""
        return PanAndScan.from_kwargs(self.scope_kwargs(mm_kwargs))

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return kwargs with the larger number of crops of the checkpoint's and the operator's."""
        name = "pan_and_scan_max_num_crops"
        own = self.get_hf_processor().defaults["images_kwargs"][name]
        most = max(own, self.get_pan_and_scan({}).max_num_crops)
        return {"do_pan_and_scan": True, name: most}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of an image with the most crops: tall, crops of the input size."""
        pan_and_scan = self.get_pan_and_scan(self.get_planned_mm_kwargs())
        size = self.get_image_processor().size
        largest = ImageSize(width=size.width, height=size.height)
        if pan_and_scan.is_enabled:
            side = max(size.width, pan_and_scan.min_crop_size)
            ratio = max(pan_and_scan.max_num_crops, math.ceil(pan_and_scan.min_ratio))
            largest = ImageSize(width=side, height=side * ratio)
        return largest, (pan_and_scan.count_crops(largest) + 1) * self.num_crop_tokens

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        counts = outputs.get("num_patches", ())
        return item_fields("image", units=["pixel_values"], counts=counts, on_host=["num_patches"])

    def get_target(self, modality: str) -> Target:
        return [self.get_tokenizer().boi_token_id]

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return int(tensors["num_patches"]) * self.num_crop_tokens

    def write_item(self, modality: str, size: int) -> list[int]:
        """Return an image's tokens, and behind them those of its crops (HF: `Gemma3Processor`)."""
        tokenizer, num_crops = self.get_tokenizer(), size // self.num_crop_tokens - 1
        soft_tokens = tokenizer.image_token * self.num_crop_tokens
        text = image = f"\n\n{tokenizer.boi_token}{soft_tokens}{tokenizer.eoi_token}\n\n"
        if num_crops:
            crops = " ".join([image] * num_crops)
            text = f"Here is the original image {image} and here are some crops to help you see "
            text += f"better {crops}"
        return as_ids(text, tokenizer)

    @cached_property
    def newline_counts(self) -> Mapping[int, int]:
        """Token id -> number of newlines, of tokens that are only newlines."""
        tokenizer = self.get_tokenizer()
        runs = {k: as_ids("\n" * k, tokenizer) for k in range(1, _MAX_NEWLINES + 1)}
        return {ids[0]: k for k, ids in runs.items() if len(ids) == 1}


class Gemma3MultiModalProcessor(FamilyProcessor[Gemma3ProcessingInfo]):
    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        outputs = super()._call_hf_processor(prompt, mm_data, mm_kwargs, tok_kwargs)
        if "pixel_values" in outputs:
            images = ImageProcessorItems(mm_data["images"])
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
                    is_embed=(
                        None
                        if content.is_embed is None
                        else content.is_embed(tokenizer, content.full)
                    ),
                )
            )
        return {"image": placeholders} if placeholders else {}


FACTORIES = make_factories(Gemma3ProcessingInfo, Gemma3MultiModalProcessor)
