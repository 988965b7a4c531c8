"""BLIP-2's encoder inputs: every picture is a unit, and gives one embedding for each query."""

from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs


def check_language_model(hf_config: Any) -> None:
    """Raise CheckpointError for a language model that has an encoder of its own."""
    if not hf_config.use_decoder_only_language_model:
        raise CheckpointError(
            f"`text_config.model_type` is `{hf_config.text_config.model_type}`, which has an "
            "encoder of its own; BLIP-2 is served with decoders alone: take a checkpoint with `opt`"
        )


class Blip2HostInputs(UnitHostInputs):
    """Pictures of one size, with `num_query_tokens` embeddings each."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        side = hf_config.vision_config.image_size
        return (3, side, side), hf_config.num_query_tokens
