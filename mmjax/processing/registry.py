"""Binds a model class to the three classes that process its inputs. Knows no model by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mmjax.logger import get_logger
from mmjax.processing.context import BaseProcessingInfo, InputProcessingContext
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.processor import BaseMultiModalProcessor, ProcessorCache

logger = get_logger(__name__)

ModelT = TypeVar("ModelT", bound=type)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFactories:
    """How a model's processor is made."""

    info: Callable[[InputProcessingContext], BaseProcessingInfo]
    dummy_inputs: Callable[[Any], BaseDummyInputsBuilder[Any]]
    processor: Callable[..., BaseMultiModalProcessor[Any]]

    def build_processor(
        self, ctx: InputProcessingContext, *, cache: ProcessorCache | None = None
    ) -> BaseMultiModalProcessor[Any]:
        """Make info, then dummy inputs, then the processor."""
        info = self.info(ctx)
        return self.processor(info, self.dummy_inputs(info), cache=cache)


class MultiModalRegistry:
    """The decorator that marks a model class as multimodal."""

    def register_processor(
        self,
        processor: Callable[..., BaseMultiModalProcessor[Any]],
        *,
        info: Callable[[InputProcessingContext], BaseProcessingInfo],
        dummy_inputs: Callable[[Any], BaseDummyInputsBuilder[Any]],
    ) -> Callable[[ModelT], ModelT]:
        """Return a decorator that gives a model class its processor."""
        factories = ProcessorFactories(info=info, dummy_inputs=dummy_inputs, processor=processor)

        def decorate(model_cls: ModelT) -> ModelT:
            if "_processor_factory" in vars(model_cls):
                logger.warning(
                    "`%s` had a processor; it is replaced by `%s`", model_cls.__name__, processor
                )
            model_cls._processor_factory = factories
            return model_cls

        return decorate

    def get_factories(self, model_cls: type) -> ProcessorFactories:
        """Return what was registered for exactly this class; its bases do not count."""
        factories = vars(model_cls).get("_processor_factory")
        if factories is None:
            raise ValueError(
                f"`{model_cls.__name__}` is not a multimodal model: no processor is registered; "
                "decorate it with `MULTIMODAL_REGISTRY.register_processor`"
            )
        return factories


MULTIMODAL_REGISTRY = MultiModalRegistry()
