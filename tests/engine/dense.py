"""The oracle for many requests: greedy answers by passes over whole sequences, memoised."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind
from mmjax.models.host_inputs import Sees
from mmjax.parity.arrays import Sample
from mmjax.parity.compare import LOGITS
from tests.families.tiny import Parts, TinyModel

LEAST_LENGTH = 192
"""Tokens of the only shape, unless a family's prompts have more."""


class Answer(NamedTuple):
    """A greedy answer, and how far the second best token lay behind at each place."""

    token_ids: list[int]
    gaps: list[float]


class DenseOracle:
    """A model, and what it answers alone; `is_causal`: also inside an image.

    Attention is dense; where tokens attend to an encoder's rows, it goes over blocks that each pass
    fills anew.
    """

    def __init__(self, model: TinyModel) -> None:
        self._model, self._paged = model, model.paged
        self._length = max(LEAST_LENGTH, model.family.max_model_len)
        self._forward = jax.jit(self._logits_at)
        self.answer = cache(self._answer)

    def _answer(self, parts: Parts, max_tokens: int, is_causal: bool) -> Answer:
        sample = self._model.draw_sample(parts)
        rows = self._paged.embed(sample) if sample.items else None
        answer = Answer([], [])
        for _ in range(max_tokens):
            ids = np.append(sample.token_ids, answer.token_ids).astype(np.int32)
            if self._paged.max_encoder_len:
                logits = self._over_blocks(sample, ids)
            else:
                logits = self._dense(sample, ids, rows, is_causal)
            second, first = np.partition(logits, -2)[-2:]
            answer.token_ids.append(int(logits.argmax()))
            answer.gaps.append(float(first - second))
        return answer

    def _dense(
        self, sample: Sample, ids: np.ndarray, rows: np.ndarray | None, is_causal: bool
    ) -> np.ndarray:
        prompt, num_tokens = sample.num_tokens, len(ids)
        token_ids = np.zeros(self._length, np.int32)
        token_ids[:num_tokens] = ids
        embeds = np.zeros((self._length, self._paged.shape.embed_width), np.float32)
        is_embed = np.zeros(self._length, bool)
        is_embed[:prompt] = sample.is_embed
        if rows is not None:
            embeds[is_embed] = rows
        looks_back = self._paged.host_inputs.is_causal
        items = [item for item in sample.items if not looks_back(item.tensors)]
        sees = "past" if is_causal else self._paged.sees
        ahead = see_ahead(replace(sample, items=items), sees, self._length)
        rotary = self._paged.host_inputs.prompt_positions(sample.token_ids, sample.items)
        indices = np.tile(np.arange(self._length, dtype=np.int32), (3, 1))
        positions = indices if rotary is None else rotary.between(0, self._length)
        row = np.int32(num_tokens - 1)
        arguments = (token_ids, (embeds, is_embed), ahead, (positions, row))
        return np.asarray(self._forward(self._paged.params, *arguments))

    def _over_blocks(self, sample: Sample, ids: np.ndarray) -> np.ndarray:
        whole = Sample(
            token_ids=ids, items=sample.items, encoder_token_ids=sample.encoder_token_ids
        )
        return self._paged.run(whole)[LOGITS][len(ids) - 1]

    def _logits_at(
        self, params: Any, ids: Any, merged: tuple[Any, Any], ahead: Any, places: tuple[Any, Any]
    ) -> Any:
        """Return the logits of a row.

        `merged`: embeddings and where; `ahead`: as `see_ahead` gives it; `places`: positions, and
        the row that is asked for.
        """
        (embeds, is_embed), (positions, row) = merged, places
        model = bind(self._paged.graphdef, params)
        text = model.embed_input_ids(ids)
        # Text has no features for the first layers.
        text = jnp.pad(text, ((0, 0), (0, embeds.shape[1] - text.shape[1])))
        hidden = jnp.where(is_embed[:, None], embeds, text)
        index = jnp.arange(self._length, dtype=jnp.int32)
        mask = (index[None, :] <= index[:, None]) | ahead
        beyond = ahead[None] if self._paged.sees in ("prompt", "reference") else None
        metadata = DenseAttentionMetadata(index[None], mask[None], beyond)
        reads_ids = model.language_model.reads_token_ids
        more = {"token_ids": ids} if reads_ids else {}
        states, _ = model(hidden, positions, None, metadata, **more)
        return model.compute_logits(jax.lax.dynamic_slice_in_dim(states, row, 1))[0]


def see_ahead(sample: Sample, sees: Sees, length: int) -> np.ndarray:
    """Return bool[length, length]: which tokens see which others wherever these are."""
    found, is_embed = np.zeros((length, length), bool), sample.is_embed
    inside = slice(0, sample.num_tokens)
    if sees == "prompt":
        found[inside, inside] = True
    elif sees == "reference":
        found = np.tri(length, dtype=bool)
        found[:, sample.num_tokens :] = False
    elif sees == "all_items":
        found[inside, inside] = is_embed[:, None] & is_embed
    elif sees == "items":
        run = np.cumsum(~is_embed)
        found[inside, inside] = (run[:, None] == run) & is_embed[:, None] & is_embed
    return found
