"""DeepSeek-VL2's processor: each `<image>` becomes one id for each of the image's embeddings.

Before: `look <image> please`. After: `look <image>*n please`; all of them take embeddings, those
of rows' ends and of the separator too. Up to two images of a prompt are cut into tiles; more are
one tile each, beside the view that every image has.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from transformers import BatchFeature

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.deepseek_vl2.host_inputs import (
    count_image_tokens,
    count_side_tokens,
    read_part,
)
from mmjax.models.deepseek_vl2.image_processor import DeepseekVLV2ImageProcessor
from mmjax.models.registry import ProcessorFactories
from mmjax.processing.context import BaseProcessingInfo, InputProcessingContext
from mmjax.processing.dummy_inputs import ImageDummyInputsBuilder
from mmjax.processing.image_processors.parts import ProcessorOfParts, read_json
from mmjax.processing.items.parse import (
    EmbeddingItems,
    ImageEmbedsDataParser,
    ImageSize,
    MultiModalDataItems,
    MultiModalUUIDDict,
)
from mmjax.processing.prepared import ProcessedPrompt
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.prompt_updates.updates import PromptReplacement, PromptUpdate
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tensors.inputs import MultiModalKwargsItems

MAX_CROPPED_IMAGES = 2
"""Images of a prompt up to which they are cut into tiles, as the model was trained."""

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '<|User|>: ' + message.content | trim + '\n\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|Assistant|>:' + message.content | trim + eos_token -}}
    {%- else -%}
        {{- message.content | trim + '\n\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|Assistant|>:' -}}
{%- endif -%}
"""
"""The published format `deepseek`, for which checkpoints have no template. An answer follows its
colon at once: the published code makes ids of each message by itself, and none of a space there."""


class DeepseekVLV2ProcessingInfo(BaseProcessingInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImageEmbedsDataParser

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        # The published processor begins every prompt with BOS. transformers drops `add_bos_token`
        # of a byte-level tokenizer whose class is said to be Llama's.
        if getattr(ctx.tokenizer, "add_bos_token", None) is False:
            ctx.tokenizer.add_bos_token = True

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return "<image>" if modality == "image" else None

    def check_sizes(self, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]) -> None:
        """Do nothing: an image becomes one of few canvases, whatever a request says."""

    @cached_property
    def image_token_id(self) -> int:
        """The id of `<image>`, which processor_config.json may name otherwise."""
        token = self._settings.get("image_token", "<image>")
        token_id = self.get_tokenizer().get_vocab().get(token)
        if token_id is None:
            raise CheckpointError(
                f"the tokenizer does not know `{token}`, which DeepSeek-VL2 needs"
            )
        return token_id

    @cached_property
    def side_tokens(self) -> int:
        """How many rows, and columns, of embeddings a tile has."""
        return count_side_tokens(self.get_hf_config())

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        return read_json(self.ctx.model_config.path / "processor_config.json")

    def load_hf_processor(self) -> ProcessorOfParts:
        """Put together what the published code would, which needs torch."""
        hf_config = self.get_hf_config()
        vision = read_part(hf_config, "vision_config")
        facts = {
            "candidate_resolutions": hf_config.candidate_resolutions,
            "downsample_ratio": read_part(hf_config, "projector_config")["downsample_ratio"],
            "patch_size": vision["patch_size"],
        }
        for name, value in facts.items():
            if self._settings.get(name, value) != value:
                raise CheckpointError(
                    f"`{name}` of processor_config.json is {self._settings[name]}, but config.json "
                    f"has {value}; make them equal"
                )
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=DeepseekVLV2ImageProcessor(
                self._settings,
                tile_size=vision["image_size"],
                candidate_resolutions=facts["candidate_resolutions"],
            ),
        )

    def count_tokens(self, canvas: ImageSize) -> int:
        """Return the embeddings of an image whose tiles fill a canvas of a size in pixels."""
        columns, rows = (side // self.get_image_processor().tile_size for side in canvas)
        return count_image_tokens(self.side_tokens, columns, rows)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return tiles."""
        return {"cropping": True}

    def get_largest_canvas(self) -> ImageSize:
        """Return the size of an image with the most embeddings."""
        parts = self.get_hf_processor()
        planned = self.ctx.merge_mm_kwargs(self.get_planned_mm_kwargs())
        kwargs = parts.scope_kwargs(planned)["images_kwargs"]
        return max(parts.image_processor.list_canvases(kwargs), key=self.count_tokens)

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        return {"image": self.count_tokens(self.get_largest_canvas())}

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand the rows of one of the arrangements, those between tiles included."""
        canvases = self.get_image_processor().list_canvases({})
        known = sorted({self.count_tokens(canvas) for canvas in canvases})
        if num_embeds not in known:
            raise RequestValueError(
                f"{modality} embeddings have {num_embeds} rows; an image has "
                f"{', '.join(map(str, known))}, with the ends of rows and the separator",
                param="multi_modal_data",
            )


class DeepseekVLV2DummyInputsBuilder(ImageDummyInputsBuilder[DeepseekVLV2ProcessingInfo]):
    def get_largest_image(self) -> ImageSize:
        return self.info.get_largest_canvas()


class DeepseekVLV2MultiModalProcessor(BaseMultiModalProcessor[DeepseekVLV2ProcessingInfo]):
    def _hf_processor_applies_updates(self, *args: object, **kwargs: object) -> bool:
        return False

    def _get_hash_kwargs(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Add what the number of images does to each of them."""
        if mm_items.get_count("image", strict=False) <= MAX_CROPPED_IMAGES:
            return hf_processor_mm_kwargs
        return {**hf_processor_mm_kwargs, "cropping": False}

    def _cached_apply_hf_processor(
        self,
        prompt: str | list[int],
        mm_data_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        mm_uuids: MultiModalUUIDDict,
    ) -> ProcessedPrompt:
        """Go round the cache with more images: what it processes again is processed alone."""
        kwargs = self._get_hash_kwargs(mm_data_items, hf_processor_mm_kwargs)
        if kwargs is hf_processor_mm_kwargs:
            process = super()._cached_apply_hf_processor
        else:
            process = self._apply_hf_processor
        return process(prompt, mm_data_items, kwargs, tokenization_kwargs, mm_uuids)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        crops = hf_inputs.get("images_spatial_crop")
        num_tiles = np.empty(0, np.int64) if crops is None else 1 + crops.prod(axis=1)
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", num_tiles),
            "images_spatial_crop": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            "image_embeds": MultiModalFieldConfig.batched("image"),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        image_token_id, side = self.info.image_token_id, self.info.side_tokens

        def get_replacement(item_idx: int) -> list[int]:
            images = mm_items["image"]
            if isinstance(images, EmbeddingItems):
                return [image_token_id] * images.get_feature_size(item_idx)
            crop: Any = out_mm_kwargs.get_item("image", item_idx)["images_spatial_crop"].data
            columns, rows = crop.tolist()
            return [image_token_id] * count_image_tokens(side, columns, rows)

        return [PromptReplacement("image", [image_token_id], get_replacement)]


FACTORIES = ProcessorFactories(
    info=DeepseekVLV2ProcessingInfo,
    dummy_inputs=DeepseekVLV2DummyInputsBuilder,
    processor=DeepseekVLV2MultiModalProcessor,
)
