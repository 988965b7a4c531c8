"""The processor of encoder-decoder models: media stand in the encoder's prompt."""

from abc import abstractmethod

from mmjax.processing.context import InfoT
from mmjax.processing.items.items import MultiModalDataItems
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.validation import validate_prompt


class EncDecMultiModalProcessor(BaseMultiModalProcessor[InfoT]):
    """Makes two prompts of one, or takes two."""

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

    def _create_prompts(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        decoder_prompt: str | list[int] | None,
    ) -> tuple[str | list[int], str | list[int]]:
        """Return both prompts: HF and the prompt updates work on the encoder's alone.

        `prompt` is the encoder's where `decoder_prompt` is given too; else both are made of it.
        The decoder's is tokenized without special tokens.
        """
        if decoder_prompt is None:
            decoder_prompt = self.create_decoder_prompt(prompt, mm_items)
        else:
            validate_prompt(decoder_prompt, self.info.vocab_size, param="decoder_prompt")
        return self.create_encoder_prompt(prompt, mm_items), decoder_prompt
