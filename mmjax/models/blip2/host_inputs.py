"""BLIP-2's encoder inputs: every picture is a unit, and gives one embedding for each query."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs, byte_pixels


def check_language_model(hf_config: Any) -> None:
    """Raise CheckpointError for a language model that has an encoder of its own."""
    if not hf_config.use_decoder_only_language_model:
        raise CheckpointError(
            f"`text_config.model_type` is `{hf_config.text_config.model_type}`, which has an "
            "encoder of its own; BLIP-2 is served with decoders alone: take a checkpoint with `opt`"
        )


class Blip2HostInputs(HostInputs):
    """Pictures of one size, with `num_query_tokens` embeddings each."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        side = hf_config.vision_config.image_size
        self.encoder_spec = EncoderSpec(
            inputs=byte_pixels("pixel_values", (3, side, side)),
            tokens_per_unit=hf_config.num_query_tokens,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the picture as `[1, C, Y, X]`."""
        return {"pixel_values": item["pixel_values"][None]}
