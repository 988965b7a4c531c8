"""The names that other packages build on: each is importable, and meant to be."""

import pytest

import mmjax.cache
import mmjax.processing

PROCESSING = """
    PlaceholderRange MultiModalFieldConfig MultiModalFieldElem MultiModalKwargsItem
    MultiModalKwargsItems MultiModalFeatureSpec MultiModalInputs
    MultiModalDataParser MultiModalDataItems MediaWithBytes ImageProcessorItems ImageEmbeddingItems
    VideoProcessorItems AudioProcessorItems
    PromptReplacement PromptInsertion PromptUpdateDetails PromptIndex PromptIndexTargets UpdateMode
    ResolvedPromptUpdate iter_token_matches replace_token_matches apply_token_matches
    apply_text_matches find_mm_placeholders
    MultiModalHasher BaseProcessingInfo BaseDummyInputsBuilder BaseMultiModalProcessor
    EncDecMultiModalProcessor MULTIMODAL_REGISTRY create_processor
    argsort_mm_positions group_and_batch_mm_items group_and_batch_mm_kwargs
    get_mm_features_in_window strip_covered_mm_data nested_tensors_equal batched_tensors_equal
    compute_mm_encoder_budget MultiModalBudget
"""
CACHE = """
    LRUCache MultiModalProcessorOnlyCache MultiModalProcessorSenderCache MultiModalReceiverCache
    ShmObjectStoreSenderCache ShmObjectStoreReceiverCache MultiModalCacheMissError
    EncoderCacheManager generate_block_hash_extra_keys
    processor_cache_from_config engine_receiver_cache_from_config
"""


@pytest.mark.parametrize(
    ("package", "names"),
    [(mmjax.processing, PROCESSING), (mmjax.cache, CACHE)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_they_are_there(package: object, names: str) -> None:
    exported = getattr(package, "__all__", ())
    assert [name for name in names.split() if name not in exported] == []
    assert [name for name in exported if not hasattr(package, name)] == []
