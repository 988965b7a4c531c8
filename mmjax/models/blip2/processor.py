"""BLIP-2's processor: the placeholder of the Q-Former's queries precedes the prompt with `</s>`.

Before: `</s> what is it`. After: `<image>*32 </s> what is it`; all of them take embeddings.
"""

from typing import Any, ClassVar

from mmjax.models.blip2.host_inputs import Blip2HostInputs, check_language_model
from mmjax.models.family import FamilyInfo, FamilyProcessor, Target, check_settings, make_factories
from mmjax.processing.image_processors.affine import keep_bytes
from mmjax.processing.prompt_updates.updates import PromptIndexTargets

IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- 'Question: ' + message.content + ' ' -}}
    {%- elif message.role == 'assistant' -%}
        {{- 'Answer: ' + message.content + ' ' -}}
    {%- else -%}
        {{- message.content + ' ' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Answer:' -}}
{%- endif -%}
"""
"""The form in which the paper asks about an image, and asks again."""


class Blip2ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = Blip2HostInputs
    limits: ClassVar = {"image": 1}
    embed_token = IMAGE_TOKEN
    reserves_embed_token = True
    inserts_items = True
    hf_updates_prompt = True

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Require one row for each query."""
        num_queries = self.num_unit_tokens
        hint = f"{num_queries}: give what the model's own Q-Former and projection give"
        self.check_rows(modality, num_embeds, [num_queries], hint)

    def load_hf_processor(self) -> Any:
        """Assemble the HF processor: AutoProcessor needs torchvision."""
        # Imported here: they import torch if it is installed.
        from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
        from transformers.models.blip_2.processing_blip_2 import Blip2Processor

        path, hf_config = self.ctx.model_config.path, self.get_hf_config()
        check_language_model(hf_config)
        settings, _ = Blip2Processor.get_processor_dict(path)
        check_settings(settings, {"num_query_tokens": hf_config.num_query_tokens})
        # It adds `<image>` to tokenizers of older checkpoints, which lack it.
        processor = Blip2Processor(
            image_processor=keep_bytes(BlipImageProcessorPil).from_pretrained(path),
            tokenizer=self.get_tokenizer(),
            num_query_tokens=hf_config.num_query_tokens,
        )
        self.check_token(IMAGE_TOKEN, "image_token_index")
        return processor

    def get_embed_token_id(self, modality: str) -> int:
        return self.get_hf_processor().tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

    def get_target(self, modality: str) -> Target:
        return PromptIndexTargets.start()


class Blip2MultiModalProcessor(FamilyProcessor[Blip2ProcessingInfo]):
    only_tokenizes_text = False


FACTORIES = make_factories(Blip2ProcessingInfo, Blip2MultiModalProcessor)
