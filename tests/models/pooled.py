"""What tests of vectors share: HF's states of a prompt."""

from inspect import signature
from typing import Any

import numpy as np
import torch

from tests.families.family import Family, HFInputs


def as_torch(reference: Any, hf: HFInputs) -> dict[str, Any]:
    """Return what HF's processor gives, of it what HF's model takes: a batch of one."""
    known = signature(reference.forward).parameters.keys() | {"token_type_ids"}
    ids = torch.tensor(hf.input_ids)[None]
    tensors = {name: torch.as_tensor(np.asarray(one)) for name, one in hf.tensors.items()}
    given = {name: one for name, one in tensors.items() if name in known}
    return {**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def last_states(reference: Any, family: Family, prompt: str, images: list[Any]) -> np.ndarray:
    """Return float32[T, D]: HF's states of a prompt behind the final norm."""
    inputs = as_torch(reference, family.call_hf(prompt, images, {}))
    with torch.no_grad():
        found = reference(**inputs, output_hidden_states=True)
    return found.hidden_states[-1][0].numpy()


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Return vectors of length 1."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
