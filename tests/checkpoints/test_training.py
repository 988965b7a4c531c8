"""Training: the step learns, a seed decides it, a snapshot brings it back, the export loads."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BatchPlan, Phase, prefetch, training_batch
from learner import Learner, LearnerState, to_device_arrays
from muon import is_hidden_matrix, orthogonalize
from products import with_bfloat16_products
from safetensors.numpy import load_file
from train import export, load_snapshot, save_snapshot
from transformers import AutoConfig

from mmjax.layers.module import flatten_params
from tests.checkpoints.conftest import TINY_SCENES

pytestmark = pytest.mark.usefixtures("lenient_promotion")

PLAN = BatchPlan(pictures=4, single_rows=4, pair_rows=1, chat_rows=1)
PHASES = (Phase(start=0, plan=PLAN, emphasis={}),)


def tiny_config() -> Any:
    config = AutoConfig.from_pretrained(TINY_SCENES / "model")
    for part in (config.text_config, config.vision_config):
        part.hidden_size, part.intermediate_size, part.num_hidden_layers = 32, 32, 1
    config.text_config.head_dim = 16
    config.text_config.layer_types = ["full_attention"]
    return config


def make_learner() -> Learner:
    return Learner(tiny_config(), num_steps=300, seed=0, use_bfloat16_products=True)


@pytest.fixture(scope="module")
def learner() -> Learner:
    """One for all tests, whose step is compiled once; updates take `begin(learner)`."""
    with jax.numpy_dtype_promotion("standard"):
        return make_learner()


def begin(learner: Learner) -> LearnerState:
    """Return a copy of the initial state: an update gives its state's memory away.

    On its device, as an update returns it: else the second one is compiled anew.
    """
    return jax.device_put(jax.tree.map(jnp.copy, learner.initial_state), jax.devices()[0])


def run(learner: Learner, state: LearnerState, start: int, stop: int) -> LearnerState:
    for batch in prefetch(0, start, stop, PHASES):
        state, _ = learner.update(state, to_device_arrays(batch))
    return state


def test_a_cut_run_goes_on_to_the_same_result(learner: Learner, tmp_path: Path):
    snapshot = tmp_path / "run.safetensors"
    state = run(learner, begin(learner), 0, 2)
    save_snapshot(snapshot, state)
    whole = run(learner, state, 2, 4)
    other = make_learner()
    resumed = run(other, load_snapshot(snapshot, other.initial_state), 2, 4)
    assert int(resumed.step) == 4
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, two)


def test_steps_lower_the_loss(learner: Learner):
    state, arrays = begin(learner), to_device_arrays(training_batch(0, 0, PHASES))
    losses = []
    for _ in range(30):
        state, parts = learner.update(state, arrays)
        losses.append(float(parts["answer"]))
        if losses[-1] < losses[0] - 1.0:
            break
    assert losses[-1] < losses[0] - 1.0


def test_batches_are_the_seeds():
    one, two, other = (training_batch(seed, 5, PHASES) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.pixels, two.pixels)
    np.testing.assert_array_equal(one.rows.tokens, two.rows.tokens)
    assert (one.pixels != other.pixels).any()


def test_the_export_bears_save_pretraineds_names(learner: Learner, tmp_path: Path):
    export(tmp_path, learner.initial_state.average)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == len(flatten_params(learner.initial_state.average))
    assert "language_model.model.embed_tokens.weight" in tensors
    assert "vision_tower.vision_model.embeddings.patch_embedding.weight" in tensors
    assert "multi_modal_projector.mm_input_projection_weight" in tensors
    assert not any("head" in name for name in tensors)


@pytest.mark.parametrize("shape", [(3, 16, 8), (2, 16, 6), (2, 6, 16)])
def test_muon_makes_steps_orthogonal(shape: tuple[int, ...]):
    stack = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    singular = np.linalg.svd(np.asarray(orthogonalize(stack)), compute_uv=False)
    assert singular.min() > 0.4
    assert singular.max() < 1.3


def test_muon_takes_the_matrices_inside_the_blocks(learner: Learner):
    params = flatten_params(learner.initial_state.params)
    hidden = {name for name, leaf in params.items() if is_hidden_matrix(name, leaf.shape)}
    assert len(hidden) == 6 + 7 + 1
    assert not any("embed" in name or "norm" in name or "heads" in name for name in hidden)


def test_products_are_rounded_where_it_pays():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2048, 64)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((64, 32)), jnp.float32)

    def loss(weight: jax.Array) -> jax.Array:
        return jnp.square(jax.jit(jnp.tanh)(x @ weight)).sum()

    exact = jax.value_and_grad(loss)(weight)
    rounded = jax.jit(with_bfloat16_products(jax.value_and_grad(loss)))(weight)
    assert exact[0] != rounded[0]
    np.testing.assert_allclose(exact[0], rounded[0], rtol=1e-3)
    error = float(jnp.linalg.norm(exact[1] - rounded[1]))
    assert error < 0.03 * float(jnp.linalg.norm(exact[1]))
