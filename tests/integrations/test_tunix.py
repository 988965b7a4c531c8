"""Tunix's own trainers with mmjax's engine: weights, log-probabilities, GRPO, pictures."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from mmjax import LLM, SamplingParams
from mmjax.errors import ConfigError, RequestError
from tests.kit import IMAGE_START, draw, gemma_tokenizer, tiny_gemma3_config

pytest.importorskip("tunix", reason="needs `pip install 'mmjax[tunix]'`")
# Each of them opens an engine, and compiles Tunix's model.
pytestmark = [
    pytest.mark.slow,
    # Of JAX, for how Tunix calls it.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
}
PROMPTS = ["a red circle", "a star and a blue square"]


def mesh_of(*numbers: int) -> Mesh:
    devices = np.array([jax.devices()[number] for number in numbers])
    return Mesh(devices.reshape(-1, 1), ("fsdp", "tp"))


def make_actor(seed: int) -> Any:
    """Return Tunix's Gemma 3 of the size of the tiny checkpoint, of random weights."""
    from tunix.models.gemma3.model import Gemma3, ModelConfig

    text = tiny_gemma3_config(gemma_tokenizer()).text_config
    config = ModelConfig(
        num_layers=text.num_hidden_layers,
        num_embed=text.vocab_size,
        embed_dim=text.hidden_size,
        hidden_dim=text.intermediate_size,
        num_heads=text.num_attention_heads,
        head_dim=text.head_dim,
        num_kv_heads=text.num_key_value_heads,
        sliding_window_size=text.sliding_window,
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
        param_dtype=jnp.float32,
    )
    actor = Gemma3(config, rngs=nnx.Rngs(params=seed))
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.Array) -> jax.Array:
        scale = 0.05 if leaf.ndim == 1 else leaf.shape[-2] ** -0.5
        return jnp.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype)

    nnx.update(actor, jax.tree.map(fill, nnx.state(actor, nnx.Param)))
    return actor


@pytest.fixture(autouse=True, scope="module")
def _loosely() -> Iterator[None]:
    """Tunix adds numbers of different dtypes and ranks, also in threads of its own."""
    loose = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    before = {name: jax.config.values[name] for name in loose}
    for name, value in loose.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def rollout(tiny_gemma3: Path) -> Iterator[Any]:
    from mmjax.integrations.tunix import MMJaxRollout

    made = MMJaxRollout(model=str(tiny_gemma3), mesh=mesh_of(1), **SETTINGS)
    yield made
    made.llm.close()


def config_of(**fields: Any) -> Any:
    from tunix.rl.rollout.base_rollout import RolloutConfig

    sizes = {"max_tokens_to_generate": 6, "max_prompt_length": 16, "data_type": jnp.float32}
    return RolloutConfig(**{**sizes, "temperature": 0.0, **fields})


def per_token_logps(actor: Any, rollout: Any, prompts: Any, answers: Any) -> np.ndarray:
    from tunix.rl import common

    ids = {"pad_id": rollout.pad_id(), "eos_id": rollout.eos_id()}
    found = common.compute_per_token_logps(
        actor, prompt_tokens=prompts, completion_tokens=answers, **ids
    )
    return np.asarray(found)


def tokens_of(output: Any) -> list[list[int]]:
    return [np.asarray(row).tolist() for row in output.tokens]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_engine_has_the_trainers_weights(rollout: Any, seed: int) -> None:
    """What Tunix's model says of the engine's answers is what the engine said itself."""
    actor = make_actor(seed)
    rollout.update_params(nnx.state(actor, nnx.Param))
    output = rollout.generate(PROMPTS, config_of(temperature=1.0, seed=jnp.array(seed)))
    prompts = jnp.asarray(output.left_padded_prompt_tokens)
    assert prompts.shape == (2, 16)
    answers = jnp.asarray(tokens_of(output))
    expected = per_token_logps(actor, rollout, prompts, answers)
    found = rollout.get_per_token_logps(prompts, answers)
    for row, said in enumerate(output.logprobs):
        length = len(said)
        assert length
        np.testing.assert_allclose(said, expected[row, :length], atol=1e-4)
        np.testing.assert_allclose(found[row, :length], expected[row, :length], atol=1e-4)
        assert not np.asarray(found)[row, length:].any()


def test_rows_of_one_prompt_are_other_answers_and_repeat(rollout: Any) -> None:
    config = config_of(temperature=1.0, seed=jnp.array(3))
    first, again = (tokens_of(rollout.generate(PROMPTS[:1] * 4, config)) for _ in range(2))
    assert first == again
    assert len({tuple(row) for row in first}) > 1


def test_prompts_with_pictures(rollout: Any, tiny_gemma3: Path) -> None:
    prompts: list[Any] = [
        {"prompt": f"{IMAGE_START} red", "multi_modal_data": {"image": draw(40, 30, seed)}}
        for seed in (1, 2)
    ]
    prompts.append("<bos>a red circle")
    output = rollout.generate(prompts, config_of())
    params = SamplingParams(temperature=0.0, max_tokens=6)
    expected = rollout.llm.generate([*prompts[:2], "a red circle"], params, use_tqdm=False)
    for row, other in enumerate(expected):
        assert output.text[row] == other.outputs[0].text
        ids = other.outputs[0].token_ids
        assert tokens_of(output)[row][: len(ids)] == ids
        prompt = np.asarray(output.left_padded_prompt_tokens)[row].tolist()
        assert prompt[-len(other.prompt_token_ids) :] == other.prompt_token_ids
    with pytest.raises(RequestError, match="image"):
        rollout.get_per_token_logps(output.left_padded_prompt_tokens, jnp.array(tokens_of(output)))


def test_adapters_alone_are_refused(rollout: Any) -> None:
    with pytest.raises(ConfigError, match="map_params"):
        rollout.update_params(nnx.State({}), (nnx.LoRAParam,))


@pytest.mark.parametrize("rollout_device", [1, 0], ids=["apart", "together"])
def test_a_step_of_grpo(tiny_gemma3: Path, rollout_device: int) -> None:
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

    from mmjax.integrations.tunix import MMJaxRollout

    Role = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=make_actor(1),
        reference=make_actor(1),
        tokenizer=gemma_tokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                Role.ACTOR: mesh_of(0),
                Role.REFERENCE: mesh_of(0),
                Role.ROLLOUT: mesh_of(rollout_device),
            },
            rollout_engine=partial(MMJaxRollout, model=str(tiny_gemma3), **SETTINGS),
            rollout_config=config_of(temperature=1.0),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.sgd(1.0), eval_every_n_steps=10, max_steps=2
            ),
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=4, num_iterations=2),
        reward_fns=lambda prompts, completions, **_: [float(len(one)) for one in completions],
    )
    llm: LLM = cluster.rollout.llm
    before = llm.params["language_model"]["layers"][0]["mlp"]["up_proj"]["weight"].copy()
    learner.train([{"prompts": np.array(one)} for one in (PROMPTS, PROMPTS[::-1])])
    after = llm.params["language_model"]["layers"][0]["mlp"]["up_proj"]["weight"]
    assert np.abs(np.asarray(after) - np.asarray(before)).max() > 1e-6, "nothing was learned"
    assert llm.weights_version > 1
    output = cluster.rollout.generate(PROMPTS, config_of())
    prompts = jnp.asarray(output.left_padded_prompt_tokens)
    answers = jnp.asarray(tokens_of(output))
    trained = per_token_logps(cluster.actor_trainer.model, cluster.rollout, prompts, answers)
    for row, said in enumerate(output.logprobs):
        np.testing.assert_allclose(said, trained[row, : len(said)], atol=1e-4)
    llm.close()
