"""BLIP-2's encoder inputs: every picture is a unit, and gives one embedding for each query."""

from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs

_MAX_ENCODER_LEN = 512
"""Tokens of the longest prompt of T5's encoder, the queries included, at which all are computed:
the length of its training (`n_positions`)."""


def check_language_model(hf_config: Any, *, has_encoder: bool) -> None:
    """Raise CheckpointError for an encoder-decoder where a decoder alone is served.

    `has_encoder`: whether it is T5, which is served with its encoder.
    """
    if not has_encoder and not hf_config.use_decoder_only_language_model:
        raise CheckpointError(
            f"`text_config.model_type` is `{hf_config.text_config.model_type}`, which has an "
            "encoder of its own; BLIP-2 is served with decoders alone, such as `opt`, and with `t5`"
        )


class Blip2HostInputs(UnitHostInputs):
    """Pictures of one size, with `num_query_tokens` embeddings each."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        side = hf_config.vision_config.image_size
        return (3, side, side), hf_config.num_query_tokens


class Blip2T5HostInputs(Blip2HostInputs):
    """The same; and how long the encoder's prompt around them may be."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        positions = getattr(hf_config.text_config, "n_positions", None) or _MAX_ENCODER_LEN
        self.max_encoder_len = min(positions, _MAX_ENCODER_LEN)
        if hf_config.num_query_tokens >= self.max_encoder_len:
            raise CheckpointError(
                f"`num_query_tokens` is {hf_config.num_query_tokens}, and the encoder takes "
                f"{self.max_encoder_len} tokens (`text_config.n_positions`)"
            )
