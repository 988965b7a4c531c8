"""Prompts and media -> token ids, placeholders and tensors. Python, numpy, Pillow; no jax."""

from mmjax.processing.context import BaseProcessingInfo, InputProcessingContext
from mmjax.processing.dummy_inputs import (
    BaseDummyInputsBuilder,
    BaseDummyOptions,
    ImageDummyOptions,
    ProcessorInputs,
)
from mmjax.processing.encdec import EncDecMultiModalProcessor
from mmjax.processing.fields import (
    MultiModalFieldConfig,
    MultiModalFieldElem,
    batched_tensors_equal,
    nested_tensors_equal,
)
from mmjax.processing.hasher import MultiModalHasher
from mmjax.processing.inputs import (
    MultiModalFeatureSpec,
    MultiModalInputs,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
    argsort_mm_positions,
    group_and_batch_mm_items,
)
from mmjax.processing.media import MediaLimits, MediaWithBytes
from mmjax.processing.parse import (
    AudioEmbeddingItems,
    AudioProcessorItems,
    DictEmbeddingItems,
    EmbeddingItems,
    ImageEmbeddingItems,
    ImageProcessorItems,
    ImageSize,
    ModalityDataItems,
    MultiModalDataItems,
    MultiModalDataParser,
    ProcessorBatchItems,
    VideoEmbeddingItems,
    VideoProcessorItems,
    VisionChunkProcessorItems,
)
from mmjax.processing.prepared import PreparedInputs, ProcessedItem
from mmjax.processing.processor import BaseMultiModalProcessor, ProcessorCache
from mmjax.processing.prompt_matching import (
    apply_text_matches,
    apply_token_matches,
    find_mm_placeholders,
)
from mmjax.processing.prompt_updates import (
    PlaceholderFeaturesInfo,
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
    iter_token_matches,
    replace_token_matches,
)
from mmjax.processing.registry import (
    MULTIMODAL_REGISTRY,
    MultiModalRegistry,
    NotMultiModalError,
    ProcessorFactories,
    create_processor,
)
from mmjax.processing.validation import PromptUpdateError

__all__ = [
    "MULTIMODAL_REGISTRY",
    "AudioEmbeddingItems",
    "AudioProcessorItems",
    "BaseDummyInputsBuilder",
    "BaseDummyOptions",
    "BaseMultiModalProcessor",
    "BaseProcessingInfo",
    "DictEmbeddingItems",
    "EmbeddingItems",
    "EncDecMultiModalProcessor",
    "ImageDummyOptions",
    "ImageEmbeddingItems",
    "ImageProcessorItems",
    "ImageSize",
    "InputProcessingContext",
    "MediaLimits",
    "MediaWithBytes",
    "ModalityDataItems",
    "MultiModalDataItems",
    "MultiModalDataParser",
    "MultiModalFeatureSpec",
    "MultiModalFieldConfig",
    "MultiModalFieldElem",
    "MultiModalHasher",
    "MultiModalInputs",
    "MultiModalKwargsItem",
    "MultiModalKwargsItems",
    "MultiModalRegistry",
    "NotMultiModalError",
    "PlaceholderFeaturesInfo",
    "PlaceholderRange",
    "PreparedInputs",
    "ProcessedItem",
    "ProcessorBatchItems",
    "ProcessorCache",
    "ProcessorFactories",
    "ProcessorInputs",
    "PromptIndexTargets",
    "PromptInsertion",
    "PromptReplacement",
    "PromptUpdate",
    "PromptUpdateDetails",
    "PromptUpdateError",
    "ResolvedPromptUpdate",
    "UpdateMode",
    "VideoEmbeddingItems",
    "VideoProcessorItems",
    "VisionChunkProcessorItems",
    "apply_text_matches",
    "apply_token_matches",
    "argsort_mm_positions",
    "batched_tensors_equal",
    "create_processor",
    "find_mm_placeholders",
    "group_and_batch_mm_items",
    "iter_token_matches",
    "nested_tensors_equal",
    "replace_token_matches",
]
