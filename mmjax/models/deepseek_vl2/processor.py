"""DeepSeek-VL2's processor: each `<image>` becomes one id for each of the image's embeddings.

Before: `look <image> please`. After: `look <image>*n please`; all of them take embeddings, those
of rows' ends and of the separator too. Up to two images of a prompt are cut into tiles; more are
one tile each, beside the view that every image has.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from mmjax.errors import check_settings
from mmjax.models.deepseek_vl2.host_inputs import (
    DeepseekVLV2HostInputs,
    count_image_tokens,
    count_side_tokens,
    read_part,
)
from mmjax.models.deepseek_vl2.image_processor import DeepseekVLV2ImageProcessor
from mmjax.models.family import (
    FamilyInfo,
    FamilyProcessor,
    item_fields,
    make_factories,
)
from mmjax.processing.chat_turns import write_turns
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.items.parse import ImageSize, MultiModalDataItems, MultiModalUUIDDict
from mmjax.processing.prepared import ProcessedPrompt
from mmjax.processing.tensors.fields import MultiModalFieldConfig

MAX_CROPPED_IMAGES = 2
"""Images of a prompt up to which they are cut into tiles, as the model was trained."""

CHAT_TEMPLATE = write_turns(
    start="{'user': '<|User|>: ', 'assistant': '<|Assistant|>:'}[message.role]",
    content="message.content | trim",
    end=r"eos_token if message.role == 'assistant' else '\n\n'",
    answer="'<|Assistant|>:'",
)
"""The published format `deepseek`, for which checkpoints have no template. An answer follows its
colon at once: the published code makes ids of each message by itself, and none of a space there."""


class DeepseekVLV2ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = DeepseekVLV2HostInputs
    placeholders: ClassVar = {"image": "<image>"}

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        # The published processor begins every prompt with BOS. transformers drops `add_bos_token`
        # of a byte-level tokenizer whose class is said to be Llama's.
        if getattr(ctx.tokenizer, "add_bos_token", None) is False:
            ctx.tokenizer.add_bos_token = True

    def check_sizes(self, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]) -> None:
        """Do nothing: an image becomes one of few canvases, whatever a request says."""

    @cached_property
    def image_token_id(self) -> int:
        """The id of `<image>`, which processor_config.json may name otherwise."""
        return self.get_token_id(self.processor_settings.get("image_token", "<image>"))

    def get_embed_token_id(self, modality: str) -> int:
        return self.image_token_id

    def load_hf_processor(self) -> ProcessorOfParts:
        """Put together what the published code would, which needs torch."""
        hf_config = self.get_hf_config()
        vision = read_part(hf_config, "vision_config")
        facts = {
            "candidate_resolutions": hf_config.candidate_resolutions,
            "downsample_ratio": read_part(hf_config, "projector_config")["downsample_ratio"],
            "patch_size": vision["patch_size"],
        }
        check_settings(self.processor_settings, facts)
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=DeepseekVLV2ImageProcessor(
                self.processor_settings,
                tile_size=vision["image_size"],
                candidate_resolutions=facts["candidate_resolutions"],
            ),
        )

    def count_tokens(self, canvas: ImageSize) -> int:
        """Return the embeddings of an image whose tiles fill a canvas of a size in pixels."""
        columns, rows = (side // self.get_image_processor().tile_size for side in canvas)
        return count_image_tokens(count_side_tokens(self.get_hf_config()), columns, rows)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return tiles."""
        return {"cropping": True}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs())
        largest = max(self.get_image_processor().list_canvases(kwargs), key=self.count_tokens)
        return largest, self.count_tokens(largest)

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand the rows of one of the arrangements, those between tiles included."""
        canvases = self.get_image_processor().list_canvases({})
        known = sorted({self.count_tokens(canvas) for canvas in canvases})
        hint = f"{', '.join(map(str, known))}, with the ends of rows and the separator"
        self.check_rows(modality, num_embeds, known, hint)

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        crops = outputs.get("images_spatial_crop")
        counts = () if crops is None else 1 + crops.prod(axis=1)
        return item_fields(
            "image", units=["pixel_values"], counts=counts, on_host=["images_spatial_crop"]
        )

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        columns, rows = tensors["images_spatial_crop"].tolist()
        return count_image_tokens(count_side_tokens(self.get_hf_config()), columns, rows)


class DeepseekVLV2MultiModalProcessor(FamilyProcessor[DeepseekVLV2ProcessingInfo]):
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


FACTORIES = make_factories(DeepseekVLV2ProcessingInfo, DeepseekVLV2MultiModalProcessor)
