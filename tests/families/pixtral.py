"""Tiny Pixtrals: pictures of any grid, marks behind rows; LLaVA's config, golden files edited."""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from mmjax.models.pixtral.model import PixtralForConditionalGeneration
from tests.families.directories import HEADS, edit_golden, made_once, save_weights
from tests.families.family import Family, HFInputs
from tests.families.llava import PIXTRAL_SETTINGS, ROW
from tests.families.published import THREE_LAYOUTS, Published
from tests.families.sizes import resize_text
from tests.families.tiny import TinyFamily, Variant

TINY = TinyFamily(
    **ROW
    | {
        "model_class": PixtralForConditionalGeneration,
        "resize": lambda *sizes: {**PIXTRAL_SETTINGS, **resize_text(*sizes)},
    },
    name="pixtral",
    served=PIXTRAL_SETTINGS,
    max_embeds={"image": 12},
    variants={
        "mistral": Variant({**PIXTRAL_SETTINGS, "decoder": "mistral"}, 8),
        "two states": Variant({**PIXTRAL_SETTINGS, "vision_feature_layer": [1, -2]}, 7),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


PIXTRAL_PATCH, PIXTRAL_EDGE = 14, 56


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
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
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


path = made_once(write_pixtral)


@cache
def load_parts(path: Path) -> tuple[Any, Any]:
    """Return HF's own parts, built apart from ours; their `PixtralProcessor` needs torchvision."""
    images = PixtralImageProcessorPil.from_pretrained(path)
    return images, AutoTokenizer.from_pretrained(path)


def call_pixtral(
    load_path: Callable[[], Path],
    side: int,
    prompt: str,
    images: list[Any],
    kwargs: Mapping[str, Any],
) -> HFInputs:
    """Write an image's tokens as `PixtralProcessor.replace_image_token` does, by its size.

    `side`: of the square of pixels that is one embedding.
    """
    image_processor, tokenizer = load_parts(load_path())
    unit = {"height": side, "width": side}
    given = {**kwargs, "patch_size": unit, "return_tensors": "np"}
    outputs = image_processor(images, **given) if images else {}
    first, *others = prompt.split("[IMG]")
    for (height, width), text in zip(outputs.get("image_sizes", ()), others, strict=True):
        marked = "[IMG_BREAK]".join(["[IMG]" * (width // side)] * (height // side))
        first += f"{marked}[IMG_END]{text}"
    return HFInputs(tokenizer(first)["input_ids"], outputs)


def write(folder: Path) -> Path:
    return save_weights(write_pixtral(folder, **HEADS, **{"text_config.head_dim": 16}))


PIXTRAL = Family(
    name="pixtral",
    architecture="PixtralForConditionalGeneration",
    tiny=TINY,
    path=path,
    needless_files=frozenset(
        {"chat_template.jinja", "processor_config.json", "tokenizer_config.json"}
    ),
    write=write,
    published=Published(layouts=THREE_LAYOUTS),
    rendered="[INST][IMG]what is it[/INST]a car</s>[INST]which color[/INST]",
    with_system=("[INST]which", "[INST]be short\n\nwhich"),
    takes_embeds=False,
    call_hf=partial(call_pixtral, path, PIXTRAL_PATCH),
    placeholder="[IMG]",
    lowering_kwargs={"size": {"longest_edge": 30}},
    extra_kwargs=({}, {"size": {"longest_edge": 42}}),
    operator_kwargs=({"size": {"longest_edge": 80}},),
    tensors={},  # of other sizes an image, which HF pads; `test_pixtral` compares them
    takes_size=lambda width, height: max(width, height) < 30 * min(width, height),
    words=(*Family.words, *("<s>", "</s>", "<pad>")),
)
