"""Binds an architecture to the three classes that process its inputs, and makes its processor.

Knows no model by name, and imports none: the table of mmjax's own lies a floor above and is
looked up by name when a processor is asked for; those of other packages are entry points.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from mmjax.config import ModelConfig, MultiModalConfig
from mmjax.errors import CheckpointError, ConfigError
from mmjax.logger import get_logger
from mmjax.model_source import load_model_config
from mmjax.processing.commit import ProcessorCache
from mmjax.processing.context import BaseProcessingInfo, InputProcessingContext
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.processor import BaseMultiModalProcessor

logger = get_logger(__name__)

ENTRY_POINTS = "mmjax.models"
"""The entry-point group of other packages' models: an entry's name is its architecture.

Its object is a `ProcessorFactories`, or a class decorated with `register_processor`.
"""

_IN_TREE = "mmjax.models.registry"

ModelT = TypeVar("ModelT", bound=type)


class NotMultiModalError(CheckpointError, ValueError):
    """A processor was asked for, and the model takes text only or is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFactories:
    """How a model's processor is made."""

    info: Callable[[InputProcessingContext], BaseProcessingInfo]
    dummy_inputs: Callable[[Any], BaseDummyInputsBuilder[Any]]
    processor: Callable[..., BaseMultiModalProcessor[Any]]
    model: str | None = None
    """The array half as `package.module:Class`, so that P0 need not import it.

    None: prompts can be processed, and not answered (mmjax's own models have a table instead).
    """

    def build_processor(
        self, ctx: InputProcessingContext, *, cache: ProcessorCache | None = None
    ) -> BaseMultiModalProcessor[Any]:
        """Make info, then dummy inputs, then the processor."""
        info = self.info(ctx)
        return self.processor(info, self.dummy_inputs(info), cache=cache)


class MultiModalRegistry:
    """Finds the processor of an architecture: mmjax's own, or another package's."""

    def __init__(self) -> None:
        self._registered: dict[str, ProcessorFactories | str] = {}
        self._by_entry_point: dict[str, ProcessorFactories] = {}

    def register_processor(
        self,
        processor: Callable[..., BaseMultiModalProcessor[Any]],
        *,
        info: Callable[[InputProcessingContext], BaseProcessingInfo],
        dummy_inputs: Callable[[Any], BaseDummyInputsBuilder[Any]],
        model: str | None = None,
    ) -> Callable[[ModelT], ModelT]:
        """Return a decorator that gives a class its processor, and makes both known by its name.

        The class is the model, unless `model` names another (`package.module:Class`): a class
        that only carries the processor keeps jax out of P0.
        """
        factories = ProcessorFactories(
            info=info, dummy_inputs=dummy_inputs, processor=processor, model=model
        )

        def decorate(model_cls: ModelT) -> ModelT:
            if "_processor_factory" in vars(model_cls):
                logger.warning(
                    "`%s` had a processor; it is replaced by `%s`", model_cls.__name__, processor
                )
            own = f"{model_cls.__module__}:{model_cls.__qualname__}"
            model_cls._processor_factory = replace(factories, model=model or own)
            self._register(model_cls.__name__, model_cls._processor_factory)
            return model_cls

        return decorate

    def register_model(self, architecture: str, model: type | str) -> None:
        """Make another package's model known in this process.

        Args:
            architecture: The first of `architectures` in the checkpoint's config.json.
            model: A class decorated with `register_processor`; or `package.module:name` of one,
                or of a `ProcessorFactories`, which is imported when it is asked for.
        """
        if not isinstance(model, str):
            self._register(architecture, self.get_factories(model))
        elif all(model.partition(":")):
            self._register(architecture, model)
        else:
            raise ConfigError(
                f"`{architecture}` is registered as {model!r}; give a class, or its import path as "
                "`package.module:Class`"
            )

    def _register(self, architecture: str, model: ProcessorFactories | str) -> None:
        if architecture in import_module(_IN_TREE).MODELS:
            raise ConfigError(
                f"`{architecture}` is mmjax's own and cannot be replaced; register another name"
            )
        self._registered[architecture] = model

    def get_factories(self, model_cls: type) -> ProcessorFactories:
        """Return what was registered for exactly this class; its bases do not count."""
        factories = vars(model_cls).get("_processor_factory")
        if factories is None:
            raise NotMultiModalError(
                f"`{model_cls.__name__}` is not a multimodal model: no processor is registered; "
                "decorate it with `MULTIMODAL_REGISTRY.register_processor`"
            )
        return factories

    def find_factories(self, architecture: str) -> ProcessorFactories | None:
        """Return an architecture's factories, importing them; None where it is not known."""
        row = import_module(_IN_TREE).MODELS.get(architecture)
        if row is not None:
            return getattr(import_module(f"mmjax.models.{row.folder}.processor"), row.factories)
        registered = self._registered.get(architecture)
        if isinstance(registered, str):
            registered = self._to_factories(load_object(registered), architecture, registered)
        if registered is not None:
            return registered
        if architecture not in self._by_entry_point:
            found = list(entry_points(group=ENTRY_POINTS, name=architecture))
            if not found:
                return None
            if len(found) > 1:
                logger.warning("`%s` is offered by %s; the first is taken", architecture, found)
            self._by_entry_point[architecture] = self._load_entry(found[0])
        return self._by_entry_point[architecture]

    def _load_entry(self, entry: EntryPoint) -> ProcessorFactories:
        try:
            loaded = entry.load()
        # Another package's code: it may raise anything.
        except Exception as error:
            raise CheckpointError(
                f"the model `{entry.name}` of another package cannot be loaded from "
                f"`{entry.value}`: {type(error).__name__}: {error}"
            ) from error
        return self._to_factories(loaded, entry.name, entry.value)

    def _to_factories(self, loaded: Any, architecture: str, path: str) -> ProcessorFactories:
        if isinstance(loaded, ProcessorFactories):
            return loaded
        if isinstance(loaded, type):
            return self.get_factories(loaded)
        raise CheckpointError(
            f"`{path}`, which stands for `{architecture}`, is a `{type(loaded).__name__}`; "
            "it must be a ProcessorFactories, or a class decorated with `register_processor`"
        )

    def create_processor(
        self,
        model_config: ModelConfig,
        tokenizer: Any = None,
        cache: ProcessorCache | None = None,
    ) -> BaseMultiModalProcessor[Any]:
        """Make the processor of a model; loads its tokenizer if none is given."""
        factories = self.find_factories(model_config.architecture)
        if factories is None:
            raise NotMultiModalError(
                f"{model_config.public_name} is not a multimodal model: no processor is known for "
                f"its architecture `{model_config.architecture}`"
            )
        if tokenizer is None:
            tokenizer = _load_tokenizer(model_config)
        ctx = InputProcessingContext(model_config=model_config, tokenizer=tokenizer)
        return factories.build_processor(ctx, cache=cache)

    def supports_multimodal_inputs(self, model_config: ModelConfig) -> bool:
        """Whether a prompt may hold media: not for a text model, nor where every limit is 0."""
        factories = self.find_factories(model_config.architecture)
        if factories is None:
            return False
        info = factories.info(InputProcessingContext(model_config=model_config, tokenizer=None))
        # Embeddings need no tower, and are not limited by a 0.
        return model_config.mm.enable_mm_embeds or any(info.allowed_mm_limits.values())


MULTIMODAL_REGISTRY = MultiModalRegistry()


def create_processor(
    model: str | Path | None = None,
    *,
    tokenizer: Any = None,
    cache: ProcessorCache | None = None,
    revision: str | None = None,
    max_model_len: int | None = None,
    **mm: Any,
) -> BaseMultiModalProcessor[Any]:
    """Make the processor of a checkpoint, without an engine.

    Args:
        model: A directory (its weights are not needed), a hub id, or None for the default.
        tokenizer: In place of the checkpoint's.
        cache: Keeps processed items; see `mmjax.cache`.
        revision: Of a hub id.
        max_model_len: The longest prompt that dummy inputs are made for.
        mm: Fields of `MultiModalConfig`, such as `limit_mm_per_prompt`.
    """
    model_config = load_model_config(
        None if model is None else str(model),
        revision=revision,
        max_model_len=max_model_len,
        mm=MultiModalConfig(**mm),
    )
    return MULTIMODAL_REGISTRY.create_processor(model_config, tokenizer, cache)


def load_object(path: str) -> Any:
    """Import what `package.module:name` names."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(f"`{path}` cannot be imported: {error}") from error


def _load_tokenizer(model_config: ModelConfig) -> Any:
    # On use only: it brings an installed torch along.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_config.path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the tokenizer of `{model_config.model}` cannot be loaded: {error}; "
            "the directory must have tokenizer.json and tokenizer_config.json"
        ) from error
