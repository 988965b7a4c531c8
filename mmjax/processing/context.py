"""What a processor knows of its model: configuration, tokenizer, HF processor, limits, sizes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

from transformers import BatchFeature

from mmjax.config.engine_config import ModelConfig, MultiModalConfig
from mmjax.decoders.limits import MediaLimits
from mmjax.errors import (
    CheckpointError,
    ConfigError,
    MMJaxError,
    RequestError,
    RequestValueError,
)
from mmjax.processing.hashing.item_hashes import RecentMap
from mmjax.processing.hf_call import (
    KnownKwargs,
    call_hf_processor,
    check_ceilings,
    check_known_kwargs,
    check_sizes,
    list_known_kwargs,
    merge_mm_kwargs,
)
from mmjax.processing.items.parse import (
    DictEmbeddingItems,
    EmbeddingItems,
    ModalityDataItems,
    MultiModalDataDict,
    MultiModalDataItems,
    MultiModalDataParser,
)
from mmjax.processing.media.encoded import PixelRange
from mmjax.processing.transcripts import Transcriber

T = TypeVar("T")

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
"""What a processor is loaded from, beside the vocabulary; not every checkpoint has all of them."""

_MAX_HF_PROCESSORS = 8
"""Loaded with different kwargs, and kept."""


@dataclass(frozen=True, kw_only=True)
class InputProcessingContext:
    """The model's configuration and tokenizer, and how its HF processor is called."""

    model_config: ModelConfig
    tokenizer: Any
    placeholder_str: Callable[[str, int], str | None] | None = None
    """The model class's `get_placeholder_str`, where it has one."""
    _hf_processors: RecentMap[str, Any] = field(
        default_factory=lambda: RecentMap(_MAX_HF_PROCESSORS), init=False, repr=False, compare=False
    )
    """By their kwargs."""

    def get_mm_config(self) -> MultiModalConfig:
        """Return the operator's settings for media; RuntimeError for a model of text alone."""
        mm: MultiModalConfig | None = self.model_config.mm
        if mm is None:
            raise RuntimeError(f"`{self.model_config.model}` is not a multimodal model")
        return mm

    def get_hf_config(self, typ: type[T] | None = None) -> T | Any:
        """Return the checkpoint's configuration; raise TypeError where it is not a `typ`."""
        hf_config = self.model_config.hf_config
        if typ is not None and not isinstance(hf_config, typ):
            raise TypeError(
                f"the checkpoint's config is a `{type(hf_config).__name__}`, "
                f"expected `{typ.__name__}`"
            )
        return hf_config

    def get_hf_processor(self, typ: type[T] | None = None, **kwargs: object) -> T | Any:
        """Return the checkpoint's own HF processor, loaded once for these kwargs.

        Raises TypeError where it is not a `typ`. A request's kwargs do not belong here: they are
        for the call, and the loader would obey names that are not meant for it.
        """
        key = repr(sorted(kwargs.items()))
        processor = self._hf_processors.get(key)
        if processor is None:
            # On use only: it brings an installed torch along.
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(
                self.model_config.path, tokenizer=self.tokenizer, **kwargs
            )
            self._hf_processors.put(key, processor)
        if typ is not None and not isinstance(processor, typ):
            raise TypeError(
                f"the checkpoint's processor is a `{type(processor).__name__}`, "
                f"expected `{typ.__name__}`"
            )
        return processor

    def merge_mm_kwargs(self, mm_kwargs: Mapping[str, object]) -> dict[str, Any]:
        """Return the operator's processor kwargs overlaid with a request's."""
        return merge_mm_kwargs(self.get_mm_config().mm_processor_kwargs, mm_kwargs)

    def call_hf_processor(
        self,
        hf_processor: Callable[..., BatchFeature],
        data: Mapping[str, object],
        kwargs: Mapping[str, object],
    ) -> BatchFeature:
        """Call an HF processor under the operator's kwargs and these; see `hf_call`."""
        return call_hf_processor(hf_processor, data, self.merge_mm_kwargs(kwargs))


class BaseProcessingInfo(ABC):
    """Facts about a family's processing; every family overrides `get_supported_mm_limits`."""

    chat_template: str | None = None
    """For checkpoints that have none: published ones of older families lack it.

    It leaves BOS to the tokenizer, as the families' own documentation does.
    """
    is_chat_template_fixed: bool = False
    """Whether a checkpoint's own is not read: it is of the model that this one was made of."""

    tasks: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """What the model was trained to do -> the text that asks for it, for pages to offer.

    `{...}` in a text stands for the words of whoever asks.
    """

    data_parser: type[MultiModalDataParser] = MultiModalDataParser
    """What `get_data_parser` makes."""

    def __init__(self, ctx: InputProcessingContext) -> None:
        self.ctx = ctx

    @property
    def model_id(self) -> str:
        return self.ctx.model_config.model

    @property
    def max_encoder_len(self) -> int | None:
        """Tokens of the longest encoder's prompt, where it is not held against `max_model_len`."""
        return None

    @property
    def transcriber(self) -> Transcriber | None:
        """What has clips transcribed; None: nothing, the model does no such thing."""
        return None

    def get_tasks(self) -> Mapping[str, str]:
        """Return `tasks`; those of this checkpoint, where a family's differ."""
        return self.tasks

    @abstractmethod
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return how many items of each modality the model takes; None: any number."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Return what stands for the i-th (from 1) item of a modality in a prompt of text.

        Declared here or on the model class, which comes first; None or ValueError: nothing does.
        """
        return None

    def find_placeholder_str(self, modality: str, i: int) -> str | None:
        """Return what stands for an item in a text, wherever that is declared; None: nothing."""
        get_placeholder_str = self.ctx.placeholder_str or self.get_placeholder_str
        try:
            return get_placeholder_str(modality, i)
        except ValueError:  # as vLLM's model classes say it
            return None

    def get_counted_placeholder(self, modality: str) -> str | None:
        """Return what a prompt has once for each item of a modality; None where nothing counts."""
        placeholder = self.find_placeholder_str(modality, 1)
        return placeholder if placeholder == self.find_placeholder_str(modality, 2) else None

    def get_reserved_tokens(self) -> Mapping[str, int]:
        """Return the tokens that only prompt updates may write; a prompt with one is refused."""
        return {}

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """Return a prompt with what the model has around it: BOS, a turn's format, an end.

        Of text and of token ids alike, before any item is written into it. What is there already
        is not written again.

        Args:
            token_ids: Of text, those that the tokenizer makes of it.
            mm_counts: How many items of each modality come with it.
            mm_kwargs: The request's own, for the HF processor.
        """
        return token_ids

    def get_ending_token_ids(self) -> Sequence[int]:
        """Return tokens that end an answer, beside those of the checkpoint's files."""
        return ()

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int] | None:
        """Return the most embeddings that an item can have; None: measured with dummy inputs."""
        return None

    def get_hf_config(self) -> Any:
        return self.ctx.get_hf_config()

    def get_tokenizer(self) -> Any:
        return self.ctx.tokenizer

    def get_hf_processor(self, **kwargs: object) -> Any:
        """Return the HF processor, loaded once; with kwargs, the checkpoint's own under them."""
        return self.ctx.get_hf_processor(None, **kwargs) if kwargs else self._hf_processor

    def get_image_processor(self, **kwargs: object) -> Any:
        """Return the HF processor's part for images."""
        return self.get_hf_processor(**kwargs).image_processor

    @cached_property
    def _hf_processor(self) -> Any:
        try:
            processor = self.load_hf_processor()
        # HF's code raises anything over files that are not there.
        except Exception as error:
            raise self._explain(error) from error
        try:
            check_known_kwargs(
                self.ctx.get_mm_config().mm_processor_kwargs, self.get_known_mm_kwargs(processor)
            )
        except RequestError as error:
            raise ConfigError(f"`--mm-processor-kwargs`: {error}") from error
        return processor

    def _explain(self, error: Exception) -> MMJaxError:
        """Return an error that names the files that are not there."""
        path = self.ctx.model_config.path
        missing = [name for name in PROCESSOR_FILES if not (path / name).is_file()]
        hint = f"; `{path}` has no {', no '.join(missing)}: is it complete?" if missing else ""
        if isinstance(error, MMJaxError):
            # Says what is wrong itself, unless all is by default.
            is_bare = {*PROCESSOR_FILES[:2]} <= {*missing}
            return CheckpointError(f"{error}{hint}") if is_bare else error
        reason = str(error).partition("\n")[0].partition(". ")[0]
        return CheckpointError(
            f"the processor of `{self.model_id}` cannot be loaded: {type(error).__name__}: "
            f"{reason}{hint}"
        )

    def load_hf_processor(self) -> Any:
        """Load the HF processor; families whose AutoProcessor needs more than we have override."""
        return self.ctx.get_hf_processor()

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return a prompt's tensors as HF's model takes them, for `mmjax.parity`.

        `tensors`: of all items, as the processor makes them, with float32 pixels. What HF's model
        does not know by name is dropped afterwards.
        """
        return tensors

    def get_known_mm_kwargs(self, hf_processor: Any) -> KnownKwargs | None:
        """Return the kwargs that have an effect, by scope; others are refused. None: any name."""
        return list_known_kwargs(hf_processor)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the kwargs under which an item is largest, of those that a request may send.

        Their numbers are ceilings where requests are trusted, and memory is planned for them.
        """
        return {}

    def get_planned_mm_kwargs(self) -> Mapping[str, object]:
        """Return the kwargs under which memory is planned, over the operator's own."""
        is_trusted = self.ctx.get_mm_config().trust_request_mm_kwargs
        return self.get_largest_mm_kwargs() if is_trusted else {}

    def check_mm_kwargs(self, mm_kwargs: Mapping[str, object]) -> None:
        """Refuse a request's kwargs that nothing knows, or that nobody planned for."""
        if mm_kwargs:
            check_known_kwargs(mm_kwargs, self.get_known_mm_kwargs(self.get_hf_processor()))
            check_ceilings(mm_kwargs, self.get_planned_mm_kwargs())

    @cached_property
    def vocab_size(self) -> int:
        """Token ids at or above this are refused."""
        return int(self.get_hf_config().get_text_config().vocab_size)

    @property
    def audio_rate(self) -> int | None:
        """Samples a second of the clips that the model hears; None: it hears none."""
        return None

    def get_data_parser(self) -> MultiModalDataParser:
        return self.data_parser(
            target_sr=self.audio_rate,
            target_channels=None if self.audio_rate is None else 1,
            expected_hidden_size=self.get_expected_hidden_size(),
            limits=self.get_media_limits(),
            **self.get_parser_options(),
        )

    def get_parser_options(self) -> Mapping[str, Any]:
        """Return what a family's class of parsers takes beside these."""
        return {}

    def get_media_limits(self) -> MediaLimits:
        """Return what the operator has refused before work is done on it."""
        return MediaLimits.of(self.ctx.get_mm_config())

    def get_detail_range(self, detail: Literal["low", "high"]) -> PixelRange | None:
        """Return what an image of that `detail` is scaled to; None: sizes are fixed here."""
        return None

    def check_sizes(self, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]) -> None:
        """Refuse kwargs by which the media that HF is about to get would become bombs."""
        check_sizes(mm_data, self.ctx.merge_mm_kwargs(mm_kwargs), self.get_media_limits())

    def get_expected_hidden_size(self) -> int | None:
        """Return the width that embeddings must have; None: they are not taken, or any will do."""
        if not self.takes_embeds:
            return None
        return getattr(self.get_hf_config().get_text_config(), "hidden_size", None)

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Refuse embeddings of one item with as many rows as no item of this model has."""
        if num_embeds < 1:
            raise RequestValueError(
                f"{modality} embeddings have no rows; give one at least", param="multi_modal_data"
            )

    @property
    def takes_embeds(self) -> bool:
        """Whether a prompt may hold embeddings in place of media."""
        return self.ctx.get_mm_config().enable_mm_embeds

    @cached_property
    def supported_mm_limits(self) -> Mapping[str, int | None]:
        return self.get_supported_mm_limits()

    @cached_property
    def allowed_mm_limits(self) -> Mapping[str, int]:
        """The operator's limit for each supported modality, capped by what the model takes."""
        allowed = {}
        for modality, supported in self.supported_mm_limits.items():
            limit = self.ctx.get_mm_config().limit(modality)
            allowed[modality] = limit if supported is None else min(limit, supported)
        return allowed

    def validate_num_items(
        self, modality: str, num_items: int, *, are_embeds: bool = False
    ) -> None:
        """Refuse more items of a modality than are allowed in one prompt.

        A limit of 0 leaves the tower out, which embeddings do not need: of them it allows any
        number.
        """
        limit = self._get_limit(modality)
        if num_items <= limit or (are_embeds and limit == 0):
            return
        supported = self.supported_mm_limits[modality]
        could_be_raised = supported is None or num_items <= supported
        hint = ", or set `--limit-mm-per-prompt` higher" if could_be_raised else ""
        raise RequestValueError(
            f"At most {limit} {modality}(s) may be provided in one prompt. Got {num_items}; "
            f"send fewer{hint}",
            param="multi_modal_data",
        )

    def _get_limit(self, modality: str) -> int:
        if modality not in self.supported_mm_limits:
            known = ", ".join(f"`{name}`" for name in self.supported_mm_limits) or "text only"
            raise RequestValueError(
                f"Unsupported modality: {modality}; this model takes {known}",
                param="multi_modal_data",
            )
        return self.allowed_mm_limits[modality]

    def parse_mm_data(
        self, mm_data: MultiModalDataDict, *, validate: bool = True
    ) -> MultiModalDataItems:
        """Parse the user's media; with `validate`, hold them against what the operator allows."""
        parser = self.get_data_parser()
        if not validate:
            return parser.parse_mm_data(mm_data)
        counts: dict[str, int | None] = {}
        for modality, data in mm_data.items():
            if data is not None:
                self._get_limit(modality)
                num_items = counts[modality] = parser.count_entries(modality, data)
                if num_items is not None:
                    self.validate_num_items(modality, num_items)  # before any is read
        mm_items = parser.parse_mm_data(mm_data)
        for modality, items in mm_items.items():
            are_embeds = isinstance(items, EmbeddingItems | DictEmbeddingItems)
            if are_embeds:
                self._validate_embeds(modality, items)
            if counts.get(modality) != len(items):
                self.validate_num_items(modality, len(items), are_embeds=are_embeds)
        return mm_items

    def _validate_embeds(self, modality: str, items: ModalityDataItems) -> None:
        if not self.takes_embeds:
            raise RequestValueError(
                f"You must set `--enable-mm-embeds` to input `{modality}_embeds`",
                param="multi_modal_data",
            )
        if isinstance(items, EmbeddingItems):
            for index in range(len(items)):
                if items[index] is not None:  # else a uuid stands for it
                    self.check_num_embeds(modality, items.get_feature_size(index))


InfoT = TypeVar("InfoT", bound=BaseProcessingInfo)
