"""Llama 3.2 Vision's prompt side: one token for a picture, whose rows stand in no prompt.

Before: `look <|image|> please`. After: the same; the layers of cross-attention attend to the rows
of a picture's tiles behind its token.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import check_settings
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.host_inputs import find_seen_rows
from mmjax.models.mllama.host_inputs import MAX_IMAGES, NUM_MORE_TOKENS, MllamaHostInputs
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import ImagesOnlyDataParser
from mmjax.processing.tensors.fields import MultiModalFieldConfig

IMAGE = "<|image|>"
_FIXED = frozenset({"size", "do_resize", "do_pad", "max_image_tiles"})
"""A tile would be of another size than the tower takes, or its arrangement have another number."""


class MllamaTileCutter:
    """HF's image processor, of whose tiles only those that there are are kept."""

    def __init__(self, hf_processor: Any) -> None:
        self.hf = hf_processor

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return frozenset(self.hf.valid_kwargs.__annotations__) - _FIXED

    def __call__(self, images: Sequence[Any], **kwargs: Any) -> dict[str, np.ndarray]:
        """Return `pixel_values` uint8[tiles, 3, S, S], and of images how many, and which shape.

        `num_tiles` and `aspect_ratio_ids`, int64[images].
        """
        outputs = self.hf(list(images), **kwargs)
        (pixels,), (num_tiles,) = outputs["pixel_values"], outputs["num_tiles"]
        tiles = [one[:number] for one, number in zip(pixels, num_tiles, strict=True)]
        return {
            # HF pads with zeros of float32.
            "pixel_values": np.concatenate(tiles).astype(np.uint8),
            "num_tiles": np.array(num_tiles, np.int64),
            "aspect_ratio_ids": np.asarray(outputs["aspect_ratio_ids"][0], np.int64),
            "image_affine": outputs["image_affine"],
        }


class MllamaProcessingInfo(FamilyInfo):
    chat_template = write_turns(
        start=r"'<|start_header_id|>' + message.role + '<|end_header_id|>\n\n'",
        content=write_parts(image=IMAGE),
        end="'<|eot_id|>'",
        answer=r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
    )
    data_parser = ImagesOnlyDataParser
    host_inputs = MllamaHostInputs
    image_processors: ClassVar = {"Mllama": "mllama"}
    limits: ClassVar = {"image": MAX_IMAGES}
    placeholders: ClassVar = {"image": IMAGE}

    @cached_property
    def vocab_size(self) -> int:
        """Token ids at or above this are refused; the last ones have no logits."""
        return self.get_hf_config().get_text_config().vocab_size + NUM_MORE_TOKENS

    @property
    def _arrangements(self) -> list[list[int]]:
        """Rows and columns of tiles, by `aspect_ratio_ids` less 1."""
        return self.get_hf_config().vision_config.supported_aspect_ratios

    def load_hf_processor(self) -> Any:
        self.check_token(IMAGE)
        loaded = super().load_hf_processor()
        hf_processor, vision = loaded.image_processor.hf, self.get_hf_config().vision_config
        most, side = hf_processor.max_image_tiles, vision.image_size
        listed = [[a, b] for a in range(1, most + 1) for b in range(1, most + 1) if a * b <= most]
        check_settings(
            {
                "max_image_tiles": most,
                "size": {"height": hf_processor.size.height, "width": hf_processor.size.width},
                "supported_aspect_ratios": listed,
            },
            {
                "max_image_tiles": vision.max_num_tiles,
                "size": {"height": side, "width": side},
                "supported_aspect_ratios": [list(one) for one in self._arrangements],
            },
            where="preprocessor_config.json",
            source="`vision_config` of config.json gives",
        )
        return loaded

    def wrap_image_processor(self, hf_processor: Any) -> MllamaTileCutter:
        return MllamaTileCutter(hf_processor)

    def get_unit_size(self) -> None:
        """Return nothing: tiles have the size that the files agree on."""

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of a picture of the most tiles, and how many tokens stand for it."""
        rows, columns = max(self._arrangements, key=lambda one: one[0] * one[1])
        side = self.get_hf_config().vision_config.image_size
        return ImageSize(width=columns * side, height=rows * side), 1

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return 1

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return item_fields(
            "image",
            rows=["aspect_ratio_ids"],
            units=["pixel_values"],
            counts=outputs.get("num_tiles", ()),
            on_host=["num_tiles"],
        )

    def frame_text(self, text: str) -> str:
        """Return a text with BOS, behind pictures at its beginning (HF: build_string_from_input).

        As HF's processor, which then has the tokenizer add its own.
        """
        bos = self.get_tokenizer().bos_token
        if not bos or bos in text:
            return text
        rest = text
        while rest.startswith(IMAGE):
            rest = rest.removeprefix(IMAGE)
        return text[: len(text) - len(rest)] + bos + rest

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """Write BOS in the same place where there is none: into a prompt of token ids."""
        bos, image = self.get_tokenizer().bos_token_id, self.get_embed_token_id("image")
        if bos is None or bos in token_ids:
            return token_ids
        place = next((n for n, one in enumerate(token_ids) if one != image), len(token_ids))
        return [*token_ids[:place], bos, *token_ids[place:]]

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the tensors as HF's processor gives them, of one prompt."""
        if "pixel_values" not in tensors:
            return tensors
        tiles, counts = tensors["pixel_values"], np.asarray(tensors["num_tiles"])
        most = self.get_hf_config().vision_config.max_num_tiles
        is_tile = np.arange(most)[None] < counts[:, None]
        pixels = np.zeros((*is_tile.shape, *tiles.shape[1:]), np.float32)
        pixels[is_tile] = tiles
        image = self.get_embed_token_id("image")
        places = [place for place, token in enumerate(token_ids) if token == image]
        first, end = find_seen_rows(places, [1] * len(places), len(token_ids))
        number = np.arange(len(places))[None]
        is_seen = (number >= first[:, None]) & (number < end[:, None])
        mask = is_seen[:, :, None] & is_tile[None]
        return {
            "pixel_values": pixels[None],
            "aspect_ratio_ids": np.asarray(tensors["aspect_ratio_ids"])[None],
            "aspect_ratio_mask": is_tile[None].astype(np.int64),
            "cross_attention_mask": mask[None].astype(np.int64),
        }


FACTORIES = make_factories(MllamaProcessingInfo)
