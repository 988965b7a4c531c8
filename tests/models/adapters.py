"""Random adapters as PEFT writes them, and PEFT's own models with them."""

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from peft import LoraConfig

from mmjax.weights.rules import apply_rules
from tests.families.tiny import TinyModel

TEXT, TOWERS, EMBEDDINGS, HEAD = "text", "towers", "embeddings", "head"
"""Parts of a model: linear layers of its decoder, those of towers and connectors, and both ends."""


class TinyAdapter(NamedTuple):
    """A random adapter."""

    path: Path
    reference: Any
    """HF's model, with PEFT's layers in it."""


_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Where a model has experts, PEFT takes layers of these names, in towers too, for theirs."""


def find_layers(model: TinyModel, parts: Collection[str]) -> list[str]:
    """Return HF's names of the layers of some parts; those that mmjax does not load among them."""
    modules = dict(model.reference.named_modules())
    has_experts = any(type(module).__name__.endswith("Experts") for module in modules.values())
    return [
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        and _find_part(name, module, model) in parts
        and not (has_experts and name.endswith(_OF_EXPERTS))
        # Of Llama 4 one gives scores beside logits, which PEFT does not, and one is a convolution's
        # kernel here, whose adapters are refused.
        and not name.endswith((".router", ".patch_embedding.linear"))
    ]


def _find_part(name: str, module: torch.nn.Module, model: TinyModel) -> str | None:
    mapped = apply_rules(f"{name}.weight", model.rules) or ""
    if name.endswith("lm_head"):
        return HEAD
    if mapped.partition(".")[0] in model.family.model_class.unadapted:
        return None
    if isinstance(module, torch.nn.Embedding):
        return EMBEDDINGS if mapped == "language_model.embed_tokens.weight" else None
    return TEXT if mapped.startswith("language_model.") else TOWERS


def make_adapter(
    model: TinyModel,
    path: Path,
    *,
    parts: Collection[str] = (TEXT,),
    seed: int = 0,
    **settings: Any,
) -> TinyAdapter:
    """Write a random adapter of HF's model, loud enough to change its answers.

    `parts`: those that it adapts; `settings`: PEFT's, of `LoraConfig`.
    """
    own = {"r": 8, "lora_alpha": 16, "target_modules": find_layers(model, parts)}
    settings = {**own, **settings}
    copied = copy.deepcopy(model.reference)
    model.family.mend(copied)  # what mends the other calls the other's modules
    adapted = peft.get_peft_model(copied, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or (parameter.requires_grad and name.endswith("bias")):
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(draw * 0.5 / parameter.shape[-1] ** 0.5)
    adapted.save_pretrained(str(path))
    base: Any = adapted.base_model
    return TinyAdapter(path, base.model.eval())
