"""The jitted functions, and the shapes that they are compiled for.

All arguments but the parameters are given as shapes, so that programs are compiled, and their
memory is known, before anything is allocated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from mmjax.engine.device.batch import (
    Layout,
    SampleTables,
    add_padding_row,
    empty_tables,
    sample_layout,
    step_layout,
    unpack_sample,
    unpack_step,
)
from mmjax.engine.device.compilation import Program, compiler_options
from mmjax.engine.device.encoder import ADAPTER_SLOTS, make_encoder_calls
from mmjax.engine.device.mesh import Placement, shard_bytes
from mmjax.engine.device.precomputed import PrecomputedEmbeds
from mmjax.engine.device.prompt_calls import PromptCalls
from mmjax.engine.device.sampler import SampleOutput, sample_full
from mmjax.engine.scheduling.buckets import Buckets, SampleBucket, Sizes, StepBucket
from mmjax.layers.attention.api import choose_cache_type
from mmjax.layers.attention.kv_cache import KVCache, LayerCache, TransposedCache, allocate
from mmjax.layers.cpu.product import is_small
from mmjax.layers.cpu.storage import from_storage, storage_dtype, to_storage
from mmjax.layers.linear import Linear
from mmjax.layers.module import Params, bind, flatten_params, unflatten_params
from mmjax.models.host_inputs import HostInputs
from mmjax.models.interface import embed_units
from mmjax.rounding import cdiv
from mmjax.weights.adapter import slot_axis
from mmjax.weights.sharding import param_sharding

Gather = Callable[[Array, int], Array]
"""Replicates an array that the devices computed in parts along an axis."""


class ModelShape(NamedTuple):
    """What the engine needs to know of a model before it allocates."""

    graphdef: Any
    """The model's structure, for `layers.module.bind`."""
    num_token_ids: int
    """Ids that a prompt may hold."""
    vocab_size: int
    """Ids that have a logit."""
    hidden_size: int
    dtype: Any
    """Of hidden states, encoder outputs and the KV cache."""

    @classmethod
    def of(cls, graphdef: Any, params: Params) -> "ModelShape":
        """Find the shapes by `jax.eval_shape` of the model's methods."""

        def probe(params: Params) -> tuple[Array, Array]:
            model = bind(graphdef, params)
            embeds = model.embed_input_ids(jnp.zeros(1, jnp.int32))
            return embeds, model.compute_logits(embeds)

        embeds, logits = jax.eval_shape(probe, params)
        num_token_ids = max(logits.shape[1], getattr(bind(graphdef, params), "num_token_ids", 0))
        return cls(graphdef, num_token_ids, logits.shape[1], embeds.shape[1], embeds.dtype)


AdapterArrays = Mapping[str, Array]
"""The arrays of all slots, by their names in the tree (`layers/lora.py`)."""


class AdaptedModel(NamedTuple):
    """A model with room for adapters beside its layers."""

    graphdef: Any
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    """Of its `AdapterArrays`."""
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


# ---- the jitted functions ----------------------------------------------------------------------


def encode(
    graphdef: Any,
    adapted: AdaptedModel | None,
    gather: Gather,
    *,
    params: Params,
    pool: Shaped[Array, "rows D"],
    inputs: Mapping[str, Array],
    dst_rows: Int[Array, " outputs"],
    adapters: AdapterArrays | None = None,
) -> tuple[Shaped[Array, "rows D"], Int[Array, ""]]:
    """Encode a bucket of units, or a pack, into rows of the pool; padding's are out of range.

    Returns the pool, and an array that is ready when it is, and is never donated.
    """
    model = bind(graphdef, params)
    given = dict(inputs)
    slots = given.pop(ADAPTER_SLOTS, None)
    if slots is None:
        embeds = embed_units(model, given)
    else:
        assert adapted is not None, "units have slots"
        embeds = jax.lax.cond(
            (slots >= 0).any(),
            lambda: embed_units(adapted.bind(params, adapters, slots), given),
            lambda: embed_units(model, given),
        )
    flat = gather(embeds, 0).reshape(-1, embeds.shape[-1])
    if flat.shape != (len(dst_rows), pool.shape[-1]):
        shape = f"{flat.shape[0]} rows of width {flat.shape[1]}"
        raise ValueError(
            f"`{type(model).__name__}.embed_multimodal` gives {shape}; by its `encoder_spec` this "
            f"call has {len(dst_rows)} rows, and the language model's width is {pool.shape[-1]}"
        )
    return write_rows(pool, flat, dst_rows), dst_rows[0]


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
    text = model.embed_input_ids(jnp.where(batch.token_from >= 0, sampled, batch.token_ids))
    is_embed = (batch.src_index >= 0)[:, None]
    merged = jnp.where(is_embed, from_storage(pool[jnp.maximum(batch.src_index, 0)]), text)
    metadata = batch.metadata
    if metadata.cross is not None:
        metadata = metadata._replace(
            cross=metadata.cross._replace(encoder_hidden_states=from_storage(pool[batch.cross_src]))
        )
    states, kv_cache = model(merged, batch.positions, state.kv_cache, metadata)
    stored = to_storage(states, state.hidden.dtype)
    hidden = jax.lax.dynamic_update_slice(state.hidden, stored, (0, 0))
    return StepState(kv_cache, hidden), packed[layout.size :]


def sample(
    graphdef: Any,
    adapted: AdaptedModel | None,
    placement: Placement,
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

    `is_plain`: all rows are greedy, without masks or log-probabilities. `tables` and `previous`:
    as in `sample_full`. The tokens fill the first
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
    drawn = sample_full(placement.gather(logits, 1), batch, tables, previous)
    return drawn._replace(token_ids=_pad_tokens(drawn.token_ids, layout))


def _pad_tokens(token_ids: Int[Array, " R"], layout: Layout) -> Int[Array, " sampled"]:
    (capacity,) = layout.slices["rows"][1]
    return jnp.pad(token_ids, (0, capacity - len(token_ids)))


class DeviceArrays(NamedTuple):
    """All arrays on the device, besides the parameters."""

    state: StepState
    pool: Shaped[Array, "rows D"]
    """Encoder outputs."""
    previous: Int[Array, " sampled"]
    """The last sample."""


class Programs:
    """The jitted functions of one model on one placement, for all buckets."""

    def __init__(
        self,
        shape: ModelShape,
        params: Params,
        *,
        buckets: Buckets,
        placement: Placement,
        host_inputs: HostInputs,
        num_encoder_rows: int,
        block_size: int,
        max_blocks: int,
        max_encoder_len: int = 0,
        cache_type: type[LayerCache] | None = None,
        adapted: AdaptedModel | None = None,
    ) -> None:
        """`cache_type` None: the one of the placement's platform. `adapted` None: no adapters."""
        model = bind(shape.graphdef, params)
        self.buckets, self.adapted = buckets, adapted
        self.num_encoder_rows = num_encoder_rows
        self.num_extra_rows = host_inputs.num_extra_rows
        num_rows = num_encoder_rows + host_inputs.num_extra_rows
        self.encoder_calls = make_encoder_calls(
            host_inputs.encoder_spec,
            placement,
            num_rows,
            min_units=2 if self._is_small(placement, model, is_tower=True) else 1,
            has_adapters=adapted is not None and adapted.has_towers,
        )
        self.precomputed = PrecomputedEmbeds(
            is_enabled=bool(buckets.write),
            num_rows=num_rows,
            width=shape.hidden_size,
            dtype=shape.dtype,
        )
        self.prompt_calls = PromptCalls(max_len=max_encoder_len, num_rows=num_rows)
        max_encoder_blocks = cdiv(max_encoder_len, block_size)
        self.step_layouts = {
            bucket: step_layout(bucket, max_blocks, max_encoder_blocks) for bucket in buckets.steps
        }
        self.sample_layout = sample_layout(buckets.sample[-1], has_adapters=adapted is not None)
        self.num_token_ids = shape.num_token_ids
        self.history_len = max_blocks * block_size
        """Tokens of the longest sequence."""
        self._shape, self._params, self._placement = shape, params, placement
        self._cache_type = cache_type or choose_cache_type(
            placement.platform,
            model.kv_cache_spec,
            shape.dtype,
            num_shards=placement.num_kv_shards,
        )
        self._stored = storage_dtype(shape.dtype, placement.platform)
        is_plain = self._cache_type is TransposedCache
        self._new_cache = partial(
            allocate,
            model.kv_cache_spec,
            block_size=block_size,
            dtype=self._stored if is_plain else shape.dtype,
            cache_type=self._cache_type,
            sharding=placement.head_sharding,
        )
        self._jit(model)

    def _jit(self, model: Any) -> None:
        graphdef, placement = self._shape.graphdef, self._placement
        # Outputs have the inputs' shardings: else the next call would be recompiled.
        whole: Any = placement.replicated
        kv_cache: Any = placement.heads(self._cache_type.HEAD_AXIS)
        self._shardings = DeviceArrays(StepState(kv_cache, whole), whole, whole)
        jit = partial(jax.jit, compiler_options=compiler_options(placement.platform))
        self.encode = jit(
            partial(encode, graphdef, self.adapted, self.encoder_calls.gather),
            donate_argnames="pool",
            out_shardings=whole,
        )
        self.encode_prompts = jit(
            partial(encode_prompts, graphdef, placement.gather),
            donate_argnames="pool",
            out_shardings=whole,
        )
        self.write_extra = jit(
            partial(write_extra, graphdef), donate_argnames="pool", out_shardings=whole
        )
        self.write_rows = jit(write_rows, donate_argnames="pool", out_shardings=whole)
        self.step = jit(
            partial(step, graphdef, self.adapted, self._is_small(placement, model, is_tower=False)),
            static_argnames="layout",
            donate_argnames="state",
            out_shardings=(self._shardings.state, whole),
        )
        self.sample = jit(
            partial(sample, graphdef, self.adapted, placement),
            static_argnames=("layout", "num_rows", "is_plain"),
            out_shardings=whole,
        )
        self.load_adapter = jit(
            load_adapter, donate_argnames="adapters", out_shardings=self._adapter_shardings
        )

    @staticmethod
    def _is_small(placement: Placement, model: Any, *, is_tower: bool) -> bool:
        """Return whether a row has one state in all programs, and so needs another beside it.

        On the CPU, where no product depends on the number of rows (docs/determinism.md).
        """
        towers = getattr(model, "tower_names", ())
        weights = (
            module.weight.get_value()
            for path, module in nnx.iter_modules(model)
            if isinstance(module, Linear) and (path[0] in towers) == is_tower
        )
        return placement.platform == "cpu" and all(map(is_small, weights))

    @property
    def vocab_size(self) -> int:
        """Tokens that have a logit."""
        return self._shape.vocab_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a KV block on one device."""
        one, two = (shard_bytes(self.describe_arrays(number).state.kv_cache) for number in (1, 2))
        return two - one

    # ---- arrays --------------------------------------------------------------------------------

    def make_arrays(self, num_blocks: int) -> DeviceArrays:
        """Allocate everything, zeroed."""
        return self._placement.make(partial(self._zeros, num_blocks), self._shardings)

    def describe_arrays(self, num_blocks: int) -> DeviceArrays:
        """Return shapes, dtypes and shardings of `make_arrays`."""
        shapes = jax.eval_shape(partial(self._zeros, num_blocks))
        return jax.tree.map(
            lambda sharding, part: jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), part
            ),
            self._shardings,
            shapes,
        )

    def _zeros(self, num_blocks: int) -> DeviceArrays:
        shape, buckets = self._shape, self.buckets
        hidden = jnp.zeros((buckets.max_num_tokens, shape.hidden_size), self._stored)
        num_rows = self.num_encoder_rows + self.num_extra_rows
        pool = jnp.zeros((num_rows, shape.hidden_size), self._stored)
        previous = jnp.zeros(buckets.sample[-1], jnp.int32)
        return DeviceArrays(
            StepState(self._new_cache(num_blocks=num_blocks), hidden), pool, previous
        )

    @property
    def _adapter_shardings(self) -> dict[str, Any]:
        shapes, mesh = ({} if self.adapted is None else self.adapted.shapes), self._placement.mesh
        return {name: param_sharding(name, leaf.shape, mesh) for name, leaf in shapes.items()}

    def make_adapters(self) -> AdapterArrays | None:
        """Allocate all slots, zeroed; None: the engine has no adapters."""
        if self.adapted is None:
            return None
        shapes = self.adapted.shapes

        def zeros() -> AdapterArrays:
            return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}

        return self._placement.make(zeros, self._adapter_shardings)

    def describe_adapters(self) -> Mapping[str, Any] | None:
        """Return shapes, dtypes and shardings of `make_adapters`."""
        if self.adapted is None:
            return None
        shardings = self._adapter_shardings
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
            for name, leaf in self.adapted.shapes.items()
        }

    def empty_tables(self, num_rows: int) -> SampleTables:
        """Return the tables of a sample, on the host, which ask for nothing."""
        return empty_tables(num_rows, self.history_len, self.vocab_size)

    # ---- programs ------------------------------------------------------------------------------

    def all(self, num_blocks: int, sizes: Sizes | None = None) -> list[Program]:
        """Return every program that serving calls, those that compile slowly first.

        `sizes`: only theirs.
        """
        return [program for kind in self.by_kind(num_blocks, sizes).values() for program in kind]

    def by_kind(self, num_blocks: int, sizes: Sizes | None = None) -> dict[str, list[Program]]:
        """Return the programs of each function, the largest first; `sizes`: only theirs."""
        arrays = self.describe_arrays(num_blocks)
        chosen = sizes or self.buckets.sizes
        return {
            "step": list(self._steps(arrays, chosen.steps)),
            "encode": list(self._encodes(arrays, chosen.encode)),
            "encode prompts": list(self._encodes_prompts(arrays, chosen.prompts)),
            "write": list(self._writes(arrays, chosen.write)),
            "sample": list(self._samples(arrays, chosen.sample)),
        }

    def _steps(self, arrays: DeviceArrays, sizes: Sequence[StepBucket]) -> Iterator[Program]:
        for bucket in reversed(sizes):
            layout = self.step_layouts[bucket]
            arguments = {
                "layout": layout,
                "params": self._params,
                "state": arrays.state,
                "pool": arrays.pool,
                "previous": arrays.previous,
                "packed": self._flat(layout.size + self.sample_layout.size),
                "adapters": self.describe_adapters() if bucket.has_adapters else None,
            }
            yield Program(step_label(bucket), self.step, arguments)

    def _encodes(self, arrays: DeviceArrays, sizes: Sequence[int]) -> Iterator[Program]:
        for bucket in reversed(sizes):
            inputs, num_outputs = self.encoder_calls.describe(bucket)
            arguments = {
                "params": self._params,
                "pool": arrays.pool,
                "inputs": inputs,
                "dst_rows": self._flat(num_outputs),
                "adapters": self.describe_adapters() if ADAPTER_SLOTS in inputs else None,
            }
            yield Program(f"encode {bucket}", self.encode, arguments)

    def _encodes_prompts(self, arrays: DeviceArrays, sizes: Sequence[int]) -> Iterator[Program]:
        for size in reversed(sizes):
            inputs = {
                name: self._describe(array.shape)
                for name, array in self.prompt_calls.empty(size)._asdict().items()
            }
            arguments = {"params": self._params, "pool": arrays.pool, **inputs}
            yield Program(f"encode {size} prompts", self.encode_prompts, arguments)

    def _writes(self, arrays: DeviceArrays, sizes: Sequence[int]) -> Iterator[Program]:
        for size in reversed(sizes):
            embeds = jax.ShapeDtypeStruct(
                (size, self._shape.hidden_size),
                self._shape.dtype,
                sharding=self._placement.replicated,
            )
            arguments = {"pool": arrays.pool, "embeds": embeds, "dst_rows": self._flat(size)}
            yield Program(f"write {size}", self.write_rows, arguments)

    def _samples(self, arrays: DeviceArrays, sizes: Sequence[SampleBucket]) -> Iterator[Program]:
        for bucket in reversed(sizes):
            arguments = {
                "layout": self.sample_layout,
                "num_rows": bucket.num_rows,
                "is_plain": bucket.is_plain,
                "params": self._params,
                "hidden": arrays.state.hidden,
                "packed": self._flat(self.sample_layout.size),
                "tables": jax.tree.map(
                    lambda table: self._describe(table.shape), self.empty_tables(bucket.num_rows)
                ),
                "previous": arrays.previous,
                "adapters": self.describe_adapters(),
            }
            yield Program(sample_label(bucket), self.sample, arguments)

    def _flat(self, size: int) -> jax.ShapeDtypeStruct:
        return self._describe((size,))

    def _describe(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._placement.replicated)


def step_label(bucket: StepBucket) -> str:
    """Return the label of a step's program in the log."""
    more = " with adapters" if bucket.has_adapters else ""
    return f"step {bucket.num_tokens} x {bucket.num_requests}{more}"


def sample_label(bucket: SampleBucket) -> str:
    """Return the label of a sample's program in the log."""
    return f"sample {bucket.num_rows}{' greedy' if bucket.is_plain else ''}"
