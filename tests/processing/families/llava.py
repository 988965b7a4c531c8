"""LLaVA's tiny golden directory, and HF's processor as the oracle; a Pixtral made of it."""

import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.processing.families.family import (
    GOLDEN,
    Family,
    HFInputs,
    edit_golden,
    golden_processor,
)

PIXTRAL_PATCH, PIXTRAL_EDGE = 14, 56


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    path = GOLDEN / "llava"
    return LlavaProcessor(
        CLIPImageProcessorPil.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    outputs = hf_processor()(text=prompt, images=images or None, return_tensors="np", **kwargs)
    return HFInputs(outputs["input_ids"][0].tolist(), outputs)


def write_pixtral(folder: Path, **config: Any) -> Path:
    """Write a Pixtral as the hub has it: patches of 14 pixels, pictures of up to 56 x 56."""
    vision = {
        **{"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "patch_size": 14},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": PIXTRAL_EDGE},
        **{"hidden_act": "silu", "rope_theta": 10000.0, "head_dim": 16},
    }
    settings = {
        "image_token_index": 1000,
        "vision_config": vision,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    path = edit_golden("llava", folder, config={**settings, **config})
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]}
    )
    tokenizer.save_pretrained(path)
    image_processor = {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": PIXTRAL_PATCH, "width": PIXTRAL_PATCH},
        "size": {"longest_edge": PIXTRAL_EDGE},
    }
    processor = {"processor_class": "PixtralProcessor", "patch_size": PIXTRAL_PATCH}
    (path / "preprocessor_config.json").write_text(json.dumps(image_processor))
    (path / "processor_config.json").write_text(json.dumps(processor))
    template = path / "chat_template.jinja"
    template.write_text(template.read_text().replace("<image>\n", "[IMG]"))
    return path


FAMILY = Family(
    name="llava",
    make_processor=partial(golden_processor, "llava"),
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().image_token_id],
    placeholder="<image>",
    words=(*Family.words, *("<s>", "</s>", "<pad>")),
)


@cache
def pixtral() -> Path:
    """Write a Pixtral's directory once."""
    return write_pixtral(Path(mkdtemp(prefix="mmjax-pixtral-")))


def make_pixtral(**settings: Any) -> Any:
    return golden_processor("llava", path=pixtral(), **settings)


@cache
def hf_pixtral() -> tuple[Any, Any]:
    """HF's own parts, built apart from ours; their `PixtralProcessor` needs torchvision."""
    images = PixtralImageProcessorPil.from_pretrained(pixtral())
    return images, AutoTokenizer.from_pretrained(pixtral())


def call_pixtral(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Write an image's tokens as `PixtralProcessor.replace_image_token` does, by its size."""
    image_processor, tokenizer = hf_pixtral()
    sizes = image_processor(images, **kwargs)["image_sizes"] if images else []
    first, *others = prompt.split("[IMG]")
    for (height, width), text in zip(sizes, others, strict=True):
        rows, columns = height // PIXTRAL_PATCH, width // PIXTRAL_PATCH
        marked = "[IMG_BREAK]".join(["[IMG]" * columns] * rows)
        first += f"{marked}[IMG_END]{text}"
    return HFInputs(tokenizer(first)["input_ids"], {})


VARIANTS = {
    "pixtral": Family(
        name="pixtral",
        make_processor=make_pixtral,
        call_hf=call_pixtral,
        embed_token_ids=lambda processor: [processor.info.get_hf_config().image_token_id],
        placeholder="[IMG]",
        lowering_kwargs={"size": {"longest_edge": 30}},
        extra_kwargs=({}, {"size": {"longest_edge": 42}}),
        mm_configs=(
            {},
            {"mm_processor_kwargs": {"size": {"longest_edge": 80}}},
            {"trust_request_mm_kwargs": True},
        ),
        tensors={},  # of other sizes an image, which HF pads; `test_pixtral` compares them
        takes_size=lambda width, height: max(width, height) < 30 * min(width, height),
        words=FAMILY.words,
    )
}
