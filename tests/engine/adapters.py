"""Random adapters of the tiny Gemma 3, in files as PEFT writes them, without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.engine.tiny import tiny_config

PREFIX = "base_model.model.model."


def text_layers(config: Any = None) -> dict[str, tuple[int, int]]:
    """Return a decoder's linear layers by their published names, each with (out, in)."""
    text: Any = (config or tiny_config()).text_config
    width, inner, heads = text.hidden_size, text.intermediate_size, text.head_dim
    shapes = {
        "self_attn.q_proj": (text.num_attention_heads * heads, width),
        "self_attn.v_proj": (text.num_key_value_heads * heads, width),
        "self_attn.o_proj": (width, text.num_attention_heads * heads),
        "mlp.down_proj": (width, inner),
    }
    return {
        f"language_model.layers.{number}.{name}": shape
        for number in range(text.num_hidden_layers)
        for name, shape in shapes.items()
    }


def tower_layers() -> dict[str, tuple[int, int]]:
    """Return some of the tower's."""
    vision: Any = tiny_config().vision_config
    width = vision.hidden_size
    layer = "vision_tower.encoder.layers.0.self_attn"
    return {f"{layer}.{name}": (width, width) for name in ("q_proj", "v_proj", "out_proj")}


def make_tensors(
    seed: int, rank: int = 4, layers: dict[str, tuple[int, int]] | None = None
) -> dict[str, np.ndarray]:
    """Return the tensors of a random adapter, by their names in its file."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (rows, columns) in (layers or text_layers()).items():
        a = rng.standard_normal((rank, columns)) / np.sqrt(columns)
        b = rng.standard_normal((rows, rank)) / np.sqrt(rank)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def write_adapter(
    path: Path,
    seed: int = 0,
    rank: int = 4,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """Write a random adapter, loud enough to change every answer; return its directory."""
    path.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    (path / "adapter_config.json").write_text(json.dumps(values))
    own = make_tensors(seed, rank) if tensors is None else tensors
    save_file(own, str(path / "adapter_model.safetensors"))
    return path
