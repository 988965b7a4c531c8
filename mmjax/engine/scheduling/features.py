"""The items of a received request: their tensors from P1's cache, and their validation."""

from collections.abc import Mapping, Sequence

import numpy as np

from mmjax.cache import BaseMultiModalReceiverCache
from mmjax.errors import MultiModalCacheMissError, RequestRuntimeError
from mmjax.models.host_inputs import EncoderSpec, PackedEncoderSpec
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem


def resolve_features(
    features: Sequence[MultiModalFeatureSpec], cache: BaseMultiModalReceiverCache | None
) -> list[MultiModalFeatureSpec]:
    """Fill in tensors that were not sent, from P1's cache or an earlier item of the request.

    Raises MultiModalCacheMissError with the hashes of all that are missing; sent ones are cached.
    """
    resolved = list(features if cache is None else cache.get_and_update_features(features))
    first: dict[str, MultiModalKwargsItem] = {}
    missing: dict[str, None] = {}
    for feature in resolved:
        key = feature.mm_hash or feature.identifier
        item = first.get(key) if feature.data is None else feature.tensors
        feature.data = item
        if item is None:
            missing[key] = None
        else:
            first.setdefault(key, item)
    if missing:
        raise MultiModalCacheMissError(list(missing))
    return resolved


def check_places(features: Sequence[MultiModalFeatureSpec]) -> None:
    """Raise RequestRuntimeError unless items are sorted and no position takes two embeddings.

    Ranges may overlap in positions without embeddings: a tokenizer may merge tokens there.
    """
    last_offset, first_free = 0, 0
    for feature in features:
        position = feature.mm_position
        if position.offset < last_offset:
            raise RequestRuntimeError(
                f"an item at {position.offset} comes after one at {last_offset}; items must be "
                "sorted by their place in the prompt",
                param="multi_modal_data",
            )
        last_offset = position.offset
        runs = position.extract_embeds_range()
        if runs and runs[0][0] < first_free:
            raise RequestRuntimeError(
                f"place {runs[0][0]} of the prompt takes embeddings of two items; "
                "placeholders must not overlap",
                param="multi_modal_data",
            )
        first_free = max([first_free, *(last + 1 for _, last in runs)])


def check_shapes(
    feature: MultiModalFeatureSpec,
    arrays: Mapping[str, np.ndarray],
    spec: EncoderSpec | PackedEncoderSpec,
) -> int:
    """Return how many embeddings the arrays give; `RequestRuntimeError` for other shapes."""
    unit = "patch" if isinstance(spec, PackedEncoderSpec) else "unit"
    counts = set()
    for name, (shape, _) in spec.inputs.items():
        if arrays[name].ndim == 0 or arrays[name].shape[1:] != tuple(shape):
            raise RequestRuntimeError(
                f"`{name}` of item {feature.identifier} has shape {arrays[name].shape}; "
                f"each {unit} must have shape {tuple(shape)}",
                param="multi_modal_data",
            )
        counts.add(len(arrays[name]))
    if len(counts) > 1:
        raise RequestRuntimeError(
            f"the inputs of item {feature.identifier} have {sorted(counts)} {unit} rows; all must "
            "have as many",
            param="multi_modal_data",
        )
    if isinstance(spec, EncoderSpec):
        return counts.pop() * spec.tokens_per_unit
    num_outputs, rest = divmod(counts.pop(), spec.patches_per_token)
    if rest:
        raise RequestRuntimeError(
            f"item {feature.identifier} has patches that do not fill an embedding, which takes "
            f"{spec.patches_per_token}",
            param="multi_modal_data",
        )
    return num_outputs
