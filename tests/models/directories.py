"""A tiny checkpoint directory of every row of the registry: the golden files, random weights.

As the hub or `save_pretrained` lays them out. Decoders have four heads, so that four devices may
share them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from tests.kit import tiny_gemma3_checkpoint
from tests.models.families.blip2 import BLIP2
from tests.models.families.florence2 import fill as fill_florence2
from tests.models.families.qwen2_vl import QWEN2_VL
from tests.models.golden_models import GOLDEN_MODELS
from tests.models.original_internvl import original_config, to_original
from tests.oracle import fill_with_unit_norms
from tests.processing.families.family import edit_golden
from tests.processing.families.llava import write_pixtral

HEADS = {"text_config.num_attention_heads": 4, "text_config.num_key_value_heads": 4}
QWEN2_5: Mapping[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config.model_type": "qwen2_5_vl_text",
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}
MROPE = {"text_config.rope_parameters.mrope_section": [2, 3, 3]}
"""Of heads half as wide as the golden ones."""


def make_random(path: Path, fill: Callable[[Any], object] = fill_with_unit_norms) -> Any:
    """Return HF's model of a directory with random weights."""
    config: Any = AutoConfig.from_pretrained(path)
    model = getattr(transformers, config.architectures[0])(config).eval()
    fill(model)
    return model


def save_weights(path: Path, fill: Callable[[Any], object] = fill_with_unit_norms) -> Path:
    """Write them as `save_pretrained` does, beside the other files as they are; return `path`."""
    others = {file: file.read_bytes() for file in path.glob("*.json")}
    make_random(path, fill).save_pretrained(path)
    for file, content in others.items():
        file.write_bytes(content)
    return path


def write_gemma3(folder: Path) -> Path:
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return tiny_gemma3_checkpoint(folder / "gemma3", text={**text, "num_hidden_layers": 6})


def write_llava(folder: Path) -> Path:
    return save_weights(edit_golden("llava", folder, config={**HEADS, "text_config.head_dim": 16}))


def write_pixtral_weights(folder: Path) -> Path:
    return save_weights(write_pixtral(folder, **HEADS, **{"text_config.head_dim": 16}))


def write_blip2(folder: Path) -> Path:
    heads = {"text_config.num_attention_heads": 4}
    return save_weights(edit_golden("blip2", folder, config=heads), BLIP2.fill)


def write_chameleon(folder: Path) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return save_weights(edit_golden("chameleon", folder, config=heads))


def write_qwen2_vl(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    config = {**HEADS, **MROPE, **(changes or {})}
    return save_weights(edit_golden("qwen2_vl", folder, config=config), QWEN2_VL.fill)


def write_florence2(folder: Path) -> Path:
    """Images of 64 pixels, prompts of 64 tokens; weights that make answers differ."""
    heads = {f"text_config.{side}coder_attention_heads": 4 for side in ("en", "de")}
    layers = {f"text_config.{side}coder_layers": 1 for side in ("en", "de")}
    config = {**heads, **layers, "text_config.max_position_embeddings": 64}
    size = {"height": 64, "width": 64}
    image_processor = {"size": size, "crop_size": size, "image_seq_length": 5}
    settings = {f"image_processor.{key}": value for key, value in image_processor.items()}
    path = edit_golden("florence2", folder, config=config, processor_config=settings)
    return save_weights(path, partial(fill_florence2, is_loud=True))


def write_fuyu(folder: Path) -> Path:
    heads = {"num_attention_heads": 4, "text_config.num_attention_heads": 4}
    return save_weights(edit_golden("fuyu", folder, config=heads))


def write_internvl(folder: Path) -> Path:
    heads = {"text_config.num_attention_heads": 4}
    return save_weights(edit_golden("internvl", folder, config=heads))


def write_internvl_original(folder: Path) -> Path:
    """The weights of `write_internvl` in the original layout, without a chat template."""
    source = write_internvl(folder / "source")
    path = folder / "original"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    tokenizer.chat_template = None
    tokenizer.save_pretrained(path)
    reference = make_random(source)
    tiles = {"dynamic_image_size": True, "max_dynamic_patch": 6, "use_thumbnail": True}
    original_config(reference.config, path, **tiles)
    tensors = to_original(reference.config, reference.state_dict(), is_internlm2=False)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path / "model.safetensors")
    return path


def write_molmo(folder: Path) -> Path:
    """The published numbers' weights, cut into other heads."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    return edit_golden("molmo", folder, config=heads)


def write_deepseek_vl2(folder: Path) -> Path:
    return Path(copytree(GOLDEN_MODELS / "deepseek_vl2_base", folder / "deepseek_vl2"))


def write_qwen_vl(folder: Path) -> Path:
    return Path(copytree(GOLDEN_MODELS / "qwen_vl_chat", folder / "qwen_vl"))


DIRECTORIES: Mapping[str, Callable[[Path], Path]] = {
    "Blip2ForConditionalGeneration": write_blip2,
    "ChameleonForConditionalGeneration": write_chameleon,
    "DeepseekVLV2ForCausalLM": write_deepseek_vl2,
    "Florence2ForConditionalGeneration": write_florence2,
    "FuyuForCausalLM": write_fuyu,
    "Gemma3ForConditionalGeneration": write_gemma3,
    "InternVLChatModel": write_internvl_original,
    "InternVLForConditionalGeneration": write_internvl,
    "LlavaForConditionalGeneration": write_llava,
    "PixtralForConditionalGeneration": write_pixtral_weights,
    "MolmoForCausalLM": write_molmo,
    "QWenLMHeadModel": write_qwen_vl,
    "Qwen2VLForConditionalGeneration": write_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": partial(write_qwen2_vl, changes=QWEN2_5),
}
"""Each writes into an empty folder, and returns the directory."""


def takes_one_image(name: str) -> bool:
    """Return whether a prompt of this model holds one image at most."""
    return name.startswith(("Blip2", "Florence2", "Fuyu", "Molmo"))


def small_settings(name: str) -> dict[str, Any]:
    """Return settings of `LLM` under which few programs are compiled.

    Two images fit, also of the families whose images are long; Florence-2's own length is shorter.
    """
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    return settings if name.startswith("Florence2") else {**settings, "max_model_len": 1024}


def choose_question(name: str) -> str:
    """Return a text that this model takes beside an image."""
    return "<CAPTION>" if name.startswith("Florence2") else "what color is the circle"
