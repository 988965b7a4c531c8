"""The items of a received request: their tensors from P1's cache, and their validation."""

from collections.abc import Sequence

from mmjax.cache import BaseMultiModalReceiverCache
from mmjax.errors import MultiModalCacheMissError, RequestRuntimeError
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
