"""ERNIE 4.5 VL's host inputs: grids, and positions that say which tokens are of pictures."""

from collections.abc import Sequence
from typing import Any

from mmjax.models.grid_inputs import GridHostInputs
from mmjax.models.host_inputs import PromptItem, RotaryPositions, byte_pixels
from mmjax.rounding import mark


class Ernie45VLHostInputs(GridHostInputs):
    """Patches of one frame, square by square, with their places."""

    def read_inputs(self, vision: Any) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the encoder's inputs: the shape and dtype of a patch's row."""
        width = vision.in_channels * vision.patch_size**2
        return {
            "places": ((2,), "int32"),
            **byte_pixels("pixel_values", (width,)),
            "frame_ids": ((), "int32"),
        }

    def rotary_positions(
        self, num_tokens: int, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return a cell's time, row and column; of all tokens of a picture time is marked.

        The marks around a picture are of it: they go to the same experts.
        """
        positions = super().rotary_positions(num_tokens, items)
        if positions is None:
            return None
        prompt = positions.prompt.copy()
        for item in items:
            tokens = slice(item.position.offset, item.position.offset + item.position.length)
            prompt[0, tokens] = mark(0, prompt[0, tokens])
        return RotaryPositions(prompt, positions.offset)
