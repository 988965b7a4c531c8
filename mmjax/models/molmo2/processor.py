"""Molmo 2's prompt side: BOS, and each `<|image|>` becomes two views of the image.

Before: `<|image|>what is it`. After: `<bos> <low_res_im_start> (<im_patch>*14 <im_col>)*14
<im_end> <im_start> (<im_patch>*columns <im_col>)*rows <im_end> what is it`. The marks are
embeddings of the image, too: they see it, and are seen, in both directions.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import CheckpointError, check_settings
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.molmo2.answers import parse_points
from mmjax.models.molmo2.host_inputs import (
    MARKS,
    MAX_POOLED,
    CropShape,
    Molmo2HostInputs,
    read_prompt_ids,
)
from mmjax.models.molmo2.image_processor import Molmo2ImageProcessor
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser
from mmjax.processing.tensors.fields import MultiModalFieldConfig

IMAGE, PATCH = "<|image|>", "<im_patch>"
CHAT_TEMPLATE = r"""
{%- set found = namespace(images=0) -%}
{%- for message in messages -%}
    {%- for part in message.content if part.type == 'image' -%}
        {%- set found.images = found.images + 1 -%}
    {%- endfor -%}
{%- endfor -%}
{%- for number in range(1, found.images + 1) -%}
    {{- ('Image ' ~ number if found.images > 1 else '') ~ '<|image|>' -}}
{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- for part in message.content if part.type == 'text' -%}
        {{- ('' if loop.first else ' ') + part.text -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""
"""The published order, images before all turns; the published one refuses a system's turn."""
_FIXED_SETTINGS: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 2,
}


class Molmo2ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {
        "Describe": "Describe this image.",
        "Point to": "Point to the {boats}.",
        "Count": "How many {boats} are there?",
    }
    data_parser = ImagesOnlyDataParser
    host_inputs = Molmo2HostInputs
    placeholders: ClassVar = {"image": IMAGE}
    marks_are_embeds = True
    max_answer_images = math.inf

    @cached_property
    def vocab_size(self) -> int:
        """Token ids at or above this are refused; the last rows have no logits."""
        text = self.get_hf_config().get_text_config()
        return text.vocab_size + text.additional_vocab_size

    def load_hf_processor(self) -> ProcessorOfParts:
        """Return mmjax's own: HF's needs torchvision."""
        settings = load_image_settings(self.ctx.model_config.path)
        size = settings.get("size", {"height": 378, "width": 378})
        settings = {**settings, **self.processor_settings, "crop_side": size["height"]}
        names = settings.keys() & Molmo2ImageProcessor.__dataclass_fields__
        image_processor = Molmo2ImageProcessor(**{name: settings[name] for name in names})
        _ = self.encoder_spec  # refuses crops that the tower does not take
        self._check_settings({**settings, "size": size}, image_processor)
        ids: dict[str, int] = dict(zip((PATCH, *MARKS), self._prompt_ids, strict=True))
        found = {token: self.get_token_id(token) for token in ids}
        check_settings(found, ids, where="the tokenizer")
        return ProcessorOfParts(tokenizer=self.get_tokenizer(), image_processor=image_processor)

    def _check_settings(self, found: Mapping[str, Any], cutter: Molmo2ImageProcessor) -> None:
        vision = self.get_hf_config().vision_config
        side = vision.image_size[0]
        wanted = {
            **_FIXED_SETTINGS,
            "size": {"height": side, "width": side},
            "patch_size": vision.patch_size,
        }
        check_settings(found, wanted, where="the image processor", source="the model takes")
        rows, columns = cutter.pooling_size
        if not 1 <= rows * columns <= MAX_POOLED or cutter.window_patches < 1:
            raise CheckpointError(
                f"`pooling_size` and `overlap_margins` of the image processor are "
                f"{list(cutter.pooling_size)} and {list(cutter.overlap_margins)}; mmjax pools up "
                f"to {MAX_POOLED} patches, and a crop has {cutter.crop_patches} a side"
            )

    @property
    def _prompt_ids(self) -> Sequence[int]:
        return read_prompt_ids(self.get_hf_config())

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """Begin a prompt with BOS, or with EOS where the tokenizer has none, as Qwen's."""
        tokenizer = self.get_tokenizer()
        bos = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if bos is None:
            raise CheckpointError(
                "the tokenizer has neither a BOS nor an EOS token, and Molmo 2's prompts begin "
                "with one of them: name it in tokenizer_config.json"
            )
        return token_ids if token_ids[:1] == [bos] else [bos, *token_ids]

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger of the checkpoint's number of crops and the operator's."""
        cutter: Molmo2ImageProcessor = self.get_image_processor()
        operators = self.scope_kwargs({}).get("max_crops") or cutter.max_crops
        return {"max_crops": max(cutter.max_crops, operators)}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of an image with the most embeddings, and how many."""
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs())
        return self.get_image_processor().find_largest(kwargs)

    def get_unit_size(self) -> None:
        """Return nothing: images have any size."""

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        several = {
            "image_num_crops": "pixel_values",
            "num_windows": "image_token_pooling",
            "num_tokens": "image_rows",
        }
        found = item_fields("image", on_host=[*several, "image_grids"])
        for count, name in several.items():
            found |= item_fields("image", units=[name], counts=outputs.get(count, ()))
        return found

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Number patches over all images of a prompt, as HF's model reads them."""
        if "image_token_pooling" not in tensors:
            return tensors
        pooling, crops = tensors["image_token_pooling"], np.asarray(tensors["image_num_crops"])
        first = (np.cumsum(crops) - crops) * CropShape.of(self.get_hf_config()).side ** 2
        shift = np.repeat(first, np.asarray(tensors["num_windows"]))[:, None]
        return {**tensors, "image_token_pooling": np.where(pooling < 0, pooling, pooling + shift)}

    def get_embed_token_id(self, modality: str) -> int:
        return self._prompt_ids[0]

    def get_target(self, modality: str) -> list[int]:
        return [self.get_token_id(IMAGE)]

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(tensors["image_rows"].tolist())

    def write_item(self, modality: str, size: tuple[int, ...]) -> list[int]:
        patch, *marks = self._prompt_ids
        return [patch if row >= 0 else marks[-1 - row] for row in size]

    def parse_answer(
        self, token_ids: Sequence[int], *, image_sizes: Sequence[ImageSize]
    ) -> Mapping[str, Any]:
        """Return an answer's points."""
        text = self.get_tokenizer().decode(token_ids, skip_special_tokens=True)
        return parse_points(text, image_sizes)


FACTORIES = make_factories(Molmo2ProcessingInfo)
