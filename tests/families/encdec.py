"""Rows of encoder-decoders that read a prompt, and an image's embeddings first in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from mmjax.models.host_inputs import PromptItem
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.processing.tensors.inputs import PlaceholderRange
from tests.families.tiny import Media, Part, TinyFamily, Words, draw_words, listed


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it, with the decoder's prompt."""
    assert sample.encoder_token_ids is not None
    decoder_ids = torch.tensor(sample.token_ids, dtype=torch.long)[None]
    inputs = make_reference_inputs(sample.encoder_token_ids, listed(sample))
    return inputs | {"decoder_input_ids": decoder_ids}


@dataclass(frozen=True, kw_only=True, eq=False)
class EncDecFamily(TinyFamily):
    """The last text, if it is not the only one, is the decoder's."""

    start: int
    """What the decoder's prompt begins with."""

    def draw_sample(self, config: Any, parts: Sequence[Part]) -> Sample:
        """Return the parts as the prompts of both, the image first in the encoder's."""
        texts = [draw_words(part, self.word_ids) for part in parts if isinstance(part, Words)]
        answer = texts.pop() if len(texts) > 1 else []
        ids: list[int] = []
        items = []
        for part in parts:
            if isinstance(part, Media):
                drawn = self.draw_item(config, part)
                place = PlaceholderRange(len(ids), len(drawn.token_ids))
                items.append(PromptItem(place, drawn.tensors))
                ids += drawn.token_ids
        return Sample(
            token_ids=np.array([self.start, *answer], np.int32),
            items=items,
            encoder_token_ids=np.array([*ids, *chain(*texts)], np.int32),
        )
