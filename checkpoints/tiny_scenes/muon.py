"""Muon for the hidden matrices, Adam for the rest, as optax transformations.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) takes the momentum's nearest
orthogonal matrix as the step. Matrices of one shape are orthogonalised together: the products are
tiny, and one call for each would cost more than the products.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mmjax.layers.module import flatten_params, unflatten_params

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic of the Newton-Schulz iteration; they maximise its slope at zero."""


def orthogonalize(stack: jax.Array, num_iterations: int = 5) -> jax.Array:
    """Return roughly the nearest orthogonal matrix of each [out, in] matrix of a stack."""
    a, b, c = _COEFFICIENTS
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.transpose(0, 2, 1) if is_tall else stack
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.transpose(0, 2, 1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(0, 2, 1) if is_tall else x


def scale_by_orthogonality() -> optax.GradientTransformation:
    """Replace every matrix by its orthogonal part times sqrt(max(1, out / in))."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i, leaf in enumerate(leaves):
            by_shape.setdefault(leaf.shape, []).append(i)
        for (rows, columns), places in by_shape.items():
            stack = orthogonalize(jnp.stack([leaves[i] for i in places]))
            scale = max(1.0, rows / columns) ** 0.5
            for place, matrix in zip(places, stack, strict=True):
                leaves[place] = scale * matrix
        return jax.tree.unflatten(treedef, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon trains this parameter: a matrix inside the blocks, or the projector's."""
    return len(shape) == 2 and (".layers." in name or name.endswith("mm_input_projection_weight"))


def make_optimizer(
    params: Any, muon_rate: optax.Schedule, adam_rate: optax.Schedule
) -> optax.GradientTransformation:
    """Clip, then Muon or Adam by `is_hidden_matrix`."""
    labels = unflatten_params(
        {
            name: "muon" if is_hidden_matrix(name, leaf.shape) else "adam"
            for name, leaf in flatten_params(params).items()
        }
    )
    muon = optax.chain(
        optax.trace(decay=0.95, nesterov=True),
        scale_by_orthogonality(),
        optax.add_decayed_weights(0.02),
        optax.scale_by_learning_rate(muon_rate),
    )
    adam = optax.adam(adam_rate, b1=0.9, b2=0.98)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.partition({"muon": muon, "adam": adam}, labels)
    )
