"""Make the checkpoints beside this file: HF's tiny ones, and what MaxText makes of them.

`python -m tests.golden_maxtext.make hf FOLDER` writes HF's, with torch.
`python make.py maxtext FOLDER` converts them with MaxText's own `to_maxtext`, in an environment of
its own (MaxText 0.2.5 wants Python 3.12): README.md says which.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

GEMMA3 = {
    "base_num_decoder_layers": 14,
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "head_dim": 8,
    "base_mlp_dim": 24,
    "hidden_size_for_vit": 12,
    "intermediate_size_for_vit": 20,
    "num_hidden_layers_for_vit": 2,
    "num_attention_heads_for_vit": 2,
    "image_size_for_vit": 64,
    "patch_size_for_vit": 4,
    "conv_stride_for_vit": 4,
}
QWEN3_VL = {
    "base_num_decoder_layers": 3,
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "head_dim": 8,
    "base_mlp_dim": 24,
    "mrope_section": [2, 1, 1],
    "hidden_size_for_vit": 16,
    "intermediate_size_for_vit": 20,
    "num_hidden_layers_for_vit": 3,
    "num_attention_heads_for_vit": 2,
    "image_size_for_vit": 16,
    "patch_size_for_vit": 4,
    "out_hidden_size_for_vit": 16,
    "num_position_embeddings_for_vit": 16,
    "deepstack_visual_indexes_for_vit": [0, 1],
}
SIZES = {
    "gemma3": GEMMA3,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_not_fed": {**QWEN3_VL, "deepstack_visual_indexes_for_vit": []},
}
SCANNED = {"gemma3": (True, False), "qwen3_vl": (False,), "qwen3_vl_not_fed": (True,)}
"""MaxText scans no decoder whose first layers a tower feeds."""
VOCAB, MAXTEXT_VOCAB = 72, 64
"""MaxText's Gemma 3 has fewer rows than HF's."""


def text_config(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what both families say of their decoder."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": sizes["base_emb_dim"],
        "intermediate_size": sizes["base_mlp_dim"],
        "num_hidden_layers": sizes["base_num_decoder_layers"],
        "num_attention_heads": sizes["base_num_query_heads"],
        "num_key_value_heads": sizes["base_num_kv_heads"],
        "head_dim": sizes["head_dim"],
        "tie_word_embeddings": True,
    }


def make_hf_config(family: str) -> Any:
    """Return HF's configuration."""
    from transformers import Gemma3Config, Qwen3VLConfig

    sizes = SIZES[family]
    vision = {
        "hidden_size": sizes["hidden_size_for_vit"],
        "intermediate_size": sizes["intermediate_size_for_vit"],
        "patch_size": sizes["patch_size_for_vit"],
    }
    if family == "gemma3":
        vision |= {
            "image_size": sizes["image_size_for_vit"],
            "num_hidden_layers": sizes["num_hidden_layers_for_vit"],
            "num_attention_heads": sizes["num_attention_heads_for_vit"],
            "vision_use_head": False,
        }
        text = text_config(sizes) | {"query_pre_attn_scalar": sizes["head_dim"]}
        config: Any = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=256)
        config.architectures = ["Gemma3ForConditionalGeneration"]
        return config
    vision |= {
        "depth": sizes["num_hidden_layers_for_vit"],
        "num_heads": sizes["num_attention_heads_for_vit"],
        "out_hidden_size": sizes["out_hidden_size_for_vit"],
        "num_position_embeddings": sizes["num_position_embeddings_for_vit"],
        "deepstack_visual_indexes": sizes["deepstack_visual_indexes_for_vit"],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sizes["mrope_section"]}
    text = text_config(sizes) | {"rope_parameters": rope}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


def write_hf(folder: Path) -> None:
    """Write HF's checkpoints of random numbers."""
    import torch
    import transformers
    from safetensors.torch import save_file

    for family in SIZES:
        config = make_hf_config(family)
        torch.manual_seed(0)
        model = getattr(transformers, config.architectures[0])(config)
        config.save_pretrained(folder / family)
        tensors = {
            # As MaxText's table of names has them.
            name.replace("vision_tower.", "vision_tower.vision_model.")
            if "vision_model" not in name
            else name: torch.randn_like(tensor) * 0.3
            for name, tensor in model.state_dict().items()
            if "lm_head" not in name
        }
        save_file(tensors, folder / family / "model.safetensors", metadata={"format": "pt"})


def make_settings(name: str, sizes: dict[str, Any], vocab: int, is_scanned: bool) -> dict[str, Any]:
    """Return MaxText's settings."""
    return sizes | {
        "vocab_size": vocab,
        "model_name": name,
        "override_model_config": True,
        "run_name": "tiny",
        "scan_layers": is_scanned,
        "use_multimodal": True,
        "weight_dtype": "float32",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
    }


def write_maxtext(folder: Path) -> None:
    """Convert each of them, with layers scanned and not."""
    from maxtext.checkpoint_conversion import to_maxtext
    from maxtext.multimodal import processor_gemma3
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR
    from safetensors.numpy import load_file
    from transformers import AutoConfig

    # The pictures of its first, empty call, which finds the shapes.
    processor_gemma3.GEMMA_DEFAULT_IMAGE_SIZE = GEMMA3["image_size_for_vit"]
    # Its own reader wants torch.
    to_maxtext.load_hf_dict_from_safetensors = lambda path, **_: load_file(
        Path(path) / "model.safetensors"
    )
    for family, sizes in SIZES.items():
        source = folder / family
        name = "gemma3-4b" if family == "gemma3" else "qwen3-vl-2b"
        to_maxtext.HF_MODEL_CONFIGS[name] = AutoConfig.from_pretrained(source)
        vocab = MAXTEXT_VOCAB if family == "gemma3" else VOCAB
        for is_scanned in SCANNED[family]:
            out = source / ("scanned" if is_scanned else "unscanned")
            shutil.rmtree(out, ignore_errors=True)
            settings = make_settings(name, sizes, vocab, is_scanned) | {
                "base_output_directory": out
            }
            to_maxtext.main(
                [
                    "to_maxtext",
                    f"{MAXTEXT_CONFIGS_DIR}/base.yml",
                    *(
                        f"{k}={json.dumps(v, default=str)}".replace('"', "")
                        for k, v in settings.items()
                    ),
                ],
                lazy_load_tensors=False,
                hf_model_path=str(source),
                save_dtype="float32",
                simulated_cpu_devices_count=1,
            )


if __name__ == "__main__":
    {"hf": write_hf, "maxtext": write_maxtext}[sys.argv[1]](Path(sys.argv[2]))
