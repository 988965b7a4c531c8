"""Molmo's processor: BOS, then the image's tokens, then the text in the format of a turn.

Before: `what is it`. After: `<bos> <im_start> (<im_patch>*12 <im_col>)*12 <im_end> <im_start>
(<im_patch>*columns <im_col>)*rows <im_end>  User: what is it Assistant:`; only the `<im_patch>`
take embeddings. `message_format="none"` leaves the text as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from transformers import BatchFeature

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.molmo.host_inputs import (
    NEW_TOKENS,
    NUM_NEW_TOKENS,
    MolmoVisionSizes,
    count_embedding_rows,
    new_token_id,
)
from mmjax.models.molmo.image_processor import MolmoImageProcessor
from mmjax.models.registry import ProcessorFactories
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.dummy_inputs import ImageDummyInputsBuilder
from mmjax.processing.hf_call import KnownKwargs
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser, MultiModalDataItems
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.prompt_updates.updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptUpdate,
    PromptUpdateDetails,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tensors.inputs import MultiModalKwargsItems

CHAT_TEMPLATE = r"""
{%- set system = '' -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {{- '' if loop.first else ' ' -}}
    {{- message.role | capitalize + ': ' + (system if loop.first else '') + message.content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- ' Assistant:' -}}
{%- endif -%}
"""
"""The published one, and a system's text before the first question: it has no turn of its own."""
_TURN = "User:"

_TEXT_SETTINGS: Mapping[str, Any] = {"message_format": "role", "always_start_with_space": True}
_IMAGE_SETTINGS = frozenset({"max_crops"})
_FIXED_SETTINGS = {"do_normalize": True, "image_padding_mask": True}


def format_prompt(text: str, message_format: str, *, always_start_with_space: bool) -> str:
    """Return a text as a user's turn, once: one that begins as such a turn stays as it is.

    RequestValueError for a format that is none of `role` and `none`.
    """
    if message_format not in ("role", "none"):
        raise RequestValueError(
            f"`message_format` is {message_format!r}; it must be `role` or `none`",
            param="mm_processor_kwargs",
        )
    if text.startswith(f" {_TURN}"):
        return text
    if message_format == "role" and not text.startswith(_TURN):
        text = f"{_TURN} {text} Assistant:"
    return f" {text}" if always_start_with_space else text


@dataclass(frozen=True, slots=True)
class MolmoProcessor:
    """Called like HF's processors: the text's ids as they are, and the images' crops."""

    image_processor: MolmoImageProcessor
    tokenizer: Any

    @property
    def known_kwargs(self) -> KnownKwargs:
        return {"text_kwargs": frozenset(_TEXT_SETTINGS), "images_kwargs": _IMAGE_SETTINGS}

    def __call__(
        self, *, text: str, return_tensors: str, images: Sequence[Any] = (), **kwargs: Any
    ) -> BatchFeature:
        known = {"text_kwargs", "images_kwargs", *_TEXT_SETTINGS, *_IMAGE_SETTINGS}
        for_text = {key: value for key, value in kwargs.items() if key not in known}
        outputs = dict(self.tokenizer([text], **for_text))
        if images:
            outputs |= self.image_processor(images, **self.scope_images(kwargs))
        return BatchFeature(outputs, tensor_type=return_tensors)

    def scope_images(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of the kwargs is the image processor's."""
        flat = {key: value for key, value in kwargs.items() if key in _IMAGE_SETTINGS}
        return flat | kwargs.get("images_kwargs", {})

    @property
    def bos_token_id(self) -> int:
        """The tokenizer's BOS; its EOS where it has none, as Qwen2's."""
        found = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if found is None else found

    def begin_prompt(self, token_ids: Sequence[int], kwargs: Mapping[str, Any]) -> list[int]:
        """Return the ids of a whole prompt: BOS, once, and its text as a user's turn."""
        bos = self.bos_token_id
        words = list(token_ids[1:] if token_ids[:1] == [bos] else token_ids)
        given = {**kwargs, **kwargs.get("text_kwargs", {})}
        settings = {key: given.get(key, value) for key, value in _TEXT_SETTINGS.items()}
        text = self.tokenizer.decode(words, clean_up_tokenization_spaces=False)
        formatted = format_prompt(text, **settings)
        if formatted != text:
            words = self.tokenizer.encode(formatted, add_special_tokens=False)
        return [bos, *words]


class MolmoProcessingInfo(BaseProcessingInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        # The published processor places the tokens of a second image wrongly.
        return {"image": 1}

    @cached_property
    def vocab_size(self) -> int:
        """Token ids at or above this are refused; the last rows have no logits."""
        return count_embedding_rows(self.get_hf_config()) + NUM_NEW_TOKENS

    def get_token_id(self, token: str) -> int:
        """Return the id of one of the new tokens."""
        return new_token_id(self.get_hf_config(), token)

    def load_hf_processor(self) -> MolmoProcessor:
        """Return mmjax's own: the published one is remote code."""
        # Imported here: it imports torch if it is installed.
        from transformers.image_processing_base import ImageProcessingMixin

        settings, _ = ImageProcessingMixin.get_image_processor_dict(self.ctx.model_config.path)
        for name, value in _FIXED_SETTINGS.items():
            if settings.get(name, value) != value:
                raise CheckpointError(
                    f"`{name}` of the image processor is {settings[name]!r}; it must be {value!r}"
                )
        names = {one.name for one in fields(MolmoImageProcessor)}
        image_processor = MolmoImageProcessor(
            **{name: value for name, value in settings.items() if name in names}
        )
        self._check_crops(image_processor, settings)
        self._check_tokens()
        return MolmoProcessor(image_processor, self.get_tokenizer())

    def _check_crops(self, processor: MolmoImageProcessor, settings: Mapping[str, Any]) -> None:
        """Refuse crops that the model's encoder does not take, or that pooling would cut."""
        sizes = MolmoVisionSizes.from_hf(self.get_hf_config())
        expected: Mapping[str, Any] = {
            "base_image_input_size": [sizes.crop_side] * 2,
            "image_patch_size": sizes.image_patch_size,
            "image_token_length_h": processor.crop_tokens,
            "image_token_length_w": processor.crop_tokens,
        }
        for name, value in expected.items():
            if settings.get(name, value) != value:
                raise CheckpointError(
                    f"`{name}` of the image processor is {settings[name]}, but the model's "
                    f"encoder takes {value}; make them equal"
                )
        margins = list(processor.overlap_margins)
        if any(margin % 2 for margin in margins) or processor.window_patches < 1:
            raise CheckpointError(
                f"`overlap_margins` of the image processor is {margins}; both must be even, and "
                f"together less than the {processor.crop_patches} patches of a crop"
            )

    def _check_tokens(self) -> None:
        tokenizer = self.get_tokenizer()
        for token in NEW_TOKENS:
            found, expected = tokenizer.get_vocab().get(token), self.get_token_id(token)
            if found != expected:
                raise CheckpointError(
                    f"`{token}` is token {found} of the tokenizer, but {expected} by "
                    "`embedding_size` of config.json; make them agree"
                )
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise CheckpointError(
                "the tokenizer has neither a BOS nor an EOS token; Molmo's prompts begin with one "
                "of them: name it in tokenizer_config.json"
            )

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger of the checkpoint's number of crops and the operator's."""
        own: MolmoProcessor = self.get_hf_processor()
        operators = own.scope_images(self.ctx.merge_mm_kwargs({}))
        cutter = own.image_processor
        return {"max_crops": max(cutter.max_crops, cutter.resolve_max_crops(operators))}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of an image with the most embeddings, and how many."""
        own: MolmoProcessor = self.get_hf_processor()
        planned = self.ctx.merge_mm_kwargs(self.get_planned_mm_kwargs())
        return own.image_processor.find_largest(own.scope_images(planned))

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        return {"image": self.find_largest_image()[1]}


class MolmoDummyInputsBuilder(ImageDummyInputsBuilder[MolmoProcessingInfo]):
    def get_largest_image(self) -> ImageSize:
        return self.info.find_largest_image()[0]


class MolmoMultiModalProcessor(BaseMultiModalProcessor[MolmoProcessingInfo]):
    def _hf_processor_applies_updates(self, *args: object, **kwargs: object) -> bool:
        return False

    def _tokenize(
        self,
        prompt: str | list[int],
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> list[int]:
        """Begin every prompt as the published processor does, of text and of token ids alike."""
        token_ids = super()._tokenize(prompt, hf_processor_mm_kwargs, tokenization_kwargs)
        kwargs = self.info.ctx.merge_mm_kwargs(hf_processor_mm_kwargs)
        return self.info.get_hf_processor().begin_prompt(token_ids, kwargs)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        num_crops = hf_inputs.get("num_crops", [])
        by_crops = ("images", "image_masks", "image_input_idx")
        by_image = ("num_crops", "image_grid_hw")
        return {
            **{key: MultiModalFieldConfig.flat_from_sizes("image", num_crops) for key in by_crops},
            **{key: MultiModalFieldConfig.batched("image", keep_on_cpu=True) for key in by_image},
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        processor: MolmoProcessor = self.info.get_hf_processor()
        side = processor.image_processor.crop_tokens
        start, end, patch, column = map(self.info.get_token_id, NEW_TOKENS[:4])

        def write_grid(rows: int, columns: int) -> list[int]:
            return [start, *[*[patch] * columns, column] * rows, end]

        def get_insertion(item_idx: int) -> PromptUpdateDetails:
            rows, columns = out_mm_kwargs.get_item("image", item_idx)["image_grid_hw"].data.tolist()
            full = write_grid(side, side) + write_grid(rows, columns)
            return PromptUpdateDetails.select_token_id(full, patch)

        target = PromptIndexTargets.prefix([processor.bos_token_id])
        return [PromptInsertion("image", target, get_insertion)]


FACTORIES = ProcessorFactories(
    info=MolmoProcessingInfo,
    dummy_inputs=MolmoDummyInputsBuilder,
    processor=MolmoMultiModalProcessor,
)
