"""Linear layers with weights in 8 bits: a scale for each output channel.

As "vector-wise" quantisation in LLM.int8() (arXiv 2208.07339, section 3.1), without its outliers.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int8

from mmjax.config.engine_config import Quantization
from mmjax.layers.cpu.product import integer_product, widened_product
from mmjax.layers.linear import Linear
from mmjax.layers.module import Params, flatten_params, unflatten_params

MAX_INT8 = 127
_LEAST_SCALE = np.finfo(np.float32).tiny
"""The scale of rows of zeros, or of numbers so small that a quotient by theirs would overflow."""
_SCALE = "_scale"
"""What the name of a parameter's scales has behind the parameter's own."""


class Int8Linear(nnx.Module):
    """A `Linear` whose weights are rounded to multiples of `weight_scale[out]`."""

    def __init__(self, linear: Linear, quantization: Quantization) -> None:
        """Take the shapes and the bias of `linear`."""
        shape = linear.weight.shape
        self.weight = nnx.Param(jnp.zeros(shape, jnp.int8))
        self.weight_scale = nnx.Param(jnp.zeros(shape[0], jnp.float32))
        self.bias = linear.bias
        self.lora = linear.lora
        self.rounds_inputs = quantization == "int8"

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
        """Project the last axis."""
        flat, weight, scale = x.reshape(-1, x.shape[-1]), self.weight[...], self.weight_scale[...]
        multiply = _by_rounded_inputs if self.rounds_inputs else widened_product
        out = (multiply(flat, weight) * scale[None, :]).astype(x.dtype)
        if self.bias is not None:
            out = out + self.bias[...][None, :]
        out = out.reshape(*x.shape[:-1], len(weight))
        return out if self.lora is None else out + self.lora(x)


def _by_rounded_inputs(x: Float[Array, "T D"], weight: Int8[Array, "F D"]) -> Float[Array, "T F"]:
    """Multiply in 8 bits and add in 32: exact, in whatever order a device adds."""
    wide = x.astype(jnp.float32)
    peak = jnp.abs(wide).max(-1, keepdims=True)
    step = jnp.maximum(peak / MAX_INT8, _LEAST_SCALE)
    rounded = jnp.round(wide / step).astype(jnp.int8)
    return integer_product(rounded, weight).astype(jnp.float32) * step


def quantize_linears(model: Any, quantization: Quantization) -> None:
    """Replace every `Linear` of the language model; embeddings, head and experts stay.

    Towers and connectors stay, too: they are small beside the language model.
    """
    for _, module in list(nnx.iter_modules(model.language_model)):
        for name, child in list(vars(module).items()):
            if type(child) is Linear:
                setattr(module, name, Int8Linear(child, quantization))


def quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix of the host `[F, D]` as int8, and the float32 scale of each row `[F]`.

    Numbers are rounded to the nearest multiple; the largest of a row is 127 times its scale.
    """
    wide = np.asarray(weight, np.float32)
    scale = np.maximum(np.abs(wide).max(axis=1, initial=0.0) / MAX_INT8, _LEAST_SCALE)
    return np.rint(wide / scale[:, None]).astype(np.int8), scale


def find_quantized(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return `{name of a quantised parameter: name of its scales}` of a flat tree."""
    names = ((name.removesuffix(_SCALE), name) for name in leaves if name.endswith(_SCALE))
    return {name: scales for name, scales in names if name in leaves}


def quantize_params(params: Params, abstract_params: Params) -> Params:
    """Return `params` with the weights that `abstract_params` has in 8 bits quantised."""
    leaves = flatten_params(params)
    for name, scales in find_quantized(flatten_params(abstract_params)).items():
        if leaves[name].dtype != jnp.int8:
            leaves[name], leaves[scales] = quantize_rows(np.asarray(leaves[name]))
    return unflatten_params(leaves)
