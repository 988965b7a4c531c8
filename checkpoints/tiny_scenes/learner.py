"""What is learned and how: parameters, loss, one training step. Knows nothing of scenes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from batches import Batch
from labels import LABEL_CLASSES
from muon import make_optimizer
from products import with_bfloat16_products

from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract, flatten_params, unflatten_params
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration

EMA_DECAY = 0.998
WARM_UP_STEPS = 100
DECAY_SHARE = 0.6
MUON_RATE, ADAM_RATE = 0.02, 3e-3
SECOND_LEG_RATE = 0.35
"""Where the learning rate starts anew for the second leg, as a share of the first's."""


class Arrays(NamedTuple):
    """A batch for the device; see `batches.Batch` and `packing.PackedRows`."""

    pixels: jax.Array
    tokens: jax.Array
    positions: jax.Array
    segment: jax.Array
    run: jax.Array
    features: jax.Array
    target_index: jax.Array
    target_id: jax.Array
    target_weight: jax.Array
    labels: Mapping[str, jax.Array]


class LearnerState(NamedTuple):
    """All that a snapshot holds."""

    params: Any
    """`model` (the checkpoint's tree) and `heads` (auxiliary, dropped at export)."""
    average: Any
    """Moving average of `params["model"]`."""
    optimizer: Any
    step: jax.Array


def to_device_arrays(batch: Batch) -> Arrays:
    """Collect what the device needs."""
    rows = batch.rows
    fields = {
        name: jnp.asarray(getattr(rows, name)) for name in Arrays._fields if hasattr(rows, name)
    }
    labels = {name: jnp.asarray(values) for name, values in batch.labels.items()}
    return Arrays(pixels=jnp.asarray(batch.pixels), labels=labels, **fields)


class Learner:
    """The model's graph with its optimiser: jitted functions over `LearnerState`."""

    def __init__(
        self,
        hf_config: Any,
        *,
        num_steps: int,
        num_more_steps: int = 0,
        seed: int,
        use_bfloat16_products: bool,
    ) -> None:
        self.graph, abstract = build_abstract(
            Gemma3ForConditionalGeneration, hf_config, dtype=jnp.float32
        )
        params = {"model": initialize(abstract, seed), "heads": _initialize_heads(hf_config, seed)}
        self.optimizer = make_optimizer(
            params,
            _schedule(MUON_RATE, num_steps, num_more_steps),
            _schedule(ADAM_RATE, num_steps, num_more_steps),
        )
        gradients = jax.value_and_grad(self._loss, has_aux=True)
        self.gradients = with_bfloat16_products(gradients) if use_bfloat16_products else gradients
        self.initial_state = LearnerState(
            params=params,
            average=jax.tree.map(jnp.copy, params["model"]),
            optimizer=self.optimizer.init(params),
            step=jnp.zeros((), jnp.int32),
        )
        self.update: Callable[[LearnerState, Arrays], tuple[LearnerState, dict[str, jax.Array]]] = (
            jax.jit(self._update, donate_argnums=0)
        )
        self.predict: Callable[[Any, Arrays], jax.Array] = jax.jit(self._predict)

    def _update(
        self, state: LearnerState, arrays: Arrays
    ) -> tuple[LearnerState, dict[str, jax.Array]]:
        (_, losses), gradients = self.gradients(state.params, arrays)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        # short at the start, so that the random beginning is soon forgotten
        step = state.step.astype(jnp.float32)
        decay = jnp.minimum(EMA_DECAY, (1.0 + step) / (10.0 + step))
        average = jax.tree.map(
            lambda old, new: decay * old + (1 - decay) * new, state.average, params["model"]
        )
        return LearnerState(params, average, optimizer, state.step + 1), losses

    def _loss(self, params: Any, arrays: Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, patches, soft_tokens = forward(bind(self.graph, params["model"]), arrays)
        losses = {"answer": answer_loss(logits, arrays)}
        for name, head in params["heads"].items():
            inputs = soft_tokens if name == "centre" else patches
            goals = arrays.labels[name].reshape(-1)
            heavy = 2.0 if name in ("shape", "color") else 4.0
            weight = jnp.where(goals > 0, heavy, 1.0)
            flat = inputs.reshape(-1, inputs.shape[-1])
            scores = flat @ head["weight"].T + head["bias"][None, :]
            losses[name] = jnp.sum(_cross_entropy(scores, goals) * weight) / jnp.sum(weight)
        return sum(losses.values(), jnp.zeros(())), losses

    def _predict(self, model_params: Any, arrays: Arrays) -> jax.Array:
        """Whether each target is the model's first choice: bool[rows, targets]."""
        logits, _, _ = forward(bind(self.graph, model_params), arrays)
        return (logits.argmax(-1) == arrays.target_id.reshape(-1)).reshape(arrays.target_id.shape)


def forward(
    model: Gemma3ForConditionalGeneration, arrays: Arrays
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits at the targets [rows * targets, V], patches, soft tokens."""
    pixels = arrays.pixels.astype(jnp.float32).transpose(0, 3, 1, 2) / 127.5 - 1.0
    patches, _ = model.vision_tower(pixels)
    soft_tokens = model.multi_modal_projector(patches)
    width = soft_tokens.shape[-1]
    features = arrays.features.reshape(-1)
    pictured = soft_tokens.reshape(-1, width)[jnp.maximum(features, 0)]
    written = model.embed_input_ids(arrays.tokens.reshape(-1))
    embeds = jnp.where((features >= 0)[:, None], pictured, written)
    length = arrays.tokens.shape[1]
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], arrays.tokens.shape)
    metadata = DenseAttentionMetadata(token_index=index, mask=_visible(arrays))
    positions = jnp.broadcast_to(arrays.positions.reshape(1, -1), (3, features.size))
    hidden, _ = model(embeds, positions, None, metadata)
    hidden = hidden.reshape(*arrays.tokens.shape, width)
    chosen = jnp.take_along_axis(hidden, arrays.target_index[:, :, None], axis=1)
    return model.compute_logits(chosen.reshape(-1, width)), patches, soft_tokens


def answer_loss(logits: jax.Array, arrays: Arrays) -> jax.Array:
    """Return the mean loss of the answers' tokens, each with its weight."""
    weight = arrays.target_weight.reshape(-1)
    losses = _cross_entropy(logits, arrays.target_id.reshape(-1))
    return jnp.sum(losses * weight) / jnp.sum(weight)


def _visible(arrays: Arrays) -> jax.Array:
    """bool[rows, T, T]: text sees what is before it, pictures see themselves whole."""
    query, key = arrays.segment[:, :, None], arrays.segment[:, None, :]
    index = jnp.arange(arrays.segment.shape[1])
    before = (index[None, :] <= index[:, None])[None]
    same_picture = (arrays.run[:, :, None] == arrays.run[:, None, :]) & (arrays.run > 0)[:, :, None]
    return (before | same_picture) & ((query == key) | (key == 0))


def _cross_entropy(logits: jax.Array, goals: jax.Array) -> jax.Array:
    picked = jax.nn.one_hot(goals, logits.shape[-1], dtype=logits.dtype) * logits
    return jax.nn.logsumexp(logits, axis=-1) - picked.sum(-1)


def _schedule(peak: float, num_steps: int, num_more_steps: int) -> optax.Schedule:
    """Warm up, stay, fall linearly over the last DECAY_SHARE; then once more, from lower."""
    decay = round(num_steps * DECAY_SHARE)
    parts = [
        optax.linear_schedule(0.0, peak, WARM_UP_STEPS),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, 0.0, decay),
        optax.linear_schedule(SECOND_LEG_RATE * peak, 0.0, max(1, num_more_steps)),
    ]
    return optax.join_schedules(parts, [WARM_UP_STEPS, num_steps - decay, num_steps])


def initialize(abstract: Any, seed: int) -> dict[Any, Any]:
    """Random parameters by name, in the order of the names."""
    rng = np.random.default_rng([seed, 1])
    leaves = {
        name: jnp.asarray(_initial_value(name, leaf.shape, rng), jnp.float32)
        for name, leaf in sorted(flatten_params(abstract).items())
    }
    return unflatten_params(leaves)


def _initial_value(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("bias"):
        return np.zeros(shape)
    if "norm" in name:
        # Gemma's norms multiply by 1 + weight, the tower's LayerNorms by weight
        is_layer_norm = name.startswith("vision_tower")
        return np.ones(shape) if is_layer_norm else np.zeros(shape)
    if name.endswith("position_embedding.weight"):
        return 0.1 * rng.standard_normal(shape)
    fan_in = shape[0] if name.endswith("projection_weight") else int(np.prod(shape[1:]))
    return rng.standard_normal(shape) / np.sqrt(fan_in)


def _initialize_heads(hf_config: Any, seed: int) -> dict[str, dict[str, jax.Array]]:
    rng = np.random.default_rng([seed, 2])
    widths: Mapping[str, int] = {
        name: hf_config.text_config.hidden_size
        if name == "centre"
        else hf_config.vision_config.hidden_size
        for name in LABEL_CLASSES
    }
    return {
        name: {
            "weight": jnp.asarray(0.02 * rng.standard_normal((classes, widths[name])), jnp.float32),
            "bias": jnp.zeros((classes,), jnp.float32),
        }
        for name, classes in LABEL_CLASSES.items()
    }
