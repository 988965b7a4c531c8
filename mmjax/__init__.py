"""mmjax: serve multimodal models with JAX.

    from mmjax import LLM, LoRARequest, SamplingParams, StructuredOutputsParams  # to answer
    from mmjax import PoolingParams  # for vectors
    from mmjax import ScoredModel, save_checkpoint, score  # to train
    from mmjax import MULTIMODAL_REGISTRY, ProcessorFactories, create_processor, register_model

Importing this package loads neither jax nor a model: names are imported when first used.
"""

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = [
    "LLM",
    "MULTIMODAL_REGISTRY",
    "LoRARequest",
    "PoolingParams",
    "ProcessorFactories",
    "SamplingParams",
    "ScoredModel",
    "StructuredOutputsParams",
    "__version__",
    "create_processor",
    "draw_boxes",
    "register_model",
    "save_checkpoint",
    "score",
]

try:
    __version__ = version("mmjax")
except PackageNotFoundError:  # a checkout on the path, never installed
    __version__ = "0+unknown"

# transformers warns that it has no models without torch; mmjax has its own.
logging.getLogger("transformers").addFilter(
    lambda record: not record.getMessage().startswith("PyTorch was not found")
)

_REGISTRY = "mmjax.models.registry"
_HOMES = {
    "LLM": "mmjax.llm.llm",
    "LoRARequest": "mmjax.llm.arguments",
    "MULTIMODAL_REGISTRY": _REGISTRY,
    "PoolingParams": "mmjax.params.pooling_params",
    "ProcessorFactories": _REGISTRY,
    "SamplingParams": "mmjax.params.sampling_params",
    "ScoredModel": "mmjax.training.score",
    "StructuredOutputsParams": "mmjax.params.sampling_params",
    "create_processor": _REGISTRY,
    "draw_boxes": "mmjax.frontend.output.output_html",
    "register_model": _REGISTRY,
    "save_checkpoint": "mmjax.training.checkpoint",
    "score": "mmjax.training.score",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name."""
    if name not in _HOMES:
        raise AttributeError(f"module `mmjax` has no attribute `{name}`")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the package's public names."""
    return sorted(__all__)
