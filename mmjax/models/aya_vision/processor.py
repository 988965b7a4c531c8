"""Aya Vision's prompt side: tiles of a picture by their numbers, and the whole of it last.

Before: `look <image> please`. After, of a picture of two tiles: `look <|START_OF_IMG|> TILE_1
<|IMG_PATCH|>*N TILE_2 <|IMG_PATCH|>*N TILE_GLOBAL <|IMG_PATCH|>*N <|END_OF_IMG|> please`; of one
that is not cut, TILE_GLOBAL alone. Only the N take embeddings. Of Command A Vision: before
`<|IMG_PATCH|>`, after `<|START_OF_IMG|>`, for every tile `<|IMG_PATCH|>*N <|IMG_LINE_BREAK|>`, and
`<|END_OF_IMG|>`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from mmjax.errors import CheckpointError, check_settings
from mmjax.models.aya_vision.host_inputs import AyaVisionHostInputs
from mmjax.models.family import make_factories
from mmjax.models.tiles import TiledInfo
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.image_processors.tiling import CanvasCutter
from mmjax.processing.prompt_updates.updates import as_ids

START, PATCH, END = "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>"
LINE_BREAK = "<|IMG_LINE_BREAK|>"

_ROLES = "{'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}"
CHAT_TEMPLATE = write_turns(
    start=f"'<|START_OF_TURN_TOKEN|><|' + {_ROLES}[message.role] + '_TOKEN|>'",
    content=write_parts(image="<image>"),
    end="'<|END_OF_TURN_TOKEN|>'",
    answer="'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'",
)
"""Command R's turns, without the system message that published checkpoints add."""


class AyaVisionProcessingInfo(TiledInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = AyaVisionHostInputs
    placeholders: ClassVar = {"image": "<image>"}
    embed_token = PATCH
    reserves_embed_token = True
    item_bounds = (START, END)

    def load_hf_processor(self) -> ProcessorOfParts:
        self.check_token(PATCH)
        self.check_grid(self.processor_settings)
        defaults = {"images_kwargs": {"crop_to_patches": True}}  # as HF's AyaVisionProcessor
        return replace(super().load_hf_processor(), defaults=defaults)

    def check_grid(self, settings: Mapping[str, Any]) -> None:
        """Refuse a processor that writes another number of tokens than a tile has embeddings."""
        # Without the keys: what HF's AyaVisionProcessor takes.
        image, patch = settings.get("img_size", 364), settings.get("patch_size", 28)
        stride = patch * settings.get("downsample_factor", 1)
        if (image // stride) ** 2 != self.num_unit_tokens:
            side = math.isqrt(self.num_unit_tokens)
            raise CheckpointError(
                f"`img_size` {image} and `patch_size` times `downsample_factor` {stride} of "
                f"processor_config.json give {image // stride} tokens a side of a tile, but "
                f"config.json {side}; make them agree"
            )

    def write_item(self, modality: str, size: int) -> list[int]:
        """Write a picture of so many embeddings."""
        numbers = range(1, size // self.num_unit_tokens)
        names = [*(f"TILE_{number}" for number in numbers), "TILE_GLOBAL"]
        tiles = "".join(name + PATCH * self.num_unit_tokens for name in names)
        return as_ids(START + tiles + END, self.get_tokenizer())


class Cohere2VisionProcessingInfo(AyaVisionProcessingInfo):
    """Command A Vision's: a mark behind every tile, and none before it."""

    chat_template = CHAT_TEMPLATE.replace("<image>", PATCH)
    placeholders: ClassVar = {"image": PATCH}
    reserves_embed_token = False

    def load_hf_processor(self) -> ProcessorOfParts:
        self.check_token(PATCH)
        settings = load_image_settings(self.ctx.model_config.path)
        facts = {"patch_size": math.isqrt(self.num_unit_tokens)}  # tokens of a tile's side
        where, source = "preprocessor_config.json", "config.json gives"
        check_settings({"patch_size": 16, **settings}, facts, where=where, source=source)
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(), image_processor=CanvasCutter(settings, self.unit_side)
        )

    def write_item(self, modality: str, size: int) -> list[int]:
        tile = PATCH * self.num_unit_tokens + LINE_BREAK
        text = START + tile * (size // self.num_unit_tokens) + END
        return as_ids(text, self.get_tokenizer())


FACTORIES = make_factories(AyaVisionProcessingInfo)
COHERE2_FACTORIES = make_factories(Cohere2VisionProcessingInfo)
