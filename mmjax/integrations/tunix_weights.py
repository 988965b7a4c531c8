"""Weights of Tunix's own models, Gemma 3, Qwen 2 and Qwen 3, under the tree's names.

Tunix keeps projections by heads and as `[in, out]`; the tree has HF's matrices, `[out, in]`. They
are turned where they lie: nothing goes through the host. Knows nothing of Tunix's classes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Shaped

from mmjax.errors import CheckpointError
from mmjax.layers.module import flatten_params

_Change = Callable[[Any], Sequence[Any]]
"""One array of Tunix's -> the tree's, one for each name."""


def _keep(x: Shaped[Array, "..."]) -> list[Shaped[Array, "..."]]:
    return [x]


def _transpose(x: Shaped[Array, "... W Z"]) -> list[Shaped[Array, "... Z W"]]:
    return [jnp.swapaxes(x, -1, -2)]


def _heads_first(x: Shaped[Array, "N D H"]) -> list[Shaped[Array, "NH D"]]:
    return [jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1])]


def _heads_second(x: Shaped[Array, "D N H"]) -> list[Shaped[Array, "NH D"]]:
    return [x.reshape(len(x), -1).T]


def _heads_in(x: Shaped[Array, "N H D"]) -> list[Shaped[Array, "D NH"]]:
    return [x.reshape(-1, x.shape[2]).T]


def _each_heads_first(x: Shaped[Array, "C N D H"]) -> list[Shaped[Array, "NH D"]]:
    return [matrix for part in x for matrix in _heads_first(part)]


_LAYER = r"^(layers\.\d+)\."
_QKV = [rf"\1.self_attn.{name}_proj.weight" for name in "qkv"]

_RULES: Sequence[tuple[str, Sequence[str], _Change]] = (
    (r"^embedder\.input_embedding$", ["embed_tokens.weight"], _keep),
    (r"^lm_head\.w$", ["lm_head.weight"], _transpose),
    (r"^final_norm\.(?:scale|w)$", ["norm.weight"], _keep),
    # Gemma 3's attention
    (rf"{_LAYER}attn\.q_einsum\.w$", _QKV[:1], _heads_first),
    (rf"{_LAYER}attn\.kv_einsum\.w$", _QKV[1:], _each_heads_first),
    (rf"{_LAYER}attn\.qkv_einsum\.w$", _QKV, _each_heads_first),
    (rf"{_LAYER}attn\.attn_vec_einsum\.w$", [r"\1.self_attn.o_proj.weight"], _heads_in),
    (rf"{_LAYER}attn\._query_norm\.scale$", [r"\1.self_attn.q_norm.weight"], _keep),
    (rf"{_LAYER}attn\._key_norm\.scale$", [r"\1.self_attn.k_norm.weight"], _keep),
    # Qwen's
    (rf"{_LAYER}attn\.([qkv])_proj\.w$", [r"\1.self_attn.\2_proj.weight"], _heads_second),
    (rf"{_LAYER}attn\.([qkv])_bias$", [r"\1.self_attn.\2_proj.bias"], _keep),
    (rf"{_LAYER}attn\.o_proj\.w$", [r"\1.self_attn.o_proj.weight"], _heads_in),
    (rf"{_LAYER}attn\.([qk]_norm)\.w$", [r"\1.self_attn.\2.weight"], _keep),
    # Both models' MLP; a mixture's experts are stacks
    (rf"{_LAYER}mlp\.(gate|up|down)_proj\.kernel$", [r"\1.mlp.\2_proj.weight"], _transpose),
    (rf"{_LAYER}mlp\.router\.kernel$", [r"\1.mlp.gate.weight"], _transpose),
    (rf"{_LAYER}mlp\.(gate|up|down)_proj$", [r"\1.mlp.experts.\2_proj"], _transpose),
    # Norms around them
    (rf"{_LAYER}pre_attention_norm\.scale$", [r"\1.input_layernorm.weight"], _keep),
    (rf"{_LAYER}post_attention_norm\.scale$", [r"\1.post_attention_layernorm.weight"], _keep),
    (rf"{_LAYER}pre_ffw_norm\.scale$", [r"\1.pre_feedforward_layernorm.weight"], _keep),
    (rf"{_LAYER}post_ffw_norm\.scale$", [r"\1.post_feedforward_layernorm.weight"], _keep),
    (rf"{_LAYER}((?:input|post_attention)_layernorm)\.w$", [r"\1.\2.weight"], _keep),
)
"""What of Tunix's models is called how under `language_model`."""


def map_tunix_params(params: Any) -> dict[str, Array]:
    """Return the language model's weights by the tree's names.

    Args:
        params: What `nnx.state` gives of one of Tunix's models, or of some of its parameters; or a
            nested mapping of arrays.

    Raises:
        CheckpointError: For names that no rule knows; lists them.
    """
    leaves = flatten_params(nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params)
    unknown = [name for name in leaves if _find_rule(name) is None]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} weights have names that no model of Tunix has which mmjax knows "
            f"({', '.join(unknown[:3])}, ...); give a function that names them, `map_params`"
        )
    return _map(leaves)


def _find_rule(name: str) -> tuple[list[str], _Change] | None:
    for pattern, replacements, change in _RULES:
        if re.search(pattern, name):
            return [re.sub(pattern, one, name) for one in replacements], change
    return None


@jax.jit
def _map(leaves: Mapping[str, Array]) -> dict[str, Array]:
    mapped: dict[str, Array] = {}
    for name, leaf in leaves.items():
        found = _find_rule(name)
        assert found is not None, "checked before"
        names, change = found
        own = (f"language_model.{one}" for one in names)
        mapped.update(zip(own, change(leaf), strict=True))
    return mapped
