"""Which architectures are served, and where their two halves live. Imports a half on use only."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

from mmjax.config import ModelConfig
from mmjax.errors import CheckpointError
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.processor import BaseMultiModalProcessor, ProcessorCache
from mmjax.processing.registry import ProcessorFactories


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One architecture."""

    folder: str
    """`mmjax.models.<folder>` has `processor.py` (without jax) and `model.py`."""


MODELS: Mapping[str, ModelRow] = MappingProxyType(
    {"Gemma3ForConditionalGeneration": ModelRow("gemma3")}
)
"""By the first of config.json's `architectures`, which is also the class's name in `model.py`."""


def find_model(architecture: str) -> ModelRow:
    """Return an architecture's row; an unknown one raises CheckpointError with the nearest name."""
    row = MODELS.get(architecture)
    if row is not None:
        return row
    nearest = get_close_matches(architecture, MODELS, n=1, cutoff=0.0)
    supported = ", ".join(f"`{name}`" for name in sorted(MODELS))
    raise CheckpointError(
        f"architecture `{architecture}` is not supported; the nearest supported one is "
        f"`{nearest[0]}`, of: {supported}"
    )


def get_processor_factories(architecture: str) -> ProcessorFactories:
    """Import the prompt half of a model (no jax)."""
    folder = find_model(architecture).folder
    return import_module(f"mmjax.models.{folder}.processor").FACTORIES


def create_processor(
    model_config: ModelConfig, tokenizer: Any = None, *, cache: ProcessorCache | None = None
) -> BaseMultiModalProcessor[Any]:
    """Make the processor of a model; loads its tokenizer if none is given."""
    factories = get_processor_factories(model_config.architecture)
    if tokenizer is None:
        # On use only: it brings an installed torch along.
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model_config.path)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the tokenizer of `{model_config.model}` cannot be loaded: {error}; "
                "the directory must have tokenizer.json and tokenizer_config.json"
            ) from error
    ctx = InputProcessingContext(model_config=model_config, tokenizer=tokenizer)
    return factories.build_processor(ctx, cache=cache)


def load_model_class(architecture: str) -> type:
    """Import the array half of a model; only the engine's process may call this."""
    folder = find_model(architecture).folder
    return getattr(import_module(f"mmjax.models.{folder}.model"), architecture)


def get_placeholder_str(architecture: str, modality: str, i: int) -> str | None:
    """Return what stands for the i-th (from 1) item of a modality in a prompt of text."""
    info: Any = get_processor_factories(architecture).info
    return info.get_placeholder_str(modality, i)
