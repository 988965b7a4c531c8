"""The functions that are jitted, and what they take."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mmjax.config.engine_config import LogprobsMode
from mmjax.engine.device.batch import (
    ADAPTER_SLOTS,
    Layout,
    add_padding_row,
    unpack_sample,
    unpack_step,
)
from mmjax.engine.device.mesh import Placement
from mmjax.engine.device.sampler import SampleOutput, SampleTables, sample_full
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KeptStates, KVCache, StateCache
from mmjax.layers.cpu.storage import from_storage, to_storage
from mmjax.layers.module import Params, bind, flatten_params, unflatten_params
from mmjax.models.interface import embed_units
from mmjax.weights.adapter import slot_axis

Gather = Callable[[Array, int], Array]
"""Replicates an array that the devices computed in parts along an axis."""
Compute = Callable[[Callable[[Any, Any], Array], Any, Mapping[str, Array]], Array]
"""Calls a function with weights, and with inputs of which each device may compute a part."""


class ModelShape(NamedTuple):
    """What the engine needs to know of a model before it allocates."""

    graphdef: Any
    """The model's structure, for `layers.module.bind`."""
    num_token_ids: int
    """Ids that a prompt may hold."""
    vocab_size: int
    """Ids that have a logit."""
    hidden_size: int
    """Of the states that a step returns."""
    embed_width: int
    """Of the encoder's rows: more than an embedding's where features are fed to several layers."""
    dtype: Any
    """The dtype of hidden states, encoder outputs and the KV cache."""

    @classmethod
    def of(cls, graphdef: Any, params: Params) -> "ModelShape":
        """Find the shapes by `jax.eval_shape` of the model's methods."""
        model = bind(graphdef, params)
        text = getattr(model, "language_model", None)
        extra_width = getattr(text, "extra_width", 0)

        def probe(params: Params) -> tuple[Array, Array]:
            model = bind(graphdef, params)
            embeds = model.embed_input_ids(jnp.zeros(1, jnp.int32))
            states = jnp.pad(embeds, ((0, 0), (0, extra_width)))
            return embeds, model.compute_logits(states)

        embeds, logits = jax.eval_shape(probe, params)
        num_token_ids = max(logits.shape[1], getattr(model, "num_token_ids", 0))
        width, vocab_size = embeds.shape[1], logits.shape[1]
        embed_width = width * (1 + len(getattr(text, "fed_layers", ())))
        hidden_size = width + extra_width
        return cls(graphdef, num_token_ids, vocab_size, hidden_size, embed_width, embeds.dtype)


AdapterArrays = Mapping[str, Array]
"""The arrays of all slots, by their names in the tree (`layers/lora.py`)."""


class AdaptedModel(NamedTuple):
    """A model with room for adapters beside its layers."""

    graphdef: Any
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    """The shapes of its `AdapterArrays`."""
    has_towers: bool
    """Whether towers and connectors have room, too."""

    @classmethod
    def of(cls, graphdef: Any, abstract: Params, *, has_towers: bool) -> "AdaptedModel":
        """Find the arrays of adapters among a model's parameters."""
        leaves = flatten_params(abstract)
        names = [name for name in leaves if ".lora." in name and not name.endswith(_ROW_SLOTS)]
        return cls(graphdef, {name: leaves[name] for name in names}, has_towers)

    def bind(
        self, params: Params, adapters: AdapterArrays | None, slots: Int[Array, " rows"]
    ) -> Any:
        """Return the module, whose rows have the adapters of `slots`; call it under jit."""
        assert adapters is not None, "rows have slots, and nothing is in them"
        ends = {name: name.removesuffix(".a") for name in adapters if name.endswith(".lora.a")}
        rows = {f"{layer}{_ROW_SLOTS}": slots for layer in ends.values()}
        leaves = {**flatten_params(params), **adapters, **rows}
        return bind(self.graphdef, unflatten_params(leaves))


_ROW_SLOTS = ".slots"


class StepState(NamedTuple):
    """What `step` takes (donated) and returns."""

    kv_cache: KVCache
    hidden: Shaped[Array, "rows D"]
    """Hidden states after the final norm, with the rows of the largest bucket: a step of T tokens
    fills the first T, so that `sample` is compiled once for all buckets."""


def compute_whole(
    embed: Callable[[Any, Any], Array], weights: Any, inputs: Mapping[str, Array]
) -> Array:
    """Compute all inputs at once: the `Compute` of one device."""
    return embed(weights, inputs)


def encode(
    graphdef: Any,
    adapted: AdaptedModel | None,
    compute: Compute,
    *,
    params: Params,
    pool: Shaped[Array, "rows D"],
    inputs: Mapping[str, Array],
    dst_rows: Int[Array, " outputs"],
    adapters: AdapterArrays | None = None,
    returns_rows: bool = False,
) -> tuple[Shaped[Array, "rows D"], Int[Array, ""] | Shaped[Array, "outputs D"]]:
    """Encode a bucket of units, or packs, into rows of the pool; padding's are out of range.

    Returns the pool, and an array that is ready when it is, and is never donated: with
    `returns_rows` what was written.
    """

    def embed(weights: Any, inputs: Mapping[str, Array]) -> Array:
        params, adapters = weights
        model, given = bind(graphdef, params), dict(inputs)
        slots = given.pop(ADAPTER_SLOTS, None)
        if slots is None:
            return embed_units(model, given)
        assert adapted is not None, "units have slots"
        adapt = adapted.bind
        return jax.lax.cond(
            (slots >= 0).any(),
            lambda: embed_units(adapt(params, adapters, slots), given),
            lambda: embed_units(model, given),
        )

    embeds = compute(embed, (params, adapters), inputs)
    flat = embeds.reshape(-1, embeds.shape[-1])
    if flat.shape != (len(dst_rows), pool.shape[-1]):
        shape = f"{flat.shape[0]} rows of width {flat.shape[1]}"
        name = type(bind(graphdef, params)).__name__
        raise ValueError(
            f"`{name}.embed_multimodal` gives {shape}; by its `encoder_spec` this call "
            f"has {len(dst_rows)} rows, and the language model takes embeddings of width "
            f"{pool.shape[-1]}"
        )
    pool = write_rows(pool, flat, dst_rows)
    return pool, to_storage(flat, pool.dtype) if returns_rows else dst_rows[0]


def with_read_params(function: Any, described: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Return a function whose `params` are some, by name or as a tree; `described`: of all.

    In place of those that it does not read stand zeros, which XLA drops. A call costs the host time
    for each array that it is given; an encoder without its model does not hold the others.
    """

    @wraps(function.func)
    def call(*, params: Params, **arguments: Any) -> Any:
        given = flatten_params(params)
        leaves = {
            name: given[name] if name in given else jnp.zeros(leaf.shape, leaf.dtype)
            for name, leaf in described.items()
        }
        return function(params=unflatten_params(leaves), **arguments)

    return call


def encode_prompts(
    graphdef: Any,
    gather: Gather,
    *,
    params: Params,
    pool: Shaped[Array, "rows D"],
    token_ids: Int[Array, "B S"],
    src_rows: Int[Array, "B S"],
    dst_rows: Int[Array, "B S"],
) -> tuple[Shaped[Array, "rows D"], Int[Array, ""]]:
    """Run an encoder-decoder's encoder over prompts, of text and rows of the pool, into the pool.

    Token ids of padding are negative; `src_rows` of text are, too, and `dst_rows` of padding are
    out of range. Returns what `encode` returns.
    """
    model = bind(graphdef, params)
    text = model.embed_input_ids(jnp.maximum(token_ids, 0).reshape(-1))
    text = text.reshape(*token_ids.shape, -1)
    is_embed = (src_rows >= 0)[:, :, None]
    merged = jnp.where(is_embed, from_storage(pool[jnp.maximum(src_rows, 0)]), text)
    states = gather(model.encode_prompts(merged, token_ids >= 0), 0)
    rows = dst_rows.reshape(-1)
    return write_rows(pool, states.reshape(-1, pool.shape[-1]), rows), rows[0]


def align(
    graphdef: Any,
    gather: Gather,
    heads: Sequence[tuple[int, int]],
    *,
    params: Params,
    pool: Shaped[Array, "rows D"],
    token_ids: Int[Array, " T"],
    state_rows: Int[Array, " S"],
) -> Float[Array, "_heads T S"]:
    """Return how much a text's tokens attend to an encoder's states, which are rows of the pool.

    What stands behind the text changes nothing of it.
    """
    states = from_storage(pool[state_rows])
    return gather(bind(graphdef, params).align(token_ids, states, heads), 0)


def write_extra(
    graphdef: Any, params: Params, pool: Shaped[Array, "rows D"]
) -> Shaped[Array, "rows D"]:
    """Write the model's learned embeddings to the last rows of the pool, where they stay."""
    embeds = to_storage(bind(graphdef, params).extra_embeds(), pool.dtype)
    return jax.lax.dynamic_update_slice(pool, embeds, (len(pool) - len(embeds), 0))


def write_rows(
    pool: Shaped[Array, "rows D"],
    embeds: Float[Array, "outputs D"],
    dst_rows: Int[Array, " outputs"],
) -> Shaped[Array, "rows D"]:
    """Write embeddings to rows of the pool; out-of-range rows are dropped."""
    return pool.at[dst_rows].set(to_storage(embeds, pool.dtype), mode="drop")


def load_adapter(
    adapters: AdapterArrays, slot: Int[Array, ""], values: AdapterArrays
) -> AdapterArrays:
    """Write one adapter's arrays, which have no axis of slots, to its slot."""
    return {
        name: jax.lax.dynamic_update_index_in_dim(array, values[name], slot, slot_axis(name))
        for name, array in adapters.items()
    }


def copy_states(kv_cache: KVCache, source: Int[Array, ""], target: Int[Array, ""]) -> KVCache:
    """Copy what recurrent layers keep in one slot to another."""

    def copy(array: Float[Array, "_slots ..."]) -> Float[Array, "_slots ..."]:
        return jax.lax.dynamic_update_index_in_dim(array, array[source], target, 0)

    return tuple(
        jax.tree.map(copy, one) if isinstance(one, StateCache) else one for one in kv_cache
    )


def keep_states(
    kv_cache: KVCache, hidden: Shaped[Array, "rows D"], packed: Int[Array, "3 T"]
) -> KVCache:
    """Keep rows of the hidden states in slots, whose blocks and offsets stand behind the rows.

    The last columns of wider ones (`Decoder.extra_width`).
    """
    rows, blocks, offsets = packed
    *layers, kept = kv_cache
    assert isinstance(kept, KeptStates), "the cache keeps no states"
    states = hidden[rows, -kept.rows.shape[-1] :]
    return (*layers, kept.write(from_storage(states), blocks, offsets))


def join_states(
    graphdef: Any,
    *,
    params: Params,
    kv_cache: KVCache,
    hidden: Shaped[Array, "rows _wide"],
    packed: Int[Array, "3 T"],
) -> KVCache:
    """Keep, as `keep_states` does, what the layer that guesses makes of other states."""
    rows, blocks, offsets = packed
    *layers, kept = kv_cache
    assert isinstance(kept, KeptStates), "the cache keeps no states"
    text = bind(graphdef, params).language_model
    states = text.join_states(from_storage(hidden[rows]))
    return (*layers, kept.write(states, blocks, offsets))


def gather_blocks(kv_cache: KVCache, ids: Int[Array, " n"]) -> list[Shaped[Array, "n _arrays ..."]]:
    """Return blocks of a cache, those of arrays of one shape in one; recurrent layers have none.

    A call costs the host time for each array that it moves.
    """
    arrays = jax.tree.leaves(find_paged(kv_cache))
    return [jnp.stack([arrays[place][ids] for place in alike], axis=1) for alike in _group(arrays)]


def scatter_blocks(
    kv_cache: KVCache, ids: Int[Array, " n"], blocks: Sequence[Shaped[Array, "n _arrays ..."]]
) -> tuple[KVCache, Int[Array, ""]]:
    """Write what `gather_blocks` returned to blocks.

    Returns the cache, and an array that is ready when it is, and is never donated.
    """
    paged = find_paged(kv_cache)
    arrays, structure = jax.tree.flatten(paged)
    for alike, rows in zip(_group(arrays), blocks, strict=True):
        for number, place in enumerate(alike):
            arrays[place] = arrays[place].at[ids].set(rows[:, number])
    return (*jax.tree.unflatten(structure, arrays), *kv_cache[len(paged) :]), ids[0]


def _group(arrays: Sequence[Array]) -> list[list[int]]:
    """Return the places of arrays of one shape and dtype each."""
    groups: dict[Any, list[int]] = {}
    for place, array in enumerate(arrays):
        groups.setdefault((array.shape, array.dtype), []).append(place)
    return list(groups.values())


def find_paged(kv_cache: KVCache) -> KVCache:
    """Return the caches of layers with blocks, which stand before those of recurrent ones."""
    return tuple(one for one in kv_cache if not isinstance(one, StateCache))


def step(
    graphdef: Any,
    adapted: AdaptedModel | None,
    adds_row_to_one: bool,
    *,
    layout: Layout,
    params: Params,
    state: StepState,
    pool: Shaped[Array, "outputs D"],
    previous: Int[Array, " sampled"],
    packed: Int[Array, " size"],
    adapters: AdapterArrays | None = None,
) -> tuple[StepState, Int[Array, " rest"]]:
    """Compute a bucket of tokens: text, and embeddings from the pool.

    Tokens that the host has not read yet are rows of the `previous` sample. Encoder hidden states
    of an encoder-decoder model's new requests are rows of the pool, too. Returns the state, and
    the rest of the packed buffer: the input of `sample`.

    `adapters`: of a step whose tokens have any. `adds_row_to_one`: a lone token is computed beside
    padding. XLA multiplies one row on the CPU with other code, and fuses what makes it into sums
    over it: both add in another order.
    """
    batch = unpack_step(layout, packed)
    if adds_row_to_one and len(batch.token_ids) == 1:
        batch = add_padding_row(batch)
    if batch.adapter_slots is None:
        model = bind(graphdef, params)
    else:
        assert adapted is not None, "tokens have slots"
        model = adapted.bind(params, adapters, batch.adapter_slots)
    sampled = previous[jnp.maximum(batch.token_from, 0)]
    token_ids = jnp.where(batch.token_from >= 0, sampled, batch.token_ids)
    metadata = batch.metadata
    if metadata.cross is not None:
        metadata = metadata._replace(
            cross=metadata.cross._replace(encoder_hidden_states=from_storage(pool[batch.cross_src]))
        )
    states, kv_cache = compute_states(
        model,
        token_ids,
        src_index=batch.src_index,
        pool=pool,
        positions=batch.positions,
        kv_cache=state.kv_cache,
        metadata=metadata,
    )
    assert kv_cache is not None, "a step has a cache"
    stored = to_storage(states, state.hidden.dtype)
    hidden = jax.lax.dynamic_update_slice(state.hidden, stored, (0, 0))
    return StepState(kv_cache, hidden), packed[layout.size :]


def compute_states(
    model: Any,
    token_ids: Int[Array, " T"],
    *,
    src_index: Int[Array, " T"],
    pool: Shaped[Array, "outputs D"],
    positions: Int[Array, "3 T"],
    kv_cache: KVCache | None,
    metadata: AttentionMetadata,
) -> tuple[Float[Array, "T _width"], KVCache | None]:
    """Return the states of tokens: text, and the rows of the pool that `src_index` names."""
    text = model.embed_input_ids(token_ids)
    # Text has no features for layers of the decoder.
    text = jnp.pad(text, ((0, 0), (0, pool.shape[-1] - text.shape[-1])))
    is_embed = (src_index >= 0)[:, None]
    merged = jnp.where(is_embed, from_storage(pool[jnp.maximum(src_index, 0)]), text)
    reads_ids = getattr(getattr(model, "language_model", None), "reads_token_ids", False)
    more = {"token_ids": token_ids} if reads_ids else {}
    return model(merged, positions, kv_cache, metadata, **more)


def sample(
    graphdef: Any,
    adapted: AdaptedModel | None,
    placement: Placement,
    logprobs_mode: LogprobsMode,
    *,
    layout: Layout,
    num_rows: int,
    is_plain: bool,
    params: Params,
    hidden: Shaped[Array, "rows D"],
    packed: Int[Array, " size"],
    tables: SampleTables,
    previous: Int[Array, " sampled"],
    adapters: AdapterArrays | None = None,
) -> Int[Array, " sampled"] | SampleOutput:
    """Sample the next token of requests whose window ends.

    `is_plain`: all rows are greedy, without masks or log-probabilities. `tables`, `previous` and
    `logprobs_mode`: as in `sample_full`. The tokens fill the first
    `num_rows` of an array of fixed size, which the next step reads.
    """
    batch = unpack_sample(layout, packed, num_rows)
    rows, slots = from_storage(hidden[batch.rows]), batch.adapter_slots
    if slots is None:
        logits = bind(graphdef, params).compute_logits(rows)
    else:
        assert adapted is not None, "rows have slots"
        logits = jax.lax.cond(
            (slots >= 0).any(),
            lambda: adapted.bind(params, adapters, slots).compute_logits(rows),
            lambda: bind(graphdef, params).compute_logits(rows),
        )
    if is_plain:
        return _pad_tokens(placement.argmax(logits), layout)
    drawn = sample_full(placement.gather(logits, 1), batch, tables, previous, logprobs_mode)
    return drawn._replace(token_ids=_pad_tokens(drawn.token_ids, layout))


def pool_rows(
    graphdef: Any,
    *,
    params: Params,
    hidden: Shaped[Array, "rows D"],
    rows: Int[Array, " R"],
) -> Float[Array, "R _width"]:
    """Return what becomes vectors of some rows, in float32."""
    states = bind(graphdef, params).project_states(from_storage(hidden[rows]))
    return states.astype(jnp.float32)


def _pad_tokens(token_ids: Int[Array, " R"], layout: Layout) -> Int[Array, " sampled"]:
    (capacity,) = layout.slices["rows"][1]
    return jnp.pad(token_ids, (0, capacity - len(token_ids)))
