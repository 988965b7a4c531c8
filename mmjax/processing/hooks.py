"""The parts of processing that a family may override, and the calls of its HF processor.

`BaseMultiModalProcessor` puts them together.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from transformers import BatchFeature

from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.items.parse import DictEmbeddingItems, EmbeddingItems, MultiModalDataItems
from mmjax.processing.prompt_updates.matching import (
    MultiModalPromptUpdatesApplyResult,
    apply_text_matches,
    apply_token_matches,
    find_mm_placeholders,
)
from mmjax.processing.prompt_updates.updates import (
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    PromptUpdate,
    ResolvedPromptUpdate,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig, tensors_as_numpy
from mmjax.processing.tensors.inputs import MultiModalKwargsItems
from mmjax.processing.validation import missing_placeholder_error

InfoT = TypeVar("InfoT", bound=BaseProcessingInfo)


class ProcessorHooks(ABC, Generic[InfoT]):
    """One family's way with prompts and media; the flow around it is the same for all."""

    def __init__(self, info: InfoT, dummy_inputs: BaseDummyInputsBuilder[InfoT]) -> None:
        self.info = info
        self.dummy_inputs = dummy_inputs

    @abstractmethod
    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """Say for each tensor of the HF processor's output how it divides among items."""

    @abstractmethod
    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        """Say what each item does to the prompt; several of one modality are alternatives."""

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        """Call the HF processor on text and media."""
        if "audios" in mm_data:  # HF's name for all of them
            mm_data = {**mm_data, "audio": mm_data["audios"]}
            del mm_data["audios"]
        self.info.check_sizes(mm_data, mm_kwargs)
        return self.info.ctx.call_hf_processor(
            self.info.get_hf_processor(), {"text": prompt, **mm_data}, {**mm_kwargs, **tok_kwargs}
        )

    def _hf_processor_applies_updates(
        self,
        prompt: str,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> bool:
        """Whether the HF processor may update the prompt itself, given text.

        If so, it has where the updated placeholders are found in the ids that it returns; if not,
        nobody looks, and the updates are applied here.
        """
        kinds = EmbeddingItems | DictEmbeddingItems
        return not any(isinstance(items, kinds) for items in mm_items.values())

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        """Do to a prompt of token ids what the HF processor does to any text (a family's hook)."""
        return prompt_tokens

    def _get_hash_kwargs(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return what, beside its content, an item's tensors depend on: caches name it by both.

        A family whose tensors depend on the request's other items adds to the request's kwargs
        what of them does (as `{**hf_processor_mm_kwargs, "crops": False}`).
        """
        return hf_processor_mm_kwargs

    def _apply_token_matches(
        self, prompt: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[list[int], MultiModalPromptUpdatesApplyResult]:
        return apply_token_matches(prompt, mm_prompt_updates, self.info.get_tokenizer())

    def _apply_text_matches(
        self, prompt: str, mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[str, MultiModalPromptUpdatesApplyResult]:
        return apply_text_matches(prompt, mm_prompt_updates, self.info.get_tokenizer())

    def _find_mm_placeholders(
        self, token_ids: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> Mapping[str, list[PlaceholderFeaturesInfo]]:
        return find_mm_placeholders(token_ids, mm_prompt_updates, self.info.get_tokenizer())

    def _recompute_cached_prompt_update(
        self, cached_update: ResolvedPromptUpdate, new_item_idx: int
    ) -> ResolvedPromptUpdate:
        """Adapt a cached update to the item's index in this request."""
        return replace(cached_update, item_idx=new_item_idx)

    def _apply_hf_processor_main(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        *,
        enable_hf_prompt_update: bool,
    ) -> tuple[list[int], Mapping[str, Any], bool]:
        """Return token ids, the HF processor's tensors, and whether it may have updated the prompt.

        Text goes through the HF processor: with the items where `enable_hf_prompt_update` allows
        it, else alone. Token ids go by it.
        """
        may_be_updated = False
        if isinstance(prompt, str):
            may_be_updated = self._hf_processor_applies_updates(
                prompt, mm_items, hf_processor_mm_kwargs, tokenization_kwargs
            )
            # HF's processors count the prompt's placeholders against their own items: embeddings,
            # which they never see, must not be among them.
            has_passthrough = any(items.get_passthrough_data() for items in mm_items.values())
            if enable_hf_prompt_update and mm_items and not has_passthrough:
                token_ids, hf_inputs = self._apply_hf_processor_text_mm(
                    prompt, mm_items, hf_processor_mm_kwargs, tokenization_kwargs
                )
                return token_ids, hf_inputs, may_be_updated
            token_ids = self._apply_hf_processor_text_only(
                prompt, tokenization_kwargs, hf_processor_mm_kwargs=hf_processor_mm_kwargs
            )
        else:
            token_ids = self._apply_hf_processor_tokens_only(list(prompt))
        hf_inputs = self._apply_hf_processor_mm_only(mm_items, hf_processor_mm_kwargs, {})
        return token_ids, hf_inputs, may_be_updated

    def _apply_hf_processor_text_mm(
        self,
        prompt_text: str,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> tuple[list[int], Mapping[str, Any]]:
        """Call the HF processor on text and items; return token ids and tensors."""
        mm_data: dict[str, object] = {}
        for items in mm_items.values():
            if len(items):
                mm_data.update(items.get_processor_data())
        outputs = dict(
            self._call_hf_processor(
                prompt_text, mm_data, hf_processor_mm_kwargs, tokenization_kwargs
            )
        )
        return _only_row(outputs.pop("input_ids")), outputs

    def _apply_hf_processor_text_only(
        self,
        prompt_text: str,
        tokenization_kwargs: Mapping[str, object],
        *,
        hf_processor_mm_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return what the HF processor makes of text alone.

        An HF processor that refuses placeholders without media, or writes something for media
        that are not there, is mended in `_call_hf_processor`, where `mm_data` is empty.
        """
        token_ids, _ = self._apply_hf_processor_text_mm(
            prompt_text, MultiModalDataItems(), hf_processor_mm_kwargs or {}, tokenization_kwargs
        )
        return token_ids

    def _apply_hf_processor_mm_only(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> Mapping[str, Any]:
        """Process items without the prompt: dummy text satisfies the HF processor."""
        # The user may write into an array later: what a cache keeps of it must not change.
        passthrough = {
            key: tensors_as_numpy(data, copy=True)
            for items in mm_items.values()
            for key, data in items.get_passthrough_data().items()
        }
        processed = MultiModalDataItems(
            {
                modality: items
                for modality, items in mm_items.items()
                if len(items) and items.get_processor_data()
            }
        )
        if not processed:
            return passthrough
        dummy_text = self.dummy_inputs.get_dummy_text(processed.get_all_counts())
        _, hf_inputs = self._apply_hf_processor_text_mm(
            dummy_text, processed, hf_processor_mm_kwargs, tokenization_kwargs
        )
        return {**hf_inputs, **passthrough}

    def _bind_and_group_updates(
        self, prompt_updates: Sequence[PromptUpdate], mm_item_counts: Mapping[str, int]
    ) -> dict[str, list[list[ResolvedPromptUpdate]]]:
        """Resolve each update for each item of its modality."""
        by_modality: dict[str, list[PromptUpdate]] = {}
        for update in prompt_updates:
            by_modality.setdefault(update.modality, []).append(update)
        return {
            modality: [
                [update.resolve(index) for update in updates]
                for index in range(mm_item_counts.get(modality, 0))
            ]
            for modality, updates in by_modality.items()
        }

    def _apply_prompt_updates(
        self, token_ids: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        """Update the prompt by tokens, or by text where a target hides inside other tokens."""
        if not any(mm_prompt_updates.values()):
            return token_ids, {}
        new_token_ids, result = self._apply_token_matches(token_ids, mm_prompt_updates)
        if _is_any_unapplied(result) is not None:
            tokenizer = self.info.get_tokenizer()
            text, result = self._apply_text_matches(tokenizer.decode(token_ids), mm_prompt_updates)
            new_token_ids = tokenizer.encode(text, add_special_tokens=False)
        unapplied = _is_any_unapplied(result)
        if unapplied is not None:
            modality, index = unapplied
            raise missing_placeholder_error(
                self.info,
                modality,
                f"Failed to apply prompt replacement for mm_items[{modality!r}][{index}]",
            )
        return new_token_ids, self._find_mm_placeholders(new_token_ids, mm_prompt_updates)


def _only_row(input_ids: Any) -> list[int]:
    (row,) = input_ids  # a batch of one prompt
    return row.tolist() if hasattr(row, "tolist") else list(row)


def _is_any_unapplied(result: MultiModalPromptUpdatesApplyResult) -> tuple[str, int] | None:
    for modality, alternatives in result.items():
        for index, alternative in enumerate(alternatives):
            if alternative is None:
                return modality, index
    return None
