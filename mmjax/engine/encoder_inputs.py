"""The encoder's prompt of an encoder-decoder model's request, and its hidden states as one item."""

from collections.abc import Sequence
from itertools import count

import numpy as np

from mmjax.engine.scheduling.admission import AdmissionLimits
from mmjax.engine.scheduling.request import EncoderItem, EncoderPrompt
from mmjax.errors import RequestValueError
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, PlaceholderRange


class EncoderInputs:
    """Checks encoder prompts, and makes the items that are their hidden states."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._numbers = count()

    def check(
        self, token_ids: Sequence[int] | None, features: Sequence[MultiModalFeatureSpec]
    ) -> Sequence[int]:
        """Return the encoder's prompt of a request; `RequestError` if it cannot be computed."""
        if token_ids is None:
            raise RequestValueError(
                "the request has no encoder's prompt, but the model is an encoder-decoder; add one",
                param="encoder_prompt",
            )
        self._limits.check_encoder_prompt(token_ids, features)
        return token_ids

    def make(self, token_ids: Sequence[int], items: Sequence[EncoderItem]) -> EncoderItem:
        """Return the hidden states of a prompt, which has passed `check`."""
        return EncoderItem(
            # Hidden states depend on image and text together; request ids may repeat.
            identifier=f"encoder of request {next(self._numbers)}",
            mm_position=PlaceholderRange(offset=0, length=len(token_ids)),
            prompt=EncoderPrompt(token_ids=np.array(token_ids, np.int32), items=items),
        )
