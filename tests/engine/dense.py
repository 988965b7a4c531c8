"""The oracle for many requests: greedy answers by dense passes over whole sequences, memoised."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind
from tests.engine.tiny import DENSE_LENGTH, message, picture

Parts = tuple[Any, ...]
"""What `tiny.message` takes, in tuples: token ids (tuples of more than two), (seed, units)."""


class Answer(NamedTuple):
    """A greedy answer, and how far the second best token lay behind at each place."""

    token_ids: list[int]
    gaps: list[float]


class DenseOracle:
    """A model, and what it answers alone; `is_causal`: also inside a picture."""

    def __init__(self, graphdef: Any, params: Any, hidden_size: int) -> None:
        self._graphdef, self._params = graphdef, params
        self._hidden_size = hidden_size
        self._forward = jax.jit(self._logits_at)
        self._embed = jax.jit(
            lambda params, pixels: bind(graphdef, params).embed_multimodal(pixel_values=pixels)
        )
        self.answer = cache(self._answer)
        self._embeddings = cache(self._encode)

    def _answer(self, parts: Parts, max_tokens: int, is_causal: bool) -> Answer:
        request = message("oracle", [list(part) if len(part) != 2 else part for part in parts])
        token_ids = list(request.prompt_token_ids)
        embeds = np.zeros((DENSE_LENGTH, self._hidden_size), np.float32)
        is_embed = np.zeros(DENSE_LENGTH, bool)
        end = np.arange(DENSE_LENGTH, dtype=np.int32) + 1
        pictures = [part for part in parts if len(part) == 2]
        for (seed, units), feature in zip(pictures, request.mm_features, strict=True):
            rows = self._embeddings(seed, units)
            for first, last in feature.mm_position.extract_embeds_range():
                run = slice(first, last + 1)
                embeds[run], rows = rows[: last + 1 - first], rows[last + 1 - first :]
                is_embed[run] = True
                if not is_causal:
                    end[run] = last + 1
        answer = Answer([], [])
        for _ in range(max_tokens):
            ids = np.zeros(DENSE_LENGTH, np.int32)
            ids[: len(token_ids)] = token_ids
            row = np.int32(len(token_ids) - 1)
            logits = np.asarray(self._forward(self._params, ids, embeds, is_embed, end, row))
            second, first = np.partition(logits, -2)[-2:]
            answer.token_ids.append(int(logits.argmax()))
            answer.gaps.append(float(first - second))
            token_ids.append(answer.token_ids[-1])
        return answer

    def _encode(self, seed: int, units: int) -> np.ndarray:
        rows = self._embed(self._params, picture(seed, units))
        return np.asarray(rows).reshape(-1, self._hidden_size)

    def _logits_at(
        self, params: Any, ids: Any, embeds: Any, is_embed: Any, end: Any, row: Any
    ) -> Any:
        model = bind(self._graphdef, params)
        merged = jnp.where(is_embed[:, None], embeds, model.embed_input_ids(ids))
        index = jnp.arange(DENSE_LENGTH, dtype=jnp.int32)
        metadata = DenseAttentionMetadata(index[None], (index[None, :] < end[:, None])[None])
        states, _ = model(merged, jnp.broadcast_to(index[None], (3, DENSE_LENGTH)), None, metadata)
        return model.compute_logits(jax.lax.dynamic_slice_in_dim(states, row, 1))[0]
