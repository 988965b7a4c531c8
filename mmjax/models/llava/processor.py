"""LLaVA-1.5's processor: each `<image>` is repeated for each of the tower's features.

Before: `look <image> please`. After: `look <image>*576 please`; all of them take embeddings.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from mmjax.errors import check_settings
from mmjax.models.family import FamilyInfo, make_factories
from mmjax.models.llava.host_inputs import LlavaHostInputs
from mmjax.processing.chat_turns import write_turns
from mmjax.processing.image_processors.image import check_resized_pixels, check_squared_pixels

CHAT_TEMPLATE = write_turns(
    start="{'user': 'USER: ', 'assistant': 'ASSISTANT: '}[message.role]",
    content="message.content",
    end="eos_token if message.role == 'assistant' else ' '",
    answer="'ASSISTANT:'",
)
"""Vicuna's turns, in which LLaVA-1.5 was trained."""


class LlavaProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = LlavaHostInputs
    image_processors: ClassVar = {"CLIP": "clip", "Llava": "llava", "Siglip": "siglip"}
    placeholders: ClassVar = {"image": "<image>"}

    def load_hf_processor(self) -> Any:
        hf_config = self.get_hf_config()
        facts = {
            "patch_size": hf_config.vision_config.patch_size,
            "vision_feature_select_strategy": hf_config.vision_feature_select_strategy,
        }
        check_settings(self.processor_settings, facts)
        self.check_token(self.find_token("image_token", "<image>"), "image_token_index")
        return super().load_hf_processor()

    def check_sizes(self, mm_data: Mapping[str, Any], mm_kwargs: Mapping[str, object]) -> None:
        """Refuse also what HF would pad or scale to a bomb."""
        image_processor = self.get_image_processor()
        images = mm_data.get("images", ())
        max_pixels = self.ctx.get_mm_config().max_image_pixels
        if image_processor.do_pad:
            check_squared_pixels(images, max_pixels)
        else:
            check_resized_pixels(images, image_processor.size.shortest_edge, max_pixels)
        super().check_sizes(mm_data, mm_kwargs)


FACTORIES = make_factories(LlavaProcessingInfo)
