"""Mixtures of experts: a router, and the few of many MLPs that it chooses for each token.

DeepSeekMoE (arXiv 2401.06066); routers as of DeepSeek-V2 (arXiv 2405.04434, section 2.2) and
DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); experts with biases as of gpt-oss (arXiv 2508.10925).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.activation import get_activation
from mmjax.layers.cpu.dispatch import by_platform
from mmjax.layers.cpu.groups import (
    Grouped,
    Layout,
    dequantize,
    expert_product,
    find_grouped,
    has_expert_kernel,
    order_rows,
    set_grouped,
    split_inputs,
)
from mmjax.layers.cpu.product import (
    MAX_FEW_ROWS,
    group_product,
    has_group_kernel,
    is_small,
    takes_rows,
)
from mmjax.layers.linear import linear
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.tpu.groups import tpu_group_product
from mmjax.rounding import cdiv

MANY_ROWS = 128
"""Rows of a tile on the CPU, where experts have more than `MAX_FEW_ROWS`, which is else a tile's:
each tile copies its expert's weights."""

_EPSILON = 1e-20
"""Added to the sum of the chosen scores before they are divided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How a token's experts are chosen, and what their outputs are multiplied by."""

    num_experts: int
    top_k: int
    """Experts of a token."""
    has_sigmoid: bool = False
    """Whether scores are sigmoids of the logits, each by itself; else softmaxes over all."""
    has_correction_bias: bool = False
    """Whether a learned bias is added to the scores in choosing, and not in weighting."""
    has_logit_bias: bool = False
    """Whether a learned bias is added to the logits, of which all scores are made."""
    num_groups: int = 1
    """Groups of equal size that the experts form, in order."""
    num_chosen_groups: int = 1
    """Groups that a token's experts may be of."""
    is_normalized: bool = False
    """Whether the chosen scores are divided by their sum: softmaxes then are those of the chosen
    logits alone."""
    scale: float = 1.0
    """What they are multiplied by at last."""
    scales_inputs: bool = False
    """Whether what an expert reads is multiplied by its score, and not what it gives (Llama 4). The
    highest logits are then chosen: of large ones the sigmoids are equal."""


class Router(nnx.Module):
    """Chooses experts, in float32 whatever the model's dtype."""

    def __init__(self, width: int, config: RouterConfig, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((config.num_experts, width), dtype))
        self.bias = (
            nnx.Param(jnp.zeros((config.num_experts,), dtype)) if config.has_logit_bias else None
        )
        self.e_score_correction_bias = (
            nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))
            if config.has_correction_bias
            else None
        )
        self.config = config

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T _k"], Int[Array, "T _k"]]:
        """Return the weights, float32, and the numbers of every token's experts."""
        config = self.config
        logits = linear(
            x.astype(jnp.float32),
            self.weight[...].astype(jnp.float32),
            None if self.bias is None else self.bias[...],
        )
        scores = jax.nn.sigmoid(logits) if config.has_sigmoid else jax.nn.softmax(logits, axis=-1)
        bias = self.e_score_correction_bias
        ranks = logits if config.scales_inputs else scores
        ranks = ranks if bias is None else ranks + bias[...][None]
        _, experts = jax.lax.top_k(self._mask_groups(ranks), config.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if config.is_normalized:
            weights = weights / (weights.sum(1, keepdims=True) + _EPSILON)
        return weights * config.scale, experts

    def _mask_groups(self, ranks: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Leave the experts of the best groups: by their best one, or two where there is a bias."""
        num_groups, num_chosen = self.config.num_groups, self.config.num_chosen_groups
        if num_chosen == num_groups:
            return ranks
        groups = ranks.reshape(len(ranks), num_groups, -1)
        num_best = 1 if self.e_score_correction_bias is None else 2
        best = jax.lax.top_k(groups, num_best)[0].sum(-1)  # T groups
        _, chosen = jax.lax.top_k(best, num_chosen)
        is_chosen = jax.nn.one_hot(chosen, num_groups, dtype=jnp.bool_).any(1)
        return jnp.where(is_chosen[:, :, None], groups, -jnp.inf).reshape(ranks.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """How gpt-oss' experts gate: SwiGLU of clamped inputs, and one more than `up`."""

    alpha: float
    """What the sigmoid's input is multiplied by (`swiglu_alpha`)."""
    limit: float
    """The most of the gate, and of `up` on both sides of zero (`swiglu_limit`)."""

    def __call__(self, gate: Float[Array, "R F"], up: Float[Array, "R F"]) -> Float[Array, "R F"]:
        """Return what the last product of an expert reads; rounded once, at the end."""
        low = jnp.minimum(gate.astype(jnp.float32), self.limit)
        raised = jnp.clip(up.astype(jnp.float32), -self.limit, self.limit) + 1
        return (raised * low * jax.nn.sigmoid(low * self.alpha)).astype(gate.dtype)


class ExpertWeights(NamedTuple):
    """The parameters of all experts, or of one, without the first axis."""

    gate_proj: Float[Array, "E F D"] | Grouped
    up_proj: Float[Array, "E F D"] | Grouped
    down_proj: Float[Array, "E D F"] | Grouped
    gate_proj_bias: Float[Array, "E F"] | None = None
    up_proj_bias: Float[Array, "E F"] | None = None
    down_proj_bias: Float[Array, "E D"] | None = None


class Experts(nnx.Module):
    """Gated MLPs (arXiv 2002.05202) of one shape, their weights stacked."""

    def __init__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        *,
        activation: str,
        clamped_gate: ClampedGate | None = None,
        use_bias: bool = False,
        scales_inputs: bool = False,
        dtype: Any,
    ) -> None:
        """`clamped_gate`: in place of `activation`. `scales_inputs`: as in `RouterConfig`."""
        self.gate_proj = nnx.Param(jnp.zeros((num_experts, inner, width), dtype))
        self.up_proj = nnx.Param(jnp.zeros((num_experts, inner, width), dtype))
        self.down_proj = nnx.Param(jnp.zeros((num_experts, width, inner), dtype))
        self.gate_proj_bias, self.up_proj_bias, self.down_proj_bias = (
            nnx.Param(jnp.zeros((num_experts, size), dtype)) if use_bias else None
            for size in (inner, inner, width)
        )
        self.activation = get_activation(activation)
        self.clamped_gate = clamped_gate
        self.scales_inputs = scales_inputs
        self.num_experts, self.inner = num_experts, inner
        self.layouts: tuple[tuple[str, Layout], ...] = ()
        """Of the matrices that are kept in groups, by name."""

    def pack(self, name: str, layout: Layout) -> None:
        """Keep the matrices of a name in groups of 4 or 8 bits."""
        set_grouped(self, name, layout, getattr(self, name).shape)
        self.layouts = (*self.layouts, (name, layout))

    def __call__(self, x: Float[Array, "R D"], sizes: Int[Array, " E"]) -> Float[Array, "R D"]:
        """Transform rows that stand expert by expert: `sizes` are how many each has."""
        params = {name: getattr(self, name) for name in ExpertWeights._fields}
        arrays: dict[str, Any] = {n: p if p is None else p[...] for n, p in params.items()}
        arrays |= {name: find_grouped(self, name, layout) for name, layout in self.layouts}
        weights = ExpertWeights(**arrays)
        expert = jax.ShapeDtypeStruct((self.inner, x.shape[1]), x.dtype)
        is_large = takes_rows(x, len(sizes)) and not is_small(expert)
        # Of a ragged product, XLA's CPU backend multiplies all rows with all experts, and masks;
        # on a GPU it transposes all matrices first. A loop over tiles has no gradient, as a kernel
        # has none, and on several devices adds up their parts tile by tile.
        kernel = self._by_kernel if is_large and _has_kernels(x, weights) else self._by_tiles
        forms = {"cpu": self._by_tiles, "gpu": self._by_tiles, "tpu": self._on_tpu}
        return by_platform(x, sizes, weights, kernel=kernel, default=self._by_ragged_dot, **forms)

    def mix(
        self,
        x: Float[Array, "T D"],
        weights: Float[Array, "T _k"],
        experts: Int[Array, "T _k"],
        is_own: Bool[Array, " T"] | None = None,
    ) -> Float[Array, "T D"]:
        """Return each token's sum over its experts, by their weights.

        Shapes are static: `T * k` rows, sorted by expert. `is_own`: which tokens have experts; the
        others' sums are 0, and no expert multiplies them.
        """
        num_tokens, top_k = experts.shape
        if is_own is not None:
            experts = jnp.where(
                is_own[:, None], experts, self.num_experts
            )  # behind all, and of none
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=self.num_experts)
        rows = x[order // top_k]
        if self.scales_inputs:
            scales = weights.reshape(-1)[order]
            rows = (rows.astype(jnp.float32) * scales[:, None]).astype(x.dtype)
        rows = self(rows, sizes.astype(jnp.int32))
        rows = rows[jnp.argsort(order)].reshape(num_tokens, top_k, -1).astype(jnp.float32)
        if self.scales_inputs:
            return rows.sum(1).astype(x.dtype)
        # Summed in the order of a token's choices, whatever its neighbours are.
        total = (rows * weights[:, :, None]).sum(1).astype(x.dtype)
        return total if is_own is None else jnp.where(is_own[:, None], total, 0)

    def _transform(
        self,
        x: Float[Array, "R D"],
        weights: ExpertWeights,
        project: Callable[[Array, Array | Grouped, Array | None], Array],
    ) -> Float[Array, "R D"]:
        """Return the experts' outputs; `project` takes rows, a weight and its bias."""
        gate = project(x, weights.gate_proj, weights.gate_proj_bias)
        up = project(x, weights.up_proj, weights.up_proj_bias)
        if self.clamped_gate is None:
            gated = self.activation(gate) * up
        else:
            gated = self.clamped_gate(gate, up)
        return project(gated, weights.down_proj, weights.down_proj_bias)

    def _by_ragged_dot(
        self, x: Float[Array, "R D"], sizes: Int[Array, " E"], weights: ExpertWeights
    ) -> Float[Array, "R D"]:
        return self._by_products(x, sizes, weights, _ragged_product)

    def _on_tpu(
        self, x: Float[Array, "R D"], sizes: Int[Array, " E"], weights: ExpertWeights
    ) -> Float[Array, "R D"]:
        return self._by_products(x, sizes, weights, _tpu_product)

    def _by_products(
        self,
        x: Float[Array, "R D"],
        sizes: Int[Array, " E"],
        weights: ExpertWeights,
        multiply: Callable[..., Array],
    ) -> Float[Array, "R D"]:
        """Return the experts' outputs; `multiply` takes rows, all experts' matrices and `sizes`."""

        def project(rows: Array, weight: Array | Grouped, bias: Array | None) -> Array:
            cuts_inputs = weight is weights.down_proj
            if isinstance(weight, Grouped):
                rows = order_rows(rows, weight, sizes)
            out = multiply(rows, weight, sizes, cuts_inputs=cuts_inputs)
            if bias is None:
                return out
            return out + jnp.repeat(bias, sizes, axis=0, total_repeat_length=len(rows))

        return self._transform(x, weights, project)

    def _by_kernel(
        self, x: Float[Array, "R D"], sizes: Int[Array, " E"], weights: ExpertWeights
    ) -> Float[Array, "R D"]:
        def project(rows: Array, weight: Array | Grouped, bias: Array | None) -> Array:
            if isinstance(weight, Grouped):
                out = expert_product(rows, weight, sizes)
            else:
                out = group_product(rows, weight, sizes)
            if bias is not None:
                of_rows = jnp.repeat(bias, sizes, axis=0, total_repeat_length=len(rows))
                out = out + of_rows.astype(jnp.float32)
            return out.astype(rows.dtype)

        return self._transform(x, weights, project)

    def _by_tiles(
        self, x: Float[Array, "R D"], sizes: Int[Array, " E"], weights: ExpertWeights
    ) -> Float[Array, "R D"]:
        """Multiply tiles of one expert's rows: no expert without rows is read."""

        def transform(rows: Float[Array, "Z D"], expert: Int[Array, ""]) -> Float[Array, "Z D"]:
            own = jax.tree.map(
                lambda one: jax.lax.dynamic_index_in_dim(one, expert, keepdims=False), weights
            )
            return self._transform(rows, own, _project)

        return _each_tile(
            transform, x, sizes, MAX_FEW_ROWS if _has_few_rows(x, sizes) else MANY_ROWS
        )


def _project(rows: Array, weight: Array | Grouped, bias: Array | None) -> Array:
    """Project rows of one expert."""
    if isinstance(weight, Grouped):
        rows = rows if weight.order is None else rows[:, weight.order]
        weight = dequantize(weight, rows.shape[1], rows.dtype)
    return linear(rows, weight, bias)


def _has_kernels(x: Float[Array, "R D"], weights: ExpertWeights) -> bool:
    """Return whether kernels multiply with all matrices of the experts."""
    return all(
        has_expert_kernel(x) if isinstance(one, Grouped) else has_group_kernel(x, one)
        for one in (weights.gate_proj, weights.up_proj, weights.down_proj)
    )


def _has_few_rows(x: Float[Array, "R D"], sizes: Int[Array, " E"]) -> bool:
    return x.shape[0] <= MAX_FEW_ROWS * len(sizes)


def _ragged_product(
    x: Float[Array, "R D"],
    weight: Float[Array, "E F D"] | Grouped,
    sizes: Int[Array, " E"],
    **_: bool,
) -> Float[Array, "R F"]:
    """Return `x @ weight[e].T`, where e is a row's expert; XLA knows how its devices share it."""
    if isinstance(weight, Grouped):
        weight = dequantize(weight, x.shape[1], x.dtype)
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return jax.lax.ragged_dot_general(x, weight, sizes, dimensions)


def _tpu_product(
    x: Float[Array, "R D"],
    weight: Float[Array, "E F D"] | Grouped,
    sizes: Int[Array, " E"],
    *,
    cuts_inputs: bool,
) -> Float[Array, "R F"]:
    """Return `x @ weight[e].T`; of matrices in groups, those are made wide that have rows."""
    multiply = partial(tpu_group_product, cuts_inputs=cuts_inputs)
    if not isinstance(weight, Grouped):
        return multiply(x, weight, sizes)
    if len(x) < len(sizes):
        used = jnp.argsort(sizes == 0)[: len(x)]  # stable: they stay in order
        sizes, weight = sizes[used], jax.tree.map(lambda array: array[used], weight)
        assert isinstance(weight, Grouped)
    outs = [multiply(*part, sizes, dtype=jnp.float32) for part in split_inputs(x, weight)]
    return reduce(jnp.add, outs).astype(x.dtype)


def _each_tile(
    transform: Callable[[Float[Array, "Z D"], Int[Array, ""]], Float[Array, "Z D"]],
    x: Float[Array, "R D"],
    sizes: Int[Array, " E"],
    num_rows: int,
) -> Float[Array, "R D"]:
    """Transform rows in tiles of `num_rows`, each of one expert.

    The last tile of an expert reaches into the rows of the next, which are written after it.
    """
    tile_ends = jnp.cumsum(cdiv(sizes, num_rows), dtype=jnp.int32)
    row_ends = jnp.cumsum(sizes, dtype=jnp.int32)

    def body(tile: Array, out: Float[Array, "_padded D"]) -> Float[Array, "_padded D"]:
        expert = jnp.searchsorted(tile_ends, tile, side="right").astype(jnp.int32)
        from_last = tile_ends[expert] - tile  # 1 for an expert's last tile
        first = row_ends[expert] - sizes[expert]
        start = first + (cdiv(sizes[expert], num_rows) - from_last) * num_rows
        rows = jax.lax.dynamic_slice_in_dim(padded, start, num_rows)
        return jax.lax.dynamic_update_slice_in_dim(out, transform(rows, expert), start, 0)

    padded = jnp.pad(x, ((0, num_rows), (0, 0)))
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.fori_loop(zero, tile_ends[-1], body, jnp.zeros_like(padded))[: len(x)]


class MixtureOfExperts(nnx.Module):
    """Routed experts beside shared ones, which all tokens have; names are DeepSeek's."""

    def __init__(
        self,
        width: int,
        inner: int,
        router: RouterConfig,
        *,
        num_shared: int,
        activation: str,
        clamped_gate: ClampedGate | None = None,
        use_bias: bool = False,
        dtype: Any,
    ) -> None:
        """`inner`: of one expert. The `num_shared` are one MLP of their widths' sum.

        `clamped_gate` and `use_bias` are of the routed experts.
        """
        self.gate = Router(width, router, dtype=dtype)
        self.experts = Experts(
            router.num_experts,
            width,
            inner,
            activation=activation,
            clamped_gate=clamped_gate,
            use_bias=use_bias,
            scales_inputs=router.scales_inputs,
            dtype=dtype,
        )
        self.shared_experts = (
            GatedMLP(width, num_shared * inner, activation=activation, dtype=dtype)
            if num_shared
            else None
        )

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Transform every token by its experts, and by the shared ones."""
        return self._add_shared(x, self.experts.mix(x, *self.gate(x)))

    def transform_some(
        self, x: Float[Array, "T D"], is_own: Bool[Array, " T"]
    ) -> Float[Array, "T D"]:
        """Transform some tokens by routed experts; the others have the shared ones alone."""
        return self._add_shared(x, self.experts.mix(x, *self.gate(x), is_own))

    def _add_shared(self, x: Float[Array, "T D"], out: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return out if self.shared_experts is None else out + self.shared_experts(x)
