"""Precomputed embeddings of requests: validated, and written to the encoder-output pool."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmjax.engine.scheduling.buckets import next_bucket
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.errors import RequestRuntimeError, RequestTypeError, RequestValueError
from mmjax.processing.items.embeddings import EMBEDS_DTYPES
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec


class WriteCall(NamedTuple):
    """The host's arguments of one call of `write_rows`."""

    embeds: np.ndarray
    """[rows, D], in the pool's dtype."""
    dst_rows: np.ndarray
    """int32[rows]: rows of the pool; padding: `num_rows`, which is out of range."""


class PrecomputedEmbeds:
    """Validates precomputed embeddings, and makes calls of `write_rows`."""

    def __init__(self, *, is_enabled: bool, num_rows: int, width: int, dtype: Any) -> None:
        """`num_rows`, `width` (the language model's) and `dtype` are the pool's."""
        self._is_enabled = is_enabled
        self._num_rows = num_rows
        self._width = width
        self._dtype = np.dtype(dtype)

    def find(self, feature: MultiModalFeatureSpec) -> Any:
        """Return the embeddings of an item; None if it must be encoded."""
        name = f"{feature.modality}_embeds"
        if not self._is_enabled or feature.tensors is None or name not in feature.tensors:
            return None
        return feature.tensors[name].data

    def make_item(self, feature: MultiModalFeatureSpec, embeds: Any) -> EncoderItem:
        """Return the item with embeddings in the pool's dtype.

        Raises `RequestError` for another shape or dtype, and for values that are not finite after
        the cast.
        """
        name = f"`{feature.modality}_embeds` of item {feature.identifier}"
        given = np.asarray(embeds)
        if given.dtype.name not in EMBEDS_DTYPES:
            raise RequestTypeError(
                f"{name} are of dtype {given.dtype}; give one of {', '.join(EMBEDS_DTYPES)}",
                param="multi_modal_data",
            )
        expected = (feature.mm_position.get_num_embeds(), self._width)
        if given.shape != expected:
            raise RequestRuntimeError(
                f"{name} have shape {given.shape}; its placeholders and the model's width ask for "
                f"{expected}",
                param="multi_modal_data",
            )
        with np.errstate(over="ignore"):
            rows = given.astype(self._dtype)
        if not np.isfinite(rows).all():
            raise RequestValueError(
                f"{name} have values that are NaN, or beyond {self._dtype.name}; give finite ones",
                param="multi_modal_data",
            )
        return EncoderItem(
            identifier=feature.identifier, mm_position=feature.mm_position, embeds=rows
        )

    def fill(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray], sizes: Sequence[int]
    ) -> Iterator[WriteCall]:
        """Yield the calls of the `sizes` that write items to their pool rows."""
        embeds = np.concatenate([item.embeds for item in items if item.embeds is not None])
        dst_rows = np.concatenate(rows)
        start = 0
        while start < len(dst_rows):
            count = min(len(dst_rows) - start, sizes[-1])
            call = self.empty(next_bucket(sizes, count))
            call.embeds[:count] = embeds[start : start + count]
            call.dst_rows[:count] = dst_rows[start : start + count]
            yield call
            start += count

    def empty(self, size: int) -> WriteCall:
        """Return a call of padding."""
        return WriteCall(
            np.zeros((size, self._width), self._dtype), np.full(size, self._num_rows, np.int32)
        )
