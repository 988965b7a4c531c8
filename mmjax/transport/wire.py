"""What lies on the wire in place of arrays and of the dataclasses that hold them."""

from collections.abc import Mapping

import ml_dtypes
import msgspec
import numpy as np

from mmjax.sampling_params import SamplingParams

DTYPES: Mapping[str, np.dtype] = {
    **{
        name: np.dtype(name)
        for name in (
            *("bool", "int8", "int16", "int32", "int64"),
            *("uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64"),
        )
    },
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""All that an array may hold."""


class WireArray(msgspec.Struct, tag="array", frozen=True, forbid_unknown_fields=True):
    """An array whose bytes are frame number `frame`."""

    dtype: str
    shape: list[int]
    frame: int


class WireList(msgspec.Struct, tag="list", frozen=True, forbid_unknown_fields=True):
    """A ragged batch: arrays, or lists of them."""

    items: list["WireArray | WireList"]


class WireBatched(msgspec.Struct, tag="batched", frozen=True, forbid_unknown_fields=True):
    """`MultiModalBatchedField`."""

    keep_on_cpu: bool


class WireFlat(msgspec.Struct, tag="flat", frozen=True, forbid_unknown_fields=True):
    """`MultiModalFlatField`; every slice is a list of (start, stop, step), one per dimension."""

    slices: list[list[tuple[int | None, int | None, int | None]]]
    is_nested: bool
    """Whether the slices were tuples, one slice per axis."""
    dim: int
    keep_on_cpu: bool


class WireShared(msgspec.Struct, tag="shared", frozen=True, forbid_unknown_fields=True):
    """`MultiModalSharedField`."""

    batch_size: int
    keep_on_cpu: bool


class WireElem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`MultiModalFieldElem`: one keyword argument of one item."""

    data: WireArray | WireList | None
    field: WireBatched | WireFlat | WireShared


class WireSharedItem(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """`SharedItem`."""

    mm_hash: str
    address: int
    object_id: int
    epoch: int
    lease_number: int
    size: int
    layout: bytes
    signature: bytes


class WireFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`MultiModalFeatureSpec`: one item and its place in the prompt."""

    data: dict[str, WireElem] | WireSharedItem | None
    modality: str
    identifier: str
    offset: int
    length: int
    is_embed: WireArray | None
    mm_hash: str | None


class WireEngineCoreRequest(
    msgspec.Struct, tag="EngineCoreRequest", kw_only=True, forbid_unknown_fields=True
):
    """`EngineCoreRequest`, its items replaced by their wire form."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: list[WireFeature]
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    arrival_time: float
    deadline: float | None
    priority: int
    cache_salt: str | None
    lora_name: str | None
    encoder_prompt_token_ids: list[int] | None
