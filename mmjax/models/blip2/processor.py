"""BLIP-2's processor: the placeholder of the Q-Former's queries precedes the prompt with `</s>`.

Before: `</s> what is it`. After: `<image>*32 </s> what is it`; all of them take embeddings.
"""

from typing import Any, ClassVar

from transformers import AddedToken

from mmjax.errors import check_settings
from mmjax.models.blip2.host_inputs import (
    Blip2HostInputs,
    Blip2T5HostInputs,
    check_language_model,
)
from mmjax.models.family import (
    FamilyInfo,
    FamilyProcessor,
    Target,
    make_factories,
)
from mmjax.processing.chat_turns import write_turns
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.items.parse import ImagesOnlyDataParser, MultiModalDataItems
from mmjax.processing.processor import EncDecMultiModalProcessor
from mmjax.processing.prompt_updates.updates import PromptIndexTargets

IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = write_turns(
    start="{'user': 'Question: ', 'assistant': 'Answer: '}[message.role]",
    content="message.content",
    end="' '",
    answer="'Answer:'",
)
"""The form in which the paper asks about an image, and asks again."""


class Blip2ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = Blip2HostInputs
    image_processors: ClassVar = {"Blip": "blip"}
    limits: ClassVar = {"image": 1}
    embed_token = IMAGE_TOKEN
    reserves_embed_token = True
    inserts_items = True
    has_encoder: ClassVar = False

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        if ctx.tokenizer is not None:
            # Those of older checkpoints lack it; HF's processor adds it to them.
            token = AddedToken(IMAGE_TOKEN, normalized=False, special=True)
            ctx.tokenizer.add_tokens([token], special_tokens=True)

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Require one row for each query."""
        num_queries = self.num_unit_tokens
        hint = f"{num_queries}: give what the model's own Q-Former and projection give"
        self.check_rows(modality, num_embeds, [num_queries], hint)

    def load_hf_processor(self) -> Any:
        hf_config = self.get_hf_config()
        check_language_model(hf_config, has_encoder=self.has_encoder)
        facts = {"num_query_tokens": hf_config.num_query_tokens}
        check_settings(self.processor_settings, facts)
        self.check_token(IMAGE_TOKEN, "image_token_index")
        return super().load_hf_processor()

    def get_target(self, modality: str) -> Target:
        return PromptIndexTargets.start()


class Blip2T5ProcessingInfo(Blip2ProcessingInfo):
    data_parser = ImagesOnlyDataParser
    """The encoder's prompt has room for whole images."""
    host_inputs = Blip2T5HostInputs
    has_encoder = True


class Blip2T5MultiModalProcessor(
    FamilyProcessor[Blip2T5ProcessingInfo], EncDecMultiModalProcessor[Blip2T5ProcessingInfo]
):
    """Before: `what is it`. After, for the encoder: `<image>*32 what is it </s>`."""

    def create_encoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        return prompt

    def create_decoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> list[int]:
        """Return what T5's answers begin with: padding, unless config.json says otherwise."""
        text = self.info.get_hf_config().get_text_config()
        start = getattr(text, "decoder_start_token_id", None)
        return [text.pad_token_id if start is None else start]


FACTORIES = make_factories(Blip2ProcessingInfo)
T5_FACTORIES = make_factories(Blip2T5ProcessingInfo, Blip2T5MultiModalProcessor)
