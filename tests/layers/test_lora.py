"""Adapters of weights that attention absorbs: as those of the layer that they are parts of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax.layers.lora import LoRA

NUM_TOKENS, NUM_HEADS, IN, OUT, SLOTS, RANK = 6, 3, 5, 4, 2, 2


@pytest.fixture
def lora() -> LoRA:
    """Two adapters of a layer of three heads; the last token has none."""
    rng = np.random.default_rng(0)
    sizes = {"num_slots": SLOTS, "rank": RANK, "dtype": jnp.float32}
    made = LoRA(IN, NUM_HEADS * OUT, **sizes)
    for one in (made.a, made.b, made.bias):
        one[...] = jnp.asarray(rng.standard_normal(one.shape), jnp.float32)
    made.slots = nnx.Param(jnp.array([0, 1, 1, 0, 0, -1], jnp.int32))
    return made


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


def test_a_heads_part_is_that_of_the_whole_layer(lora: LoRA) -> None:
    x = draw(NUM_TOKENS, NUM_HEADS, IN)
    found = lora.by_head(x)
    for head in range(NUM_HEADS):
        whole = lora(x[:, head]).reshape(NUM_TOKENS, NUM_HEADS, OUT)
        np.testing.assert_allclose(found[:, head], whole[:, head], atol=1e-5)
    assert not found[-1].any()


def test_what_is_absorbed_is_the_transposed(lora: LoRA) -> None:
    """A query's product with a key's part is the absorbed query's with what the key is made of."""
    x, query = draw(NUM_TOKENS, NUM_HEADS, IN), draw(NUM_TOKENS, NUM_HEADS, OUT)
    lora.bias[...] = jnp.zeros(lora.bias.shape, jnp.float32)
    one = (lora.by_head(x) * query).sum(-1)
    other = (x * lora.absorb(query)).sum(-1)
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert not lora.absorb(query)[-1].any()
    assert np.abs(one[:-1]).min() > 1e-3
