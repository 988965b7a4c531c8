"""EXAONE 4.5's host inputs: patches window by window, and positions that count tokens."""

from collections.abc import Sequence

from mmjax.models.grid_inputs import WindowGridHostInputs
from mmjax.models.host_inputs import PromptItem, RotaryPositions


class Exaone45HostInputs(WindowGridHostInputs):
    """Qwen2.5-VL's patches; the decoder knows nothing of their rows and columns."""

    def rotary_positions(
        self, num_tokens: int, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return None: a picture's tokens are numbered as text is."""
        return None
