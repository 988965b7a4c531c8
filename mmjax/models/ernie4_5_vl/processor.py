"""ERNIE 4.5 VL's prompt side: grids of pictures between their marks.

Before: `Picture 1:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>`. After: the placeholder is
repeated for each square of patches; its marks are a picture's tokens as well, without embeddings.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmjax.models.ernie4_5_vl.host_inputs import Ernie45VLHostInputs
from mmjax.models.family import make_factories
from mmjax.models.grid_family import GridInfo
from mmjax.processing.chat_turns import write_parts, write_turns

IMAGE = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
CHAT_TEMPLATE = write_turns(
    start="{'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[message.role]",
    content=write_parts(image=IMAGE),
    end=r"'<|end_of_sentence|>' if message.role == 'assistant' else '\n'",
    answer="'Assistant: '",
    first="{{- '<|begin_of_sentence|>' -}}",
)


class Ernie45VLProcessingInfo(GridInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = Ernie45VLHostInputs
    image_processors: ClassVar = {"Ernie4_5_VLMoe": "ernie4_5_vl_moe"}
    limits: ClassVar = {"image": None}
    placeholders: ClassVar = {"image": IMAGE}

    @property
    def patch_depth(self) -> int:
        return 1

    @property
    def _marks(self) -> tuple[int, int]:
        config = self.get_hf_config()
        return config.image_start_token_id, config.image_end_token_id

    def get_target(self, modality: str) -> list[int]:
        """Return the placeholder between its marks: which token is of a picture depends on it."""
        start, end = self._marks
        return [start, self.get_embed_token_id(modality), end]

    def get_counted_placeholder(self, modality: str) -> str | None:
        return self.get_tokenizer().decode([self.get_embed_token_id(modality)])

    def write_item(self, modality: str, size: Any) -> list[int]:
        start, end = self._marks
        return [start, *super().write_item(modality, size), end]

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Say which tokens go to the experts of what is seen."""
        kinds = np.isin([token_ids], [*self._marks, self.get_embed_token_id("image")])
        return {**tensors, "moe_mm_token_type_ids": kinds.astype(int)}


FACTORIES = make_factories(Ernie45VLProcessingInfo)
