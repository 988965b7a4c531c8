"""The processor of encoder-decoder models: media stand in the encoder's prompt."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from mmjax.processing.hooks import InfoT
from mmjax.processing.items.parse import MultiModalDataDict, MultiModalDataItems, MultiModalUUIDDict
from mmjax.processing.media.decode_budget import DecodeControl
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.prompt_updates.updates import as_ids
from mmjax.processing.validation import validate_prompt


class EncDecMultiModalProcessor(BaseMultiModalProcessor[InfoT]):
    """Makes two prompts: HF and the prompt updates work on the encoder's alone."""

    @abstractmethod
    def create_encoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        """Return the encoder's prompt, placeholders not yet expanded."""

    def create_decoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        """Return the decoder's prompt, where the caller gives none."""
        return prompt

    def prepare(
        self,
        prompt: str | list[int],
        mm_data: MultiModalDataDict | MultiModalDataItems | None = None,
        hf_processor_mm_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        *,
        mm_uuids: MultiModalUUIDDict | None = None,
        decoder_prompt: str | list[int] | None = None,
        id_domain: str | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
        control: DecodeControl | None = None,
    ) -> PreparedInputs:
        """Prepare the encoder's prompt, and tokenize the decoder's without special tokens.

        `prompt` is the encoder's where `decoder_prompt` is given too; else both are made of it.
        """
        vocab_size = self.info.vocab_size
        validate_prompt(prompt, vocab_size)
        if decoder_prompt is not None:
            validate_prompt(decoder_prompt, vocab_size, param="decoder_prompt")
        mm_items = self._to_mm_items(mm_data, mm_uuids)
        prepared = super().prepare(
            self.create_encoder_prompt(prompt, mm_items),
            mm_items,
            hf_processor_mm_kwargs,
            tokenization_kwargs,
            mm_uuids=mm_uuids,
            id_domain=id_domain,
            cache_salt=cache_salt,
            request_id=request_id,
            control=control,
        )
        if decoder_prompt is None:
            decoder_prompt = self.create_decoder_prompt(prompt, mm_items)
        return replace(
            prepared,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(as_ids(decoder_prompt, self.info.get_tokenizer())),
            encoder_prompt_token_ids=prepared.prompt_token_ids,
        )
