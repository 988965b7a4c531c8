"""Processors as an out-of-tree author writes them from the guide, overriding what it names alone.

Of families that mmjax has as well: `test_seed_examples.py` compares them.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import BatchFeature

from mmjax import MULTIMODAL_REGISTRY
from mmjax.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    EncDecMultiModalProcessor,
    ImageProcessorItems,
    ImageSize,
    MultiModalFieldConfig,
    PlaceholderFeaturesInfo,
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdateDetails,
    replace_token_matches,
)
from tests.families import blip2, chameleon, florence2, fuyu, gemma3, llava

# ---- what the guide's builders of dummy inputs have in common -----------------------------------


class LargestImages(BaseDummyInputsBuilder[Any]):
    """Images of the size with the most features; no text, unless a subclass has some."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
    ) -> Any:
        target_width, target_height = self.info.get_image_size_with_most_features()
        image_overrides = mm_options.get("image") if mm_options else None
        return {
            "image": self._get_dummy_images(
                width=target_width,
                height=target_height,
                num_images=mm_counts.get("image", 0),
                overrides=image_overrides,
            )
        }


class ImageTokens(LargestImages):
    """With the HF processor's token for each image."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.info.get_hf_processor().image_token * mm_counts.get("image", 0)


# ---- LLaVA: each placeholder is repeated --------------------------------------------------------


class LlavaInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def load_hf_processor(self) -> Any:
        return llava.hf_processor()

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        vision_config = self.get_hf_config().vision_config
        num_image_tokens = (vision_config.image_size // vision_config.patch_size) ** 2 + 1
        if self.get_hf_processor().vision_feature_select_strategy == "default":
            num_image_tokens -= 1
        return num_image_tokens

    def get_image_size_with_most_features(self) -> ImageSize:
        side = self.get_hf_config().vision_config.image_size
        return ImageSize(width=side, height=side)


class LlavaProcessor(BaseMultiModalProcessor[LlavaInfo]):
    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {"pixel_values": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        image_token_id = self.info.get_hf_config().image_token_index

        def get_replacement(item_idx: int) -> list[int]:
            images = mm_items.get_items("image", ImageProcessorItems)
            image_size = images.get_image_size(item_idx)
            num_image_tokens = self.info.get_num_image_tokens(
                image_width=image_size.width, image_height=image_size.height
            )
            return [image_token_id] * num_image_tokens

        return [
            PromptReplacement(
                modality="image", target=[image_token_id], replacement=get_replacement
            )
        ]


@MULTIMODAL_REGISTRY.register_processor(LlavaProcessor, info=LlavaInfo, dummy_inputs=ImageTokens)
class SeedLlava:
    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality.startswith("image"):
            return "<image>"
        raise ValueError("Only image modality is supported")


# ---- Fuyu: no placeholder, additional tokens ----------------------------------------------------

FUYU_IMAGE_ID, FUYU_NEWLINE_ID = 997, 998


class FuyuInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def load_hf_processor(self) -> Any:
        return fuyu.hf_processor()

    def get_image_feature_grid_size(
        self, *, image_width: int, image_height: int
    ) -> tuple[int, int]:
        image_processor = self.get_image_processor()
        target_width = image_processor.size["width"]
        target_height = image_processor.size["height"]
        patch_width = image_processor.patch_size["width"]
        patch_height = image_processor.patch_size["height"]
        if not (image_width <= target_width and image_height <= target_height):
            scale = min(target_height / image_height, target_width / image_width)
            image_height, image_width = int(image_height * scale), int(image_width * scale)
        return math.ceil(image_width / patch_width), math.ceil(image_height / patch_height)

    def get_image_size_with_most_features(self) -> ImageSize:
        size = self.get_image_processor().size
        return ImageSize(width=size["width"], height=size["height"])


class FuyuProcessor(BaseMultiModalProcessor[FuyuInfo]):
    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        if not mm_data:
            # HF's processor warns of a text without images.
            prompt_ids = self.info.get_tokenizer().encode(prompt)
            prompt_ids = self._apply_hf_processor_tokens_only(prompt_ids)
            return BatchFeature({"input_ids": [prompt_ids]}, tensor_type="np")
        processed_outputs = super()._call_hf_processor(
            prompt=prompt, mm_data=mm_data, mm_kwargs=mm_kwargs, tok_kwargs=tok_kwargs
        )
        # The patches of the prompt's only image, as torch's: (Pn, Px * Py * C).
        processed_outputs["image_patches"] = np.asarray(processed_outputs["image_patches"])[None]
        return processed_outputs

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        boa_token_id = self.info.get_tokenizer().get_vocab()["<0x04>"]
        return [*prompt_tokens, boa_token_id]

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {"image_patches": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        bos_token_id = self.info.get_hf_config().bos_token_id
        eot_token_id = self.info.get_tokenizer().bos_token_id

        def get_replacement_fuyu(item_idx: int) -> PromptUpdateDetails:
            images = mm_items.get_items("image", ImageProcessorItems)
            image_size = images.get_image_size(item_idx)
            ncols, nrows = self.info.get_image_feature_grid_size(
                image_width=image_size.width, image_height=image_size.height
            )
            image_tokens = ([FUYU_IMAGE_ID] * ncols + [FUYU_NEWLINE_ID]) * nrows
            return PromptUpdateDetails.select_token_id(
                [*image_tokens, bos_token_id], embed_token_id=FUYU_IMAGE_ID
            )

        return [
            PromptReplacement(
                modality="image", target=[eot_token_id], replacement=get_replacement_fuyu
            )
        ]


@MULTIMODAL_REGISTRY.register_processor(FuyuProcessor, info=FuyuInfo, dummy_inputs=LargestImages)
class SeedFuyu:
    pass


# ---- Gemma 3: tokens that join with the words around them ---------------------------------------


class Gemma3Info(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def load_hf_processor(self) -> Any:
        return gemma3.hf_processor()

    def get_image_size_with_most_features(self) -> ImageSize:
        size = self.get_image_processor().size
        return ImageSize(width=size["width"], height=size["height"])


class Gemma3Processor(BaseMultiModalProcessor[Gemma3Info]):
    def _call_hf_processor(self, *args: Any, **kwargs: Any) -> BatchFeature:
        outputs = super()._call_hf_processor(*args, **kwargs)
        if "pixel_values" in outputs:
            outputs["num_patches"] = np.ones(len(outputs["pixel_values"]), np.int64)
        return outputs

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        num_patches = hf_inputs.get("num_patches", np.empty(0, np.int64))
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", num_patches),
            "num_patches": MultiModalFieldConfig.batched("image"),
        }

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        hf_processor = self.info.get_hf_processor()
        content = PromptUpdateDetails.select_text(
            hf_processor.full_image_sequence, hf_processor.tokenizer.image_token
        )
        return [
            PromptReplacement(modality="image", target=hf_processor.boi_token, replacement=content)
        ]

    def _newlines(self) -> dict[int, int]:
        vocab = self.info.get_tokenizer().get_vocab()
        return {count: vocab["\n" * count] for count in range(1, 5)}

    def _apply_token_matches(self, prompt: Any, mm_prompt_updates: Any) -> Any:
        token_ids, result = super()._apply_token_matches(prompt, mm_prompt_updates)
        newlines = self._newlines()
        for first, second in ((1, 2), (2, 1), (2, 2)):
            token_ids = replace_token_matches(
                token_ids, [newlines[first], newlines[second]], [newlines[first + second]]
            )
        return token_ids, result

    def _find_mm_placeholders(self, token_ids: Any, mm_prompt_updates: Any) -> Any:
        newlines = self._newlines()
        parts = {
            newlines[3]: [newlines[1], newlines[2]],
            newlines[4]: [newlines[2], newlines[2]],
        }
        split = [
            (part, index)
            for index, token_id in enumerate(token_ids)
            for part in parts.get(token_id, [token_id])
        ]
        found = super()._find_mm_placeholders([part for part, _ in split], mm_prompt_updates)
        return {
            modality: [
                PlaceholderFeaturesInfo(
                    modality=one.modality,
                    item_idx=one.item_idx,
                    start_idx=split[one.start_idx][1],
                    tokens=one.tokens,
                    is_embed=one.is_embed,
                )
                for one in placeholders
            ]
            for modality, placeholders in found.items()
        }


class BoiTokens(LargestImages):
    """With the token that begins an image."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return "<start_of_image>" * mm_counts.get("image", 0)


@MULTIMODAL_REGISTRY.register_processor(Gemma3Processor, info=Gemma3Info, dummy_inputs=BoiTokens)
class SeedGemma3:
    pass


# ---- BLIP-2: an insertion at the start ----------------------------------------------------------


class Blip2Info(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def load_hf_processor(self) -> Any:
        return blip2.hf_processor()

    def get_image_size_with_most_features(self) -> ImageSize:
        side = self.get_hf_config().vision_config.image_size
        return ImageSize(width=side, height=side)


class Blip2Processor(BaseMultiModalProcessor[Blip2Info]):
    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {"pixel_values": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        image_token_id = self.info.get_tokenizer().get_vocab()["<image>"]
        image_tokens = [image_token_id] * self.info.get_hf_config().num_query_tokens
        return [
            PromptInsertion(
                modality="image", target=PromptIndexTargets.start(), insertion=image_tokens
            )
        ]


@MULTIMODAL_REGISTRY.register_processor(Blip2Processor, info=Blip2Info, dummy_inputs=LargestImages)
class SeedBlip2:
    pass


# ---- Florence-2: an encoder's prompt, and tasks in words ----------------------------------------


class Florence2Info(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def load_hf_processor(self) -> Any:
        return florence2.hf_processor()

    def get_image_size_with_most_features(self) -> ImageSize:
        size = self.get_image_processor().size
        return ImageSize(width=size["width"], height=size["height"])


class Florence2Processor(EncDecMultiModalProcessor[Florence2Info]):
    def create_encoder_prompt(self, prompt: Any, mm_items: Any) -> Any:
        return prompt

    def create_decoder_prompt(self, prompt: Any, mm_items: Any) -> Any:
        return [self.info.get_hf_config().get_text_config().eos_token_id]

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        if mm_data:
            return super()._call_hf_processor(prompt, mm_data, mm_kwargs, tok_kwargs)
        prompt_ids = self.info.get_tokenizer().encode(prompt, add_special_tokens=False)
        prompt_ids = self._apply_hf_processor_tokens_only(prompt_ids)
        return BatchFeature({"input_ids": [prompt_ids]}, tensor_type="np")

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        tokenizer = self.info.get_tokenizer()
        prompt_text = tokenizer.decode(prompt_tokens, skip_special_tokens=True)
        (prompt_text,) = self.info.get_hf_processor()._construct_prompts([prompt_text])
        token_ids = tokenizer.encode(prompt_text, add_special_tokens=False)
        return [tokenizer.bos_token_id, *token_ids, tokenizer.eos_token_id]

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {"pixel_values": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        hf_processor = self.info.get_hf_processor()
        image_tokens = [hf_processor.image_token_id] * hf_processor.num_image_tokens
        return [
            PromptInsertion(
                modality="image", target=PromptIndexTargets.start(), insertion=image_tokens
            )
        ]


@MULTIMODAL_REGISTRY.register_processor(
    Florence2Processor, info=Florence2Info, dummy_inputs=LargestImages
)
class SeedFlorence2:
    pass


# ---- Chameleon: the separator ends every prompt -------------------------------------------------


class ChameleonInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def load_hf_processor(self) -> Any:
        return chameleon.hf_processor()

    def get_image_size_with_most_features(self) -> ImageSize:
        side = self.get_hf_config().vq_config.resolution
        return ImageSize(width=side, height=side)


class ChameleonProcessor(BaseMultiModalProcessor[ChameleonInfo]):
    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        tokenizer = self.info.get_tokenizer()
        return [*prompt_tokens, tokenizer.get_vocab()[tokenizer.sep_token]]

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {"pixel_values": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        processor = self.info.get_hf_processor()
        image_tokens = [processor.image_token_id] * processor.image_seq_length
        content = PromptUpdateDetails.select_token_id(
            [processor.image_start_token_id, *image_tokens, processor.image_end_token_id],
            embed_token_id=processor.image_token_id,
        )
        return [
            PromptReplacement(
                modality="image", target=[processor.image_token_id], replacement=content
            )
        ]


@MULTIMODAL_REGISTRY.register_processor(
    ChameleonProcessor, info=ChameleonInfo, dummy_inputs=ImageTokens
)
class SeedChameleon:
    pass
