"""Random adapters as PEFT writes them, and PEFT's own models with them."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from peft import LoraConfig

TEXT = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""The linear layers of a decoder of Llama's names."""
TOWERS = (
    r".*(vision_tower|visual|multi_modal_projector|vision_model).*\."
    r"(q_proj|k_proj|v_proj|out_proj|projection_layer|fc1|fc2|qkv|proj|linear_1|linear_2|mlp\.0"
    r"|mlp\.2)"
)
"""Those of towers and connectors; a convolution of the same name must be left out."""


class TinyAdapter(NamedTuple):
    """A random adapter."""

    path: Path
    reference: Any
    """HF's model, with PEFT's layers in it."""


def make_adapter(reference: Any, path: Path, *, seed: int = 0, **settings: Any) -> TinyAdapter:
    """Write a random adapter of HF's model, loud enough to change its answers.

    `settings`: PEFT's, of `LoraConfig`.
    """
    own = {"r": 8, "lora_alpha": 16, "target_modules": TEXT, **settings}
    model = peft.get_peft_model(copy.deepcopy(reference), LoraConfig(**own))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or (parameter.requires_grad and name.endswith("bias")):
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(draw * 0.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(str(path))
    base: Any = model.base_model
    return TinyAdapter(path, base.model.eval())
