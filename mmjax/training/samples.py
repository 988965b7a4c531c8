"""One processed prompt, and the engine's request that is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmjax.engine.scheduling.request import EncoderItem, EncoderPrompt, Request, join_rows
from mmjax.models.host_inputs import HostInputs, PromptItem, Sees
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import MultiModalInputs, PlaceholderRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One processed prompt."""

    token_ids: np.ndarray
    """int32[T]"""
    items: Sequence[PromptItem] = ()
    """In the order of the prompt."""
    encoder_token_ids: np.ndarray | None = None
    """int32[S]: the prompt of an encoder-decoder's encoder, where the items are; else None."""
    item_hashes: Sequence[str] = ()
    """Of each item, where equal ones are to be encoded once; empty: each is another."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_embed(self) -> np.ndarray:
        """bool[T]: whether an encoder's row stands there."""
        return find_embeds(self.num_tokens, self.items)


def find_embeds(num_tokens: int, items: Sequence[PromptItem]) -> np.ndarray:
    """Return bool[T]: where an item's embedding stands, in a prompt of `num_tokens`."""
    is_embed = np.zeros(num_tokens, bool)
    for place, _ in items:
        inside = slice(place.offset, place.offset + place.length)
        # Neighbours may share a token of text, hence the or.
        is_embed[inside] |= True if place.is_embed is None else place.is_embed
    return is_embed


def make_sample(inputs: MultiModalInputs) -> Sample:
    """Return the sample of what our processor gave; RuntimeError where an item has no tensors."""
    items: list[tuple[Any, str]] = [
        (
            PromptItem(place, inputs.mm_kwargs.get_item(modality, number).get_data()),
            f"{modality} {inputs.mm_hashes[modality][number]}",
        )
        for modality, places in inputs.mm_placeholders.items()
        for number, place in enumerate(places)
    ]
    items.sort(key=lambda pair: pair[0].position.offset)
    encoder_ids = inputs.encoder_prompt_token_ids
    return Sample(
        token_ids=np.asarray(inputs.prompt_token_ids, np.int32),
        items=[item for item, _ in items],
        encoder_token_ids=None if encoder_ids is None else np.asarray(encoder_ids, np.int32),
        item_hashes=[item_hash for _, item_hash in items],
    )


def make_request(
    sample: Sample,
    host_inputs: HostInputs,
    sees: Sees,
    *,
    identifiers: Sequence[str],
    answer: Sequence[int] = (),
    max_tokens: int = 1,
) -> Request:
    """Return the request of a sample, and of what was answered so far.

    `identifiers`: of its items; those of one are encoded once.
    """
    items = [
        EncoderItem(
            identifier=identifier,
            mm_position=position,
            units=host_inputs.encoder_inputs(tensors),
            rows=host_inputs.embed_rows(tensors),
            is_causal=host_inputs.is_causal(tensors),
        )
        for identifier, (position, tensors) in zip(identifiers, sample.items, strict=True)
    ]
    encoder, ids = None, sample.encoder_token_ids
    if host_inputs.attends_to_items:
        encoder = join_rows(f"rows of {[*identifiers]}", items)
    elif ids is not None:
        encoder = EncoderItem(
            identifier=f"states of {ids.tolist()} with {[*identifiers]}",
            mm_position=PlaceholderRange(offset=0, length=len(ids)),
            prompt=EncoderPrompt(token_ids=ids, items=items),
        )
    return Request(
        request_id="",
        prompt_token_ids=sample.token_ids.tolist(),
        output_token_ids=answer,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        max_model_len=sample.num_tokens + max_tokens,
        items=items if encoder is None else (),
        encoder=encoder,
        attended=items if host_inputs.attends_to_items else (),
        rotary=host_inputs.prompt_positions(sample.token_ids, sample.items),
        sees=sees,
    )
