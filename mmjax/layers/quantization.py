"""Linear layers and heads with weights in 8 bits, a scale for each output, or in 4, by groups.

In 8 bits as "vector-wise" quantisation in LLM.int8() (arXiv 2208.07339, section 3.1), without its
outliers.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int8

from mmjax.config.engine_config import Quantization
from mmjax.layers.cpu.groups import (
    SCALE,
    Layout,
    find_grouped,
    grouped_product,
    pack_nibbles,
    set_grouped,
)
from mmjax.layers.cpu.product import MAX_FEW_ROWS, integer_product, widened_logits, widened_product
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.module import Params, flatten_params, unflatten_params
from mmjax.layers.moe import Experts
from mmjax.layers.tpu.rows import read_rows
from mmjax.rounding import LEAST_SCALE, MAX_INT8, quantize_rows

INT4 = Layout(code="uint4", group_size=32, scale_dtype="bfloat16")
"""What `--quantization int4` makes of float weights."""

_INT4_PEAKS = (-9.0, -8.25, -7.5)
"""What a group's largest number may be in its scale: the first is cut to -8, for the others' sake.
Three are two percent nearer to normally distributed weights than -8 alone (docs/notes/log.md)."""
_MANY_ROWS = 64
"""Rows of logits from which on a head is made wide before it is multiplied; up to them it is read
for each of the kernels' 16 rows."""
_BLOCK = 256
"""Rows that are quantised at a time."""

Layouts = Mapping[str, "Layout | Quantization"]
"""Name of a matrix in the tree -> how a checkpoint has it that is quantised already: in groups, or
as `Int8Linear` has it."""


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
    step = jnp.maximum(peak / MAX_INT8, LEAST_SCALE)
    rounded = jnp.round(wide / step).astype(jnp.int8)
    return integer_product(rounded, weight).astype(jnp.float32) * step


class PackedLinear(nnx.Module):
    """A `Linear` whose weights stay in groups of 4 or 8 bits, and are multiplied so."""

    def __init__(self, linear: Linear, layout: Layout) -> None:
        """Take the shapes and the bias of `linear`."""
        self.out_features, self.in_features = linear.weight.shape
        set_grouped(self, "weight", layout, linear.weight.shape)
        self.bias = linear.bias
        self.lora = linear.lora
        self.layout = layout

    def describe_whole(self) -> jax.ShapeDtypeStruct:
        """Return the shape of the matrix that its arrays stand for."""
        return jax.ShapeDtypeStruct((self.out_features, self.in_features), jnp.float32)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
        """Project the last axis."""
        weight = find_grouped(self, "weight", self.layout)
        out = grouped_product(x.reshape(-1, x.shape[-1]), weight)
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)[None, :]
        out = out.astype(x.dtype).reshape(*x.shape[:-1], self.out_features)
        return out if self.lora is None else out + self.lora(x)


class Int8Embed(Embed):
    """An `Embed` whose rows are rounded to multiples of `weight_scale[V]`.

    Logits are of inputs as they are: what is rounded there decides between tokens.
    """

    def __init__(self, embed: Embed) -> None:
        """Take the shapes and the dtype of `embed`."""
        super().__init__(1, 1, dtype=embed.dtype)
        self.weight = nnx.Param(jnp.zeros(embed.weight.shape, jnp.int8))
        self.weight_scale = nnx.Param(jnp.zeros(embed.weight.shape[0], jnp.float32))
        self.lora = embed.lora

    def read_rows(self, known: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Return what stands for ids that the table has."""
        codes = read_rows(self.weight[...], known).astype(jnp.float32)
        scale = self.weight_scale[...].at[known].get(mode="promise_in_bounds")
        return (codes * scale[:, None]).astype(self.dtype)

    def project(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Return `hidden_states @ weight.T`, accumulated and returned in float32."""
        weight, rows = self.weight[...], hidden_states.shape[0]
        size = MAX_FEW_ROWS if rows <= _MANY_ROWS else rows
        parts = [hidden_states[start : start + size] for start in range(0, rows, size)]
        logits = jnp.concatenate([widened_logits(part, weight) for part in parts])
        return logits * self.weight_scale[...][None, :]


def quantize_language_model(model: Any, quantization: Quantization) -> None:
    """Replace every `Linear` of the language model, and its table and head, which get 8 bits.

    Experts stay, and so do towers and connectors, which are small beside the language model.
    """
    language_model = model.language_model
    for name in ("embed_tokens", "lm_head"):
        if isinstance(embed := getattr(language_model, name), Embed):
            setattr(language_model, name, Int8Embed(embed))
    for _, module in list(nnx.iter_modules(language_model)):
        for name, child in list(vars(module).items()):
            if type(child) is Linear:
                setattr(module, name, _quantized(child, quantization))


def place_packed(model: Any, layouts: Layouts) -> None:
    """Replace what of a model a checkpoint has quantised: linear layers and experts.

    Other matrices of `layouts` stay: they are dequantised as they are loaded.
    """
    for path, module in list(nnx.iter_modules(model)):
        place = "".join(f"{part}." for part in path)
        for name, child in list(vars(module).items()):
            layout = layouts.get(f"{place}{name}.weight")
            if type(child) is Linear and layout is not None:
                setattr(module, name, _quantized(child, layout))
            own = layouts.get(f"{place}{name}")
            if isinstance(module, Experts) and isinstance(own, Layout):
                module.pack(name, own)


def _quantized(linear: Linear, layout: Layout | Quantization) -> nnx.Module:
    layout = INT4 if layout == "int4" else layout
    return (
        PackedLinear(linear, layout) if isinstance(layout, Layout) else Int8Linear(linear, layout)
    )


def quantize_groups(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix of the host `[F, D]` as codes and scales of `INT4`.

    Numbers become codes from -8 to 7. Of the scales that make a group's largest number one of
    `_INT4_PEAKS`, the group gets that with the least squared error.
    """
    parts = [_quantize_block(weight[start:][:_BLOCK]) for start in range(0, len(weight), _BLOCK)]
    codes, scales = zip(*parts, strict=True)
    return pack_nibbles(np.concatenate(codes)), np.concatenate(scales)


def _quantize_block(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a few rows' codes, uint8 `[F, D]`, and their groups' scales `[F, G]`."""
    size, width = INT4.group_size, weight.shape[1]
    padded = np.pad(np.asarray(weight, np.float32), ((0, 0), (0, -width % size)))
    groups = padded.reshape(len(padded), -1, size)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], axis=-1)
    peaks = np.asarray(_INT4_PEAKS, np.float32)
    scales = (largest / peaks).astype(jnp.bfloat16)  # F G peaks
    least = np.full(groups.shape[:2], np.inf, np.float32)
    codes = np.zeros(groups.shape, np.float32)
    chosen = np.zeros(groups.shape[:2], scales.dtype)
    for number in range(len(peaks)):
        scale = scales[..., number]
        wide = scale.astype(np.float32)[..., None]
        found = np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)
        found = np.clip(np.rint(found, out=found), -8, 7, out=found)
        error = np.square(found * wide - groups).sum(-1)
        is_better = error < least
        least, chosen = np.where(is_better, error, least), np.where(is_better, scale, chosen)
        codes = np.where(is_better[..., None], found, codes)
    return (codes + 8).astype(np.uint8).reshape(padded.shape)[:, :width], chosen


def find_quantized(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return `{name of a quantised parameter: name of its scales}` of a flat tree."""
    names = ((name.removesuffix(SCALE), name) for name in leaves if name.endswith(SCALE))
    return {name: scales for name, scales in names if name in leaves}


def quantize(weight: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix as a quantised parameter of `dtype` has it, and its scales."""
    return quantize_rows(weight) if dtype == jnp.int8 else quantize_groups(weight)


def quantize_params(params: Params, abstract_params: Params) -> Params:
    """Return `params` with the weights that `abstract_params` has in 8 or 4 bits quantised."""
    leaves, expected = flatten_params(params), flatten_params(abstract_params)
    for name, scales in find_quantized(expected).items():
        dtype = expected[name].dtype
        if leaves[name].dtype != dtype:
            leaves[name], leaves[scales] = quantize(np.asarray(leaves[name]), dtype)
    return unflatten_params(leaves)
