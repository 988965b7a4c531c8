"""Tiny Florence-2s: image and text in an encoder's prompt, tokens to go on from in a decoder's."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Florence2Config, GenerationConfig
from transformers import Florence2ForConditionalGeneration as HFModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.florence2.processing_florence2 import Florence2Processor

from mmjax.models.florence2.host_inputs import Florence2HostInputs
from mmjax.models.florence2.model import Florence2ForConditionalGeneration
from tests.families.directories import edit_golden, golden_path, save_weights
from tests.families.encdec import EncDecFamily, torch_inputs
from tests.families.family import Family, call_processor, hf_of
from tests.families.published import Published
from tests.families.sizes import NO_KEYS, Keys
from tests.families.tiny import AFFINE, DrawnItem, Media, Variant, draw_bytes

IMAGE_TOKEN, START = 95, 2
VISION: dict[str, Any] = {
    "depths": [1, 1],
    "patch_size": [7, 3],
    "patch_stride": [4, 2],
    "patch_padding": [3, 1],
    "patch_prenorm": [False, True],
    "embed_dim": [8, 16],
    "num_heads": [2, 2],
    "num_groups": [2, 4],
    "window_size": 3,
    "drop_path_rate": 0.0,
    "projection_dim": 32,
    "max_position_embeddings": 8,
    "image_size": 24,
}
TEXT: dict[str, Any] = {
    "model_type": "bart",
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "decoder_start_token_id": START,
}


def tiny_config(*, vision: Keys = NO_KEYS, text: Keys = NO_KEYS, is_tied: bool = True) -> Any:
    """Return a config of two stages, two blocks each way; an image is 9 patches."""
    return Florence2Config(
        vision_config={**VISION, **vision},
        text_config={**TEXT, **text},
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=is_tied,
    )


def fill(model: Any, *, is_loud: bool = False) -> None:
    """Fill with random values that depend on names alone.

    `is_loud`: answers change with every input, and rounding grows more from layer to layer.
    """
    inner, last, places = (3.0, 5.0, 2.0) if is_loud else (1.5, 1.5, 1.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = hashlib.sha256(f"0:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "little"))
            value = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or name.endswith("bias"):
                value = 0.1 * value + (1.0 if name.endswith("weight") else 0.0)
            elif "embed" in name:
                value *= places
            elif "shared" not in name:
                is_last = name.endswith(("out_proj.weight", "fc2.weight"))
                value *= (last if is_last else inner) / parameter[0].numel() ** 0.5
            parameter.copy_(value)


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    size = config.vision_config.image_size
    shape = (3, size, size) if isinstance(size, int) else (3, *size)
    tensors = {"pixel_values": draw_bytes(media.seed, shape), "image_affine": AFFINE}
    return DrawnItem(tensors, [IMAGE_TOKEN] * Florence2HostInputs(config).num_image_rows)


class Florence2Family(EncDecFamily):
    """Answers may be loud."""

    def make_reference(self, *, config: Any = None, is_loud: bool = False, **settings: Any) -> Any:
        """Return HF's model, random, whose `generate` never ends a text."""
        model = self.reference_class(config or self.make_config(**settings)).eval()
        fill(model, is_loud=is_loud)
        model.generation_config = GenerationConfig(pad_token_id=1, decoder_start_token_id=START)
        return model


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another text model."""
    if num_heads * head_dim != width:
        raise ValueError(f"{num_heads} heads of {head_dim} are not {width}, as BART's must be")
    heads = {"encoder_attention_heads": num_heads, "decoder_attention_heads": num_heads}
    return {"text": {"d_model": width, **heads}, "vision": {"projection_dim": width}}


LOUD = {"is_loud": True, "text": {"encoder_layers": 1, "decoder_layers": 1}}
TINY = Florence2Family(
    name="florence2",
    model_class=Florence2ForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    served=LOUD,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    start=START,
    word_ids=range(4, 90),
    published_head_dim=64,
    max_embeds={"image": 64},
    max_items=1,
    max_model_len=56,
    variants={
        "plain": Variant({}, 8),
        "loud, one layer": Variant(LOUD, 6),
        "wide images, deeper stages, scaled embeddings, a head of its own": Variant(
            {
                "vision": {
                    "image_size": [20, 37],
                    "depths": [2, 1],
                    "window_size": 2,
                    "qkv_bias": False,
                },
                "text": {"scale_embedding": True},
                "is_tied": False,
            },
            8,
        ),
        "three stages, norms elsewhere, other heads and depths, relu": Variant(
            {
                "vision": {
                    "depths": [1, 0, 1],
                    "patch_size": [5, 2, 3],
                    "patch_stride": [2, 2, 2],
                    "patch_padding": [2, 0, 1],
                    "patch_prenorm": [True, False, True],
                    "embed_dim": [4, 8, 12],
                    "num_heads": [1, 2, 3],
                    "num_groups": [1, 2, 2],
                    "mlp_ratio": 2.5,
                    "activation_function": "gelu_new",
                },
                "text": {
                    "encoder_layers": 1,
                    "decoder_layers": 3,
                    "encoder_attention_heads": 2,
                    "activation_function": "relu",
                },
            },
            9,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


path = partial(golden_path, "florence2")
hf_processor = hf_of(Florence2Processor, CLIPImageProcessorPil, path, num_additional_image_tokens=1)


def write(folder: Path) -> Path:
    """Images of 64 pixels, prompts of 64 tokens; weights that make answers differ."""
    heads = {f"text_config.{side}coder_attention_heads": 4 for side in ("en", "de")}
    layers = {f"text_config.{side}coder_layers": 1 for side in ("en", "de")}
    config = {**heads, **layers, "text_config.max_position_embeddings": 64}
    size = {"height": 64, "width": 64}
    image_processor = {"size": size, "crop_size": size, "image_seq_length": 5}
    settings = {f"image_processor.{key}": value for key, value in image_processor.items()}
    path = edit_golden("florence2", folder, config=config, processor_config=settings)
    return save_weights(path, partial(fill, is_loud=True))


FLORENCE2 = Family(
    name="florence2",
    architecture="Florence2ForConditionalGeneration",
    tiny=TINY,
    path=path,
    write=write,
    needless_files=frozenset({"tokenizer_config.json"}),
    llm_settings={"max_num_seqs": 2, "max_num_batched_tokens": 64},  # it declares its length
    question="<CAPTION>",
    published=Published(
        left_out=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    ),
    rendered="which color",
    with_system=("", ""),
    takes_embeds=False,
    call_hf=partial(call_processor, hf_processor),
    max_images=1,
    extra_kwargs=({}, {"images_kwargs": {"do_normalize": False}}),
    updates_encoder_prompt=True,
)
