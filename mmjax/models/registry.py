"""Which architectures are known, and where their two halves live. Imports a half on use only."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from mmjax.config import ModelConfig
from mmjax.errors import CheckpointError
from mmjax.processing.processor import BaseMultiModalProcessor, ProcessorCache
from mmjax.processing.registry import MULTIMODAL_REGISTRY, ProcessorFactories, load_object


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One architecture."""

    folder: str
    """`mmjax.models.<folder>` has `processor.py` (without jax) and `model.py`."""
    has_model: bool = True
    """Whether there is a `model.py`: without one, prompts are processed and not answered."""
    has_one_unit_items: bool = False
    """Whether, without processor kwargs, the largest item is one unit of the tower."""
    factories: str = "FACTORIES"
    """The name in `processor.py`: checkpoints of one family may come in several layouts."""


MODELS: Mapping[str, ModelRow] = MappingProxyType(
    {
        "Blip2ForConditionalGeneration": ModelRow("blip2", has_model=False),
        "ChameleonForConditionalGeneration": ModelRow("chameleon", has_one_unit_items=True),
        "Florence2ForConditionalGeneration": ModelRow("florence2", has_model=False),
        "FuyuForCausalLM": ModelRow("fuyu"),
        "Gemma3ForConditionalGeneration": ModelRow("gemma3", has_one_unit_items=True),
        "InternVLChatModel": ModelRow("internvl", has_model=False),
        "InternVLForConditionalGeneration": ModelRow(
            "internvl", has_model=False, factories="HF_FACTORIES"
        ),
        "LlavaForConditionalGeneration": ModelRow("llava", has_model=False),
        "Qwen2VLForConditionalGeneration": ModelRow("qwen2_vl", has_model=False),
    }
)
"""By the first of config.json's `architectures`, which is also the class's name in `model.py`.

Models of other packages come in through `MULTIMODAL_REGISTRY`.
"""


def get_processor_factories(architecture: str) -> ProcessorFactories:
    """Import the prompt half of a model (no jax); an unknown name raises with the nearest one."""
    factories = MULTIMODAL_REGISTRY.find_factories(architecture)
    if factories is None:
        raise CheckpointError(
            f"architecture `{architecture}` is not supported; {_nearest(architecture)}"
        )
    return factories


def create_processor(
    model_config: ModelConfig, tokenizer: Any = None, *, cache: ProcessorCache | None = None
) -> BaseMultiModalProcessor[Any]:
    """Make the processor of a model; loads its tokenizer if none is given."""
    get_processor_factories(model_config.architecture)  # an unknown one is told the nearest
    return MULTIMODAL_REGISTRY.create_processor(model_config, tokenizer, cache)


def require_model(architecture: str) -> None:
    """Refuse, before anything slow, an architecture that cannot be served."""
    if _model_path(architecture) is None:
        served = ", ".join(f"`{name}`" for name, row in MODELS.items() if row.has_model)
        raise CheckpointError(
            f"architecture `{architecture}` can be processed but not served yet: mmjax has its "
            f"processor and no model; served are {served}"
        )


def load_model_class(architecture: str) -> type:
    """Import the array half of a model; only the engine's process may call this."""
    require_model(architecture)
    return load_object(str(_model_path(architecture)))


def get_placeholder_str(architecture: str, modality: str, i: int) -> str | None:
    """Return what stands for the i-th (from 1) item of a modality in a prompt of text."""
    info: Any = get_processor_factories(architecture).info
    return info.get_placeholder_str(modality, i)


def _model_path(architecture: str) -> str | None:
    """Return `package.module:Class` of a model, or None for a processor alone."""
    row = MODELS.get(architecture)
    if row is None:
        return get_processor_factories(architecture).model
    return f"mmjax.models.{row.folder}.model:{architecture}" if row.has_model else None


def _nearest(architecture: str) -> str:
    (nearest,) = get_close_matches(architecture, MODELS, n=1, cutoff=0.0)
    supported = ", ".join(f"`{name}`" for name in MODELS)
    return f"the nearest supported one is `{nearest}`, of: {supported}"
