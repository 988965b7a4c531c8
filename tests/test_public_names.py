"""The names that other packages build on: each is importable, and meant to be."""

import subprocess
import sys

import pytest

import mmjax
import mmjax.cache
import mmjax.processing

MMJAX = """
    LLM LoRARequest SamplingParams StructuredOutputsParams MULTIMODAL_REGISTRY ProcessorFactories
    create_processor register_model draw_boxes ScoredModel score
"""
PROCESSING = """
    PlaceholderRange MultiModalFieldConfig MultiModalFieldElem MultiModalKwargsItem
    MultiModalKwargsItems MultiModalFeatureSpec MultiModalInputs
    MultiModalDataParser MultiModalDataItems MediaWithBytes ImageProcessorItems ImageEmbeddingItems
    VideoProcessorItems AudioProcessorItems
    PromptReplacement PromptInsertion PromptUpdateDetails PromptIndex PromptIndexTargets UpdateMode
    ResolvedPromptUpdate iter_token_matches replace_token_matches apply_token_matches
    apply_text_matches find_mm_placeholders
    MultiModalHasher BaseProcessingInfo BaseDummyInputsBuilder BaseMultiModalProcessor
    EncDecMultiModalProcessor
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
    [(mmjax, MMJAX), (mmjax.processing, PROCESSING), (mmjax.cache, CACHE)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_they_are_there(package: object, names: str) -> None:
    exported = getattr(package, "__all__", ())
    assert [name for name in names.split() if name not in exported] == []
    assert [name for name in exported if not hasattr(package, name)] == []


def test_importing_mmjax_loads_nothing_heavy() -> None:
    """Each name is found when it is first used; the registry's bring no jax along."""
    script = """
import sys, mmjax
heavy = {"flax", "jax", "torch", "transformers"}
print(sorted(heavy & sys.modules.keys()))
mmjax.register_model("Elsewhere", "elsewhere:Model")
print(sorted((heavy - {"transformers"}) & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "[]"]


def test_the_registrys_names_are_at_one_place() -> None:
    assert mmjax.register_model == mmjax.MULTIMODAL_REGISTRY.register_model
    assert not hasattr(mmjax.processing, "MULTIMODAL_REGISTRY")
