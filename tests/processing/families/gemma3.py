"""A tiny Gemma 3 directory without weights, our processor for it, and HF's as the oracle."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from mmjax.config.engine_config import ModelConfig, MultiModalConfig
from mmjax.models.registry import create_processor
from mmjax.processing.processor import BaseMultiModalProcessor, ProcessorCache
from tests.kit import gemma_tokenizer, save_gemma3_processor, tiny_gemma3_config
from tests.processing.families.family import Family, HFInputs

ARCHITECTURE = "Gemma3ForConditionalGeneration"


@cache
def directory() -> Path:
    """Write config, tokenizer and processor files once."""
    path = Path(mkdtemp(prefix="mmjax-gemma3-"))
    tokenizer = gemma_tokenizer()
    config = tiny_gemma3_config(tokenizer)
    config.architectures = [ARCHITECTURE]
    config.save_pretrained(path)
    save_gemma3_processor(path, tokenizer, config)
    return path


def model_config(path: Path | None = None, **mm: Any) -> ModelConfig:
    path = path or directory()
    return ModelConfig(
        model="tiny-gemma3",
        path=path,
        hf_config=AutoConfig.from_pretrained(path),
        architecture=ARCHITECTURE,
        max_model_len=4096,
        mm=MultiModalConfig(**mm),
    )


def make_processor(
    path: Path | None = None, *, processor_cache: ProcessorCache | None = None, **mm: Any
) -> BaseMultiModalProcessor[Any]:
    return create_processor(model_config(path, **mm), cache=processor_cache)


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    path = directory()
    return Gemma3Processor(
        Gemma3ImageProcessorPil.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
        image_seq_length=AutoConfig.from_pretrained(path).mm_tokens_per_image,
    )


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    outputs = hf_processor()(
        text=prompt, images=images or None, return_tensors="np", **(kwargs if images else {})
    )
    return HFInputs(outputs["input_ids"][0].tolist(), outputs)


CROPS = {"do_pan_and_scan": True}
FAMILY = Family(
    name="gemma3",
    make_processor=make_processor,
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_tokenizer().image_token_id],
    placeholder="<start_of_image>",
    extra_kwargs=({}, CROPS),
    lowering_kwargs={"pan_and_scan_max_num_crops": 2},
    mm_configs=({}, {"mm_processor_kwargs": CROPS}, {"trust_request_mm_kwargs": True}),
)
