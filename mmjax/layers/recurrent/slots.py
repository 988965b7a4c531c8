"""Reading and writing the slots of a step's requests."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.metadata import PagedAttentionMetadata, StateMetadata


def find_states(metadata: PagedAttentionMetadata) -> StateMetadata:
    """Return where the states of a step's requests are."""
    assert metadata.states is not None, "the metadata is of a model without recurrent layers"
    return metadata.states


def read_slots(
    slots: Float[Array, "_slots ..."], states: StateMetadata, metadata: PagedAttentionMetadata
) -> Float[Array, "R ..."]:
    """Return what each window's request kept: zeros where its sequence begins."""
    held = slots.at[states.slots].get(mode="fill", fill_value=0)
    begins = metadata.token_index[states.first_rows] == 0
    return jnp.where(begins.reshape(-1, *[1] * (held.ndim - 1)), 0, held)


def write_slots(
    slots: Float[Array, "_slots ..."], states: StateMetadata, values: Float[Array, "R ..."]
) -> Float[Array, "_slots ..."]:
    """Return the slots with what each window's request keeps; padding is dropped."""
    return slots.at[states.slots].set(values, mode="drop")


def find_sources(states: StateMetadata) -> Int[Array, " R"]:
    """Return the slot of the states before each window; behind a guess it is that one's."""
    if states.depths is None:
        return states.slots
    return jnp.where(states.depths > 0, jnp.roll(states.slots, 1), states.slots)
