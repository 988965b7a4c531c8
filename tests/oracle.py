"""What parity tests share: HF's models of tiny random configs, and their weights in our trees."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from mmjax.layers.module import Params, flatten_params, unflatten_params
from mmjax.parity.compare import align
from mmjax.weights.rules import Place, RuleTypes, map_tensor
from tests.kit import fill_by_name

TOLERANCE = 2e-5
"""What tiny models reach in float32; the promise is 1e-4."""


def params_of(
    model: torch.nn.Module, abstract: Params, rules: Sequence[RuleTypes]
) -> dict[Any, Any]:
    """Return the torch model's weights as our tree: every tensor used, none left over."""
    return params_of_tensors(model.state_dict(), abstract, rules)


def params_of_tensors(
    tensors: Mapping[str, torch.Tensor],
    abstract: Params,
    rules: Sequence[RuleTypes],
    shared: Sequence[str] = (),
) -> dict[Any, Any]:
    """Return tensors as our tree, all of it but what begins with the `shared` names."""
    expected = flatten_params(abstract)
    leaves = {}
    for name, tensor in tensors.items():
        for mapped, part in map_tensor(name, rules):
            if mapped.endswith("lm_head.weight") and mapped not in expected:
                continue
            assert not isinstance(part, Place), "HF keeps no experts apart"
            array = tensor.detach().numpy()
            array = array if part is None else part.apply(array)
            # What is tied has two names.
            assert mapped not in leaves or np.array_equal(leaves[mapped], array), name
            assert array.shape == expected[mapped].shape, name
            leaves[mapped] = jnp.asarray(array)
    assert leaves.keys() == {name for name in expected if not name.startswith(tuple(shared))}
    return unflatten_params(leaves)


def assert_close(
    ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], atol: float = TOLERANCE
) -> None:
    """Compare by name; say how far every name is apart if one is too far."""
    assert ours.keys() >= reference.keys(), reference.keys() - ours.keys()
    far = {
        name: float(np.abs(align(ours[name], value) - value).max())
        for name, value in reference.items()
    }
    scale = {name: max(1.0, float(np.abs(value).max())) for name, value in reference.items()}
    assert all(far[name] <= atol * scale[name] for name in far), far


def fill_with_unit_norms(model: torch.nn.Module, seed: int = 0, *, sharpness: float = 1.0) -> None:
    """Fill a torch model as `fill_by_name` does, norms near 1 where their weight is not centred.

    `sharpness` multiplies what makes queries and keys: above 1, answers settle less on one token.
    """
    fill_by_name(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if sharpness != 1.0 and re.search(r"qkv|q_proj|k_proj|query_key_value", name):
                parameter *= sharpness
    for module in model.modules():
        name = type(module).__name__
        weight = getattr(module, "weight", None)
        is_norm = name.endswith("Norm") and not name.startswith("Gemma")
        if is_norm and isinstance(weight, torch.Tensor) and weight.mean() < 0.5:
            with torch.no_grad():
                weight += 1.0
