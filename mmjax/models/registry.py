"""Which models there are, how their processors are made, and where their classes live.

A model is mmjax's own (a row of `MODELS`), or registered in this process (by the decorator
`MULTIMODAL_REGISTRY.register_processor`, or by `register_model`), or an entry point of another
package. Families are imported on use only; neither jax nor a model comes with this module.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb
from types import MappingProxyType
from typing import Any, TypeVar

from mmjax.config.engine_config import ModelConfig, MultiModalConfig
from mmjax.errors import CheckpointError, ConfigError
from mmjax.models.model_source import load_model_config
from mmjax.processing.context import BaseProcessingInfo, InputProcessingContext
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.prepared import ProcessorCache
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.tokenizer_file import keep_as_written
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

ENTRY_POINTS = "mmjax.models"
"""The entry-point group of other packages' models: an entry's name is its architecture.

Its object is a `ProcessorFactories`, or a class decorated with `register_processor`.
"""

ModelT = TypeVar("ModelT", bound=type)

_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
"""The files of which a tokenizer needs one."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One of mmjax's own architectures."""

    folder: str
    """`mmjax.models.<folder>` has `processor.py` (without jax) and `model.py`."""
    example: str
    """A published checkpoint: the smallest that answers questions."""
    has_one_unit_items: bool = False
    """Whether, without processor kwargs, the largest item is one unit of the tower."""
    factories: str = "FACTORIES"
    """The name in `processor.py`: checkpoints of one family may come in several layouts."""


MODELS: Mapping[str, ModelRow] = MappingProxyType(
    {
        "AyaVisionForConditionalGeneration": ModelRow("aya_vision", "CohereLabs/aya-vision-8b"),
        "Blip2ForConditionalGeneration": ModelRow(
            "blip2", "Salesforce/blip2-opt-2.7b", has_one_unit_items=True
        ),
        "Blip2T5ForConditionalGeneration": ModelRow(
            "blip2",
            "Salesforce/blip2-flan-t5-xl",
            has_one_unit_items=True,
            factories="T5_FACTORIES",
        ),
        "ChameleonForConditionalGeneration": ModelRow(
            "chameleon", "facebook/chameleon-7b", has_one_unit_items=True
        ),
        "Cohere2VisionForConditionalGeneration": ModelRow(
            "aya_vision",
            "CohereLabs/command-a-vision-07-2025",
            factories="COHERE2_FACTORIES",
        ),
        "ColPaliForRetrieval": ModelRow(
            "paligemma",
            "vidore/colpali-v1.3-hf",
            has_one_unit_items=True,
            factories="COLPALI_FACTORIES",
        ),
        "ColQwen2ForRetrieval": ModelRow(
            "qwen2_vl", "vidore/colqwen2-v1.0-hf", factories="COLQWEN2_FACTORIES"
        ),
        "DeepseekOCRForCausalLM": ModelRow(
            "deepseek_ocr2", "deepseek-ai/DeepSeek-OCR", factories="DEEPSEEK_OCR_FACTORIES"
        ),
        "DeepseekOcr2ForConditionalGeneration": ModelRow(
            "deepseek_ocr2", "deepseek-ai/DeepSeek-OCR-2"
        ),
        "DeepseekVLV2ForCausalLM": ModelRow("deepseek_vl2", "deepseek-ai/deepseek-vl2-tiny"),
        "Exaone4_5_ForConditionalGeneration": ModelRow("exaone4_5", "LGAI-EXAONE/EXAONE-4.5-33B"),
        "Ernie4_5_VLMoeForConditionalGeneration": ModelRow(
            "ernie4_5_vl", "baidu/ERNIE-4.5-VL-28B-A3B-PT"
        ),
        "Florence2ForConditionalGeneration": ModelRow(
            "florence2", "florence-community/Florence-2-base-ft"
        ),
        "FuyuForCausalLM": ModelRow("fuyu", "adept/fuyu-8b"),
        "Gemma3ForConditionalGeneration": ModelRow(
            "gemma3", "google/gemma-3-4b-it", has_one_unit_items=True
        ),
        "Gemma4ForConditionalGeneration": ModelRow("gemma4", "google/gemma-4-E2B-it"),
        "Gemma4UnifiedForConditionalGeneration": ModelRow(
            "gemma4", "google/gemma-4-12B-it", factories="UNIFIED_FACTORIES"
        ),
        "Glm46VForConditionalGeneration": ModelRow(
            "glm4v", "zai-org/GLM-4.6V-Flash", factories="GROUNDING_FACTORIES"
        ),
        "Glm4vMoeForConditionalGeneration": ModelRow(
            "glm4v", "zai-org/GLM-4.5V", factories="GROUNDING_FACTORIES"
        ),
        "Glm4vForConditionalGeneration": ModelRow("glm4v", "zai-org/GLM-4.1V-9B-Thinking"),
        "GlmOcrForConditionalGeneration": ModelRow(
            "glm4v", "zai-org/GLM-OCR", factories="OCR_FACTORIES"
        ),
        "GotOcr2ForConditionalGeneration": ModelRow(
            "got_ocr2", "stepfun-ai/GOT-OCR-2.0-hf", has_one_unit_items=True
        ),
        "Granite4VisionForConditionalGeneration": ModelRow(
            "llava", "ibm-granite/granite-vision-4.1-4b", factories="GRANITE4_FACTORIES"
        ),
        "GraniteDoclingForConditionalGeneration": ModelRow(
            "granite_docling", "ibm-granite/granite-for-docling-500m"
        ),
        "HunYuanVLForConditionalGeneration": ModelRow("hunyuan_vl", "tencent/HunyuanOCR"),
        "Idefics3ForConditionalGeneration": ModelRow(
            "idefics3", "HuggingFaceTB/SmolVLM-256M-Instruct"
        ),
        "InternVLChatModel": ModelRow("internvl", "OpenGVLab/InternVL3-1B"),
        "InternVLForConditionalGeneration": ModelRow(
            "internvl", "OpenGVLab/InternVL3-1B-hf", factories="HF_FACTORIES"
        ),
        "Kimi_K25ForConditionalGeneration": ModelRow("kimi_k25", "moonshotai/Kimi-K2.5"),
        "Lfm2VlForConditionalGeneration": ModelRow("lfm2_vl", "LiquidAI/LFM2-VL-450M"),
        "Lfm3VlForConditionalGeneration": ModelRow("lfm3_vl", "LiquidAI/LFM3-VL-2B"),
        "LightOnOcrForConditionalGeneration": ModelRow(
            "pixtral", "lightonai/LightOnOCR-1B-1025", factories="LIGHTON_FACTORIES"
        ),
        "Llama4ForConditionalGeneration": ModelRow(
            "llama4", "meta-llama/Llama-4-Scout-17B-16E-Instruct"
        ),
        "LlavaForConditionalGeneration": ModelRow(
            "llava", "llava-hf/llava-interleave-qwen-0.5b-hf"
        ),
        "LlavaNextForConditionalGeneration": ModelRow(
            "llava", "ibm-granite/granite-vision-3.3-2b", factories="NEXT_FACTORIES"
        ),
        "LlavaOnevisionForConditionalGeneration": ModelRow(
            "llava",
            "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
            factories="ONEVISION_FACTORIES",
        ),
        "MiniCPMOcrForConditionalGeneration": ModelRow(
            "minicpmv4_6", "openbmb/MiniCPM-OCR-1.0", factories="OCR_FACTORIES"
        ),
        "MiniCPMV4_6ForConditionalGeneration": ModelRow("minicpmv4_6", "openbmb/MiniCPM-V-4.6"),
        "MiniCPMV4_7ForConditionalGeneration": ModelRow(
            "minicpmv4_6", "openbmb/MiniCPM-V-4.7-1B", factories="V4_7_FACTORIES"
        ),
        "Mistral3ForConditionalGeneration": ModelRow(
            "pixtral",
            "mistralai/Ministral-3-3B-Instruct-2512-BF16",
            factories="MISTRAL3_FACTORIES",
        ),
        "MllamaForConditionalGeneration": ModelRow(
            "mllama", "meta-llama/Llama-3.2-11B-Vision-Instruct"
        ),
        "MolmoForCausalLM": ModelRow("molmo", "allenai/Molmo-7B-D-0924"),
        "Molmo2ForConditionalGeneration": ModelRow("molmo2", "allenai/Molmo2-4B"),
        "Ovis2ForConditionalGeneration": ModelRow("ovis2", "thisisiron/Ovis2-1B-hf"),
        "PaddleOCRVLForConditionalGeneration": ModelRow(
            "paddleocr_vl", "PaddlePaddle/PaddleOCR-VL"
        ),
        "PaliGemmaForConditionalGeneration": ModelRow(
            "paligemma", "google/paligemma2-3b-mix-224", has_one_unit_items=True
        ),
        "PixtralForConditionalGeneration": ModelRow("pixtral", "mistral-community/pixtral-12b"),
        "QianfanOCRForConditionalGeneration": ModelRow(
            "internvl", "baidu/Qianfan-OCR", factories="QIANFAN_FACTORIES"
        ),
        "Qwen2AudioForConditionalGeneration": ModelRow(
            "qwen2_audio", "Qwen/Qwen2-Audio-7B-Instruct", has_one_unit_items=True
        ),
        "QWenLMHeadModel": ModelRow("qwen_vl", "Qwen/Qwen-VL-Chat", has_one_unit_items=True),
        "Qwen2VLForConditionalGeneration": ModelRow("qwen2_vl", "Qwen/Qwen2-VL-2B-Instruct"),
        "Qwen2_5_VLForConditionalGeneration": ModelRow(
            "qwen2_vl", "Qwen/Qwen2.5-VL-3B-Instruct", factories="QWEN2_5_FACTORIES"
        ),
        "Qwen2_5OmniThinkerForConditionalGeneration": ModelRow(
            "qwen2_5_omni", "Qwen/Qwen2.5-Omni-3B"
        ),
        "Qwen3_5ForConditionalGeneration": ModelRow(
            "qwen3_vl", "Qwen/Qwen3.5-0.8B", factories="QWEN3_5_FACTORIES"
        ),
        "Qwen3_5MoeForConditionalGeneration": ModelRow(
            "qwen3_vl", "Qwen/Qwen3.5-35B-A3B", factories="QWEN3_5_FACTORIES"
        ),
        "Qwen3ASRForConditionalGeneration": ModelRow("qwen3_asr", "Qwen/Qwen3-ASR-1.7B-hf"),
        "Qwen3OmniMoeThinkerForConditionalGeneration": ModelRow(
            "qwen2_5_omni", "Qwen/Qwen3-Omni-30B-A3B-Instruct", factories="QWEN3_FACTORIES"
        ),
        "Qwen3VLForConditionalGeneration": ModelRow("qwen3_vl", "Qwen/Qwen3-VL-2B-Instruct"),
        "Qwen3VLMoeForConditionalGeneration": ModelRow(
            "qwen3_vl", "Qwen/Qwen3-VL-30B-A3B-Instruct"
        ),
        "SmolVLMForConditionalGeneration": ModelRow(
            "idefics3",
            "HuggingFaceTB/SmolVLM2-256M-Video-Instruct",
            factories="SMOLVLM_FACTORIES",
        ),
        "UltravoxModel": ModelRow("ultravox", "fixie-ai/ultravox-v0_5-llama-3_2-1b"),
        "UnlimitedOcrForConditionalGeneration": ModelRow(
            "deepseek_ocr2", "baidu/Unlimited-OCR", factories="UNLIMITED_FACTORIES"
        ),
        "VoxtralForConditionalGeneration": ModelRow("voxtral", "mistralai/Voxtral-Mini-3B-2507"),
        "WhisperForConditionalGeneration": ModelRow(
            "whisper", "openai/whisper-tiny", has_one_unit_items=True
        ),
    }
)
"""By the first of config.json's `architectures`, which is also the class's name in `model.py`."""


class NotMultiModalError(CheckpointError, ValueError):
    """A processor was asked for, and the model takes text only or is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFactories:
    """How a model's processor is made."""

    info: Callable[[InputProcessingContext], BaseProcessingInfo]
    dummy_inputs: Callable[[Any], BaseDummyInputsBuilder[Any]]
    processor: Callable[..., BaseMultiModalProcessor[Any]]
    model: type | str | None = None
    """The model's class; as `package.module:Class`, P0 need not import it.

    None: prompts can be processed, and not answered (mmjax's own models have a table instead).
    """
    load_tokenizer: Callable[[Path], Any] | None = None
    """Loads the tokenizer of a checkpoint's directory where HF's AutoTokenizer cannot."""
    placeholder_str: Callable[[str, int], str | None] | None = None
    """The model class's `get_placeholder_str`, where it has one: it comes before the info's."""

    def build_processor(
        self, ctx: InputProcessingContext, *, cache: ProcessorCache | None = None
    ) -> BaseMultiModalProcessor[Any]:
        """Make info, then dummy inputs, then the processor."""
        if self.placeholder_str is not None:
            ctx = replace(ctx, placeholder_str=self.placeholder_str)
        info = self.info(ctx)
        return self.processor(info, self.dummy_inputs(info), cache=cache)


class MultiModalRegistry:
    """Finds the processor and the model of an architecture."""

    def __init__(self) -> None:
        self._registered: dict[str, ProcessorFactories | str] = {}
        """In this process; a text is the import path of what is registered."""
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
            marked: Any = model_cls
            marked._processor_factory = replace(
                factories,
                model=model or model_cls,
                placeholder_str=getattr(model_cls, "get_placeholder_str", None),
            )
            self._register(model_cls.__name__, marked._processor_factory)
            return model_cls

        return decorate

    def register_model(self, architecture: str, model: type | str) -> None:
        """Make a model known in this process, and in the engine's that it starts.

        It replaces, with a warning, what has the name already, be it mmjax's own.

        Args:
            architecture: The first of `architectures` in the checkpoint's config.json.
            model: A class decorated with `register_processor`; or `package.module:name` of one,
                or of a `ProcessorFactories`, which is imported when it is asked for.
        """
        if isinstance(model, type):
            self._register(architecture, self.get_factories(model))
        elif isinstance(model, str) and all(model.partition(":")):
            self._register(architecture, model)
        else:
            raise ConfigError(
                f"`{architecture}` is registered as {model!r}; give a class, or its import path as "
                "`package.module:Class`"
            )

    def _register(self, architecture: str, model: ProcessorFactories | str) -> None:
        known = self._registered.get(architecture)
        if known is None and architecture in MODELS:
            logger.warning("`%s` is registered in place of mmjax's own", architecture)
        # A path and what it leads to are one registration: importing it runs the decorator.
        elif not isinstance(known, str | None) and not isinstance(model, str) and known != model:
            logger.warning("`%s` was registered before; the new model replaces it", architecture)
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

    def find_row(self, architecture: str) -> ModelRow | None:
        """Return what the table says of mmjax's own model; None for every other."""
        return None if architecture in self._registered else MODELS.get(architecture)

    def find_factories(self, architecture: str) -> ProcessorFactories | None:
        """Return an architecture's factories, importing them; None where it is not known."""
        registered = self._registered.get(architecture)
        if isinstance(registered, str):
            registered = self._registered[architecture] = self._load(architecture, registered)
        if registered is not None:
            return registered
        row = MODELS.get(architecture)
        if row is not None:
            processor = importlib.import_module(f"mmjax.models.{row.folder}.processor")
            return getattr(processor, row.factories)
        if architecture not in self._by_entry_point:
            found = list(entry_points(group=ENTRY_POINTS, name=architecture))
            if not found:
                return None
            if len(found) > 1:
                logger.warning("`%s` is offered by %s; the first is taken", architecture, found)
            path = f"{found[0].module}:{found[0].attr}"
            self._by_entry_point[architecture] = self._load(architecture, path)
        return self._by_entry_point[architecture]

    def _load(self, architecture: str, path: str) -> ProcessorFactories:
        loaded = _load_object(architecture, path)
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
        architecture = model_config.architecture
        factories = self.find_factories(architecture)
        if factories is None:
            raise NotMultiModalError(
                f"{model_config.public_name} is not a multimodal model: no processor is known for "
                f"its architecture `{architecture}`; {_nearest(architecture)}"
            )
        if tokenizer is None:
            tokenizer = self.load_tokenizer(model_config)
        ctx = InputProcessingContext(model_config=model_config, tokenizer=tokenizer)
        return factories.build_processor(ctx, cache=cache)

    def load_tokenizer(self, model_config: ModelConfig) -> Any:
        """Load a checkpoint's tokenizer, as its family does or HF."""
        factories = self.find_factories(model_config.architecture)
        return _load_tokenizer(model_config, factories.load_tokenizer if factories else None)

    def supports_multimodal_inputs(self, model_config: ModelConfig) -> bool:
        """Whether a prompt may hold media: not for a text model, nor where every limit is 0."""
        factories = self.find_factories(model_config.architecture)
        if factories is None:
            return False
        info = factories.info(InputProcessingContext(model_config=model_config, tokenizer=None))
        # Embeddings need no tower, and are not limited by a 0.
        return model_config.mm.enable_mm_embeds or any(info.allowed_mm_limits.values())


MULTIMODAL_REGISTRY = MultiModalRegistry()
"""The only one of a process."""

register_model = MULTIMODAL_REGISTRY.register_model


# ---- processors ---------------------------------------------------------------------------------


def create_processor(
    model: str | Path | ModelConfig | None = None,
    tokenizer: Any = None,
    *,
    cache: ProcessorCache | None = None,
    revision: str | None = None,
    max_model_len: int | None = None,
    **mm: Any,
) -> BaseMultiModalProcessor[Any]:
    """Make the processor of a checkpoint, without an engine.

    Args:
        model: A directory (its weights are not needed), a hub id, or None for the default; or a
            ModelConfig, which says of all that is below `cache` itself.
        tokenizer: In place of the checkpoint's.
        cache: Keeps processed items; see `mmjax.cache`.
        revision: Of a hub id.
        max_model_len: The longest prompt that dummy inputs are made for.
        mm: Fields of `MultiModalConfig`, such as `limit_mm_per_prompt`.
    """
    if not isinstance(model, ModelConfig):
        model = load_model_config(
            None if model is None else str(model),
            revision=revision,
            max_model_len=max_model_len,
            mm=MultiModalConfig(**mm),
        )
    elif mm or revision is not None or max_model_len is not None:
        given = {"revision": revision, "max_model_len": max_model_len, **mm}
        names = ", ".join(f"`{name}`" for name, value in given.items() if value is not None)
        raise ConfigError(f"{names} beside a ModelConfig, which has such fields; set them there")
    return MULTIMODAL_REGISTRY.create_processor(model, tokenizer, cache)


def get_processor_factories(architecture: str) -> ProcessorFactories:
    """Import how a model's processor is made (no jax); an unknown name is told the nearest."""
    factories = MULTIMODAL_REGISTRY.find_factories(architecture)
    if factories is None:
        raise CheckpointError(
            f"architecture `{architecture}` is not supported; {_nearest(architecture)}"
        )
    return factories


def _nearest(architecture: str) -> str:
    (nearest,) = get_close_matches(architecture, MODELS, n=1, cutoff=0.0)
    supported = ", ".join(f"`{name}`" for name in MODELS)
    return f"the nearest supported one is `{nearest}`, of: {supported}"


def _load_tokenizer(model_config: ModelConfig, load: Callable[[Path], Any] | None) -> Any:
    path = model_config.path
    # NOTE: of some families HF makes an empty tokenizer where there is no file.
    if load is None and not any(file for pattern in _VOCABULARIES for file in path.glob(pattern)):
        raise CheckpointError(f"`{path}` has no tokenizer.json; is the directory complete?")
    # On use only: it brings an installed torch along.
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    try:
        if load is not None:
            return load(model_config.path)
        # Of a type that it does not know, transformers would read the configuration again, and
        # warn that a model of it is not supported.
        known = model_config.hf_config
        config = {} if type(known).model_type else {"config": known}
        # NOTE: unless it is said, a checkpoint with remote code is asked about on the terminal.
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **config)
        # A class that transformers has for the model's own type is what it was trained with.
        has_own_class = known.model_type in TOKENIZER_MAPPING_NAMES
        return loaded if has_own_class else keep_as_written(loaded, path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the tokenizer of `{model_config.model}` cannot be loaded: {error}; "
            "the directory must have tokenizer.json and tokenizer_config.json"
        ) from error


# ---- models -------------------------------------------------------------------------------------


def require_model(architecture: str) -> type | str:
    """Return a model's class, or its import path; refuse what has only a processor, or nothing."""
    row = MULTIMODAL_REGISTRY.find_row(architecture)
    if row is not None:
        return f"mmjax.models.{row.folder}.model:{architecture}"
    model = get_processor_factories(architecture).model
    if model is None:
        raise CheckpointError(
            f"architecture `{architecture}` can be processed and not served: it is registered with "
            "a processor and no model; name the model's class in its `ProcessorFactories`"
        )
    return model


def load_model_class(architecture: str, path: str | None = None) -> type:
    """Import a model's class, of `path` if given; only the process that computes may call this."""
    model = path or require_model(architecture)
    if isinstance(model, str):
        path, model = model, _load_object(architecture, model)
    if not isinstance(model, type):
        raise CheckpointError(
            f"`{path}`, which stands for `{architecture}`, is a `{type(model).__name__}`; "
            "it must be the model's class"
        )
    return model


def with_model_class(model_config: ModelConfig) -> ModelConfig:
    """Return the same for the engine's process, with the import path of the model's class.

    That process knows nothing of what is registered in this one.

    Raises:
        CheckpointError: The architecture cannot be served.
        ConfigError: Its class cannot be imported by another process.
    """
    model = require_model(model_config.architecture)
    if isinstance(model, type):
        model = _find_path(model_config.architecture, model)
    return replace(model_config, model_class=model)


def _find_path(architecture: str, model: type) -> str:
    path = f"{model.__module__}:{model.__qualname__}"
    if model.__module__ == "__main__":
        reason = "it is defined in the script that was started"
    elif "<locals>" in model.__qualname__:
        reason = "it is defined inside of a function"
    else:
        try:
            load_model_class(architecture, path)
        except CheckpointError as error:
            reason = str(error)
        else:
            return path
    raise ConfigError(
        f"the model of `{architecture}` is `{path}`, which the engine's process cannot import: "
        f"{reason}; define the class at the top level of a module that can be imported by its name"
    )


def _load_object(architecture: str, path: str) -> Any:
    """Import what `package.module:name` names."""
    module, _, name = path.partition(":")
    try:
        return attrgetter(name)(importlib.import_module(module))
    # Often another package's code: it may raise anything.
    except Exception as error:
        raise CheckpointError(
            f"`{path}`, which stands for `{architecture}`, cannot be imported: "
            f"{type(error).__name__}: {error}{_find_place(error)}"
        ) from error


def _find_place(error: Exception) -> str:
    """Return where the code that was imported failed; nothing where it was not found."""
    ours = (__file__, importlib.__file__)
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if frame.filename not in ours and not frame.filename.startswith("<frozen")
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
