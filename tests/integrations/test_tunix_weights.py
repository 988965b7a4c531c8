"""Weights in Tunix's layout become those that the tree has of HF's checkpoint, to the last bit.

Tunix's layout is made here as its loaders make it (tunix/models/*/params*.py).
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax.errors import CheckpointError
from mmjax.integrations.tunix_weights import map_tunix_params
from mmjax.layers.module import unflatten_params

WIDTH, INNER, HEAD, VOCAB, LAYERS, EXPERTS = 12, 20, 4, 30, 2, 3
HEADS = {"q": 6, "k": 2, "v": 2}

Names = dict[str, np.ndarray]


def make_hf(seed: int, shapes: dict[str, tuple[int, ...]]) -> Names:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def attention(heads: dict[str, int]) -> dict[str, tuple[int, ...]]:
    shapes = {f"self_attn.{name}_proj.weight": (n * HEAD, WIDTH) for name, n in heads.items()}
    return {**shapes, "self_attn.o_proj.weight": (WIDTH, heads["q"] * HEAD)}


def mlp() -> dict[str, tuple[int, ...]]:
    shapes = {f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
    return {**shapes, "mlp.down_proj.weight": (WIDTH, INNER)}


def norms(*names: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}_layernorm.weight": (WIDTH,) for name in names}


def whole(layer: dict[str, tuple[int, ...]], *, has_head: bool) -> Names:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, WIDTH),
        "norm.weight": (WIDTH,),
    }
    shapes |= {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    return make_hf(1, shapes | ({"lm_head.weight": (VOCAB, WIDTH)} if has_head else {}))


def gemma3(heads: dict[str, int]) -> tuple[Names, Names]:
    own = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    qk = {f"self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
    hf = whole(attention(heads) | qk | mlp() | norms(*own), has_head=False)
    theirs = {"embedder.input_embedding": hf["embed_tokens.weight"]}
    theirs["final_norm.scale"] = hf["norm.weight"]
    for n in range(LAYERS):
        layer, end = f"layers.{n}", f"layers.{n}.attn"
        parts = [
            hf[f"{layer}.self_attn.{name}_proj.weight"].T.reshape(WIDTH, heads[name], HEAD)
            for name in "qkv"
        ]
        q, k, v = (part.transpose(1, 0, 2) for part in parts)
        if heads["q"] == heads["k"]:
            theirs[f"{end}.qkv_einsum.w"] = np.stack([q, k, v])
        else:
            theirs[f"{end}.q_einsum.w"] = q
            theirs[f"{end}.kv_einsum.w"] = np.stack([k, v])
        out = hf[f"{layer}.self_attn.o_proj.weight"].T
        theirs[f"{end}.attn_vec_einsum.w"] = out.reshape(heads["q"], HEAD, WIDTH)
        theirs[f"{end}._query_norm.scale"] = hf[f"{layer}.self_attn.q_norm.weight"]
        theirs[f"{end}._key_norm.scale"] = hf[f"{layer}.self_attn.k_norm.weight"]
        for name in ("gate", "up", "down"):
            theirs[f"{layer}.mlp.{name}_proj.kernel"] = hf[f"{layer}.mlp.{name}_proj.weight"].T
        for name, old in zip(
            own, ("pre_attention", "post_attention", "pre_ffw", "post_ffw"), strict=True
        ):
            theirs[f"{layer}.{old}_norm.scale"] = hf[f"{layer}.{name}_layernorm.weight"]
    return hf, theirs


QWEN: list[tuple[str, str, Callable[[np.ndarray], np.ndarray]]] = [
    (r"^embed_tokens\.weight", "embedder.input_embedding", lambda x: x),
    (r"^norm\.weight", "final_norm.w", lambda x: x),
    (r"^lm_head\.weight", "lm_head.w", lambda x: x.T),
    (r"self_attn\.([qkv])_proj\.bias", r"attn.\1_bias", lambda x: x),
    (r"self_attn\.([qkv]_proj)\.weight", r"attn.\1.w", lambda x: x.T.reshape(WIDTH, -1, HEAD)),
    (r"self_attn\.o_proj\.weight", "attn.o_proj.w", lambda x: x.T.reshape(-1, HEAD, WIDTH)),
    (r"self_attn\.([qk]_norm)\.weight", r"attn.\1.w", lambda x: x),
    (r"mlp\.gate\.weight", "mlp.router.kernel", lambda x: x.T),
    (r"mlp\.experts\.(\w+)$", r"mlp.\1", lambda x: x.swapaxes(1, 2)),
    (r"_proj\.weight", "_proj.kernel", lambda x: x.T),
    (r"_layernorm\.weight", "_layernorm.w", lambda x: x),
]
"""What Qwen's matrices are called, and how they lie."""


def qwen(*, has_biases: bool = False, has_experts: bool = False) -> tuple[Names, Names]:
    own = attention(HEADS) | norms("input", "post_attention")
    if has_biases:
        own |= {f"self_attn.{name}_proj.bias": (n * HEAD,) for name, n in HEADS.items()}
    else:
        own |= {f"self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
    if has_experts:
        own |= {
            "mlp.gate.weight": (EXPERTS, WIDTH),
            "mlp.experts.down_proj": (EXPERTS, WIDTH, INNER),
        }
        own |= {f"mlp.experts.{name}_proj": (EXPERTS, INNER, WIDTH) for name in ("gate", "up")}
    else:
        own |= mlp()
    hf = whole(own, has_head=True)
    theirs: Names = {}
    for name, tensor in hf.items():
        pattern, new, turn = next(row for row in QWEN if re.search(row[0], name))
        theirs[re.sub(pattern, new, name)] = turn(tensor)
    return hf, theirs


MODELS = {
    "gemma3": gemma3(HEADS),
    "gemma3, as many key heads": gemma3({"q": 6, "k": 6, "v": 6}),
    "qwen2": qwen(has_biases=True),
    "qwen3": qwen(),
    "qwen3 moe": qwen(has_experts=True),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_tree_gets_the_checkpoints_weights(model: str) -> None:
    hf, theirs = MODELS[model]
    assert theirs.keys().isdisjoint(hf)
    tree = jax.tree.map(jnp.asarray, unflatten_params(theirs))
    found = map_tunix_params(tree)
    assert found.keys() == {f"language_model.{name}" for name in hf}
    for name, tensor in hf.items():
        np.testing.assert_array_equal(found[f"language_model.{name}"], tensor)


def test_a_state_of_some_weights_is_mapped_where_it_lies() -> None:
    """Tunix forbids transfers through the host while weights are written."""
    _, theirs = MODELS["qwen2"]
    device = jax.devices()[1]
    some = {name: leaf for name, leaf in theirs.items() if name.startswith("layers.1.")}
    tree = jax.device_put(unflatten_params(some), device)
    state = nnx.State(jax.tree.map(nnx.Param, tree))
    with jax.transfer_guard("disallow_explicit"):
        found = map_tunix_params(state)
    assert {name.split(".")[2] for name in found} == {"1"}
    assert {one for leaf in found.values() for one in leaf.devices()} == {device}


def test_names_of_another_model_are_refused() -> None:
    tree: dict[str, Any] = {"layers": {0: {"attn": {"rotary": jnp.ones(2)}}}}
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.rotary.*`map_params`"):
        map_tunix_params(tree)
