"""Qwen-VL's host inputs: images of one size, and the level of a prompt's rotary base."""

from collections.abc import Mapping, Sequence
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import PromptItem, RotaryPositions, UnitHostInputs
from mmjax.rounding import count_halvings

NUM_QUERIES = 256
"""Embeddings of an image; no key of the config."""


def visual_config(hf_config: Any) -> Mapping[str, Any]:
    """Return the keys of the vision tower; `CheckpointError` for a Qwen without one."""
    visual = getattr(hf_config, "visual", None)
    if not isinstance(visual, dict):
        raise CheckpointError(
            "config.json has no `visual`: it is a Qwen that reads text alone, which mmjax does not "
            "serve; Qwen-VL and Qwen-VL-Chat have it"
        )
    return visual


class QwenVLHostInputs(UnitHostInputs):
    """One unit an image."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        side = visual_config(hf_config)["image_size"]
        return (3, side, side), NUM_QUERIES

    def rotary_positions(
        self, num_tokens: int, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return the indices, and on the third axis the level of a long prompt's base."""
        level = 0
        if self.hf_config.use_dynamic_ntk:
            level = count_halvings(num_tokens, self.hf_config.seq_length)
        return RotaryPositions.of_level(num_tokens, level, "ntk")
