"""The jitted functions, and the shapes that they are compiled for.

All arguments but the parameters are given as shapes, so that programs are compiled, and their
memory is known, before anything is allocated.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Int, Shaped

from mmjax.config.engine_config import LogprobsMode
from mmjax.engine.device.batch import ADAPTER_SLOTS, StepSizes, sample_layout, step_layout
from mmjax.engine.device.compilation import Program, compiler_options, with_exact_products
from mmjax.engine.device.encoder import (
    Encoders,
    PromptCall,
    PromptCalls,
    WriteCall,
    WriteCalls,
)
from mmjax.engine.device.functions import (
    AdaptedModel,
    AdapterArrays,
    ModelShape,
    StepState,
    align,
    copy_states,
    encode,
    encode_prompts,
    find_paged,
    gather_blocks,
    join_states,
    keep_states,
    load_adapter,
    pool_rows,
    sample,
    scatter_blocks,
    step,
    with_read_params,
    write_extra,
    write_rows,
)
from mmjax.engine.device.mesh import Placement, shard_bytes
from mmjax.engine.device.sampler import SampleTables, empty_tables
from mmjax.engine.scheduling.buckets import Buckets, ProgramKey, SampleBucket, StepBucket
from mmjax.layers.attention.api import choose_cache_type
from mmjax.layers.attention.kv_cache import (
    KVCache,
    KVCacheSpec,
    LayerCache,
    StateCache,
    TransposedCache,
    allocate,
)
from mmjax.layers.cpu.product import is_small
from mmjax.layers.cpu.storage import storage_dtype
from mmjax.layers.linear import Linear
from mmjax.layers.module import Params, bind, flatten_params, unflatten_params
from mmjax.layers.quantization import PackedLinear
from mmjax.models.host_inputs import HostInputs
from mmjax.rounding import cdiv
from mmjax.system.allocator import return_pages_of_zeros, take_pages
from mmjax.weights.sharding import param_sharding

# ---- the jitted functions ----------------------------------------------------------------------


class DeviceArrays(NamedTuple):
    """All arrays on the device, besides the parameters."""

    state: StepState
    pool: Shaped[Array, "rows D"]
    """Encoder outputs."""
    previous: Int[Array, " sampled"]
    """The last sample."""


_STATIC_NAMES = ("layout", "num_rows", "is_plain")


class AlignCall(NamedTuple):
    """The host's arguments of one call of `align`."""

    token_ids: np.ndarray
    """int32[T]"""
    state_rows: np.ndarray
    """int32[S]: rows of the pool."""


class PoolCall(NamedTuple):
    """The host's arguments of one call of `pool_rows`."""

    rows: np.ndarray
    """int32[R]: rows of the hidden states; padding: 0."""


HostCall = WriteCall | PromptCall | AlignCall | PoolCall
"""The size of its program is the length of its first array."""
HELD = {
    "write": ("pool",),
    "encode prompts": ("params", "pool"),
    "align": ("params", "pool"),
    "pool": ("hidden",),
}
"""What the device has of the arguments of these functions, beside parameters by name."""


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
        logprobs_mode: LogprobsMode = "raw_logprobs",
        num_state_slots: int = 0,
        states_per_seq: int = 0,
        keeps_rows: bool = False,
        unread: Collection[str] = (),
        shared: Collection[str] = (),
        alignment_heads: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`cache_type` None: the platform's. `adapted`: None, `num_state_slots`: 0 without them.

        `keeps_rows`: whether what is encoded is returned, too.
        `unread`: parameters that are not held, of programs that encode and do nothing else.
        `shared`: parameters that the engine's model holds, of one that guesses for it.
        `alignment_heads`: as of `MultiModalModel`.
        """
        self.shared = frozenset(shared)
        self.alignment_heads = alignment_heads
        self.keeps_rows, self.embed_width = keeps_rows, shape.embed_width
        model = bind(shape.graphdef, params)
        self.buckets, self.adapted = buckets, adapted
        self.host_inputs, self.num_encoder_rows = host_inputs, num_encoder_rows
        self.num_extra_rows = 0 if unread else host_inputs.num_extra_rows
        num_rows = num_encoder_rows + self.num_extra_rows
        self.encoders = Encoders(
            host_inputs,
            placement,
            num_rows,
            min_units=2 if self._is_small(placement, model, is_tower=True) else 1,
            has_adapters=adapted is not None and adapted.has_towers,
        )
        self.write_calls = WriteCalls(num_rows=num_rows, width=shape.embed_width, dtype=shape.dtype)
        self.prompt_calls = PromptCalls(max_len=max_encoder_len, num_rows=num_rows)
        self.block_size = block_size
        self.num_state_slots, self.states_per_seq = num_state_slots, states_per_seq
        self.max_encoder_len = max_encoder_len
        self.step_sizes = StepSizes(
            *(max_blocks, cdiv(max_encoder_len, block_size)),
            *(host_inputs.attends_to_items, states_per_seq),
        )
        self.sample_layout = sample_layout(buckets.sample[-1], has_adapters=adapted is not None)
        self.num_token_ids, self.dtype = shape.num_token_ids, shape.dtype
        self.history_len = max_blocks * block_size
        """Tokens of the longest sequence."""
        self._shape, self.placement = shape, placement
        described = flatten_params(jax.tree.map(_describe_param, params))
        self._unread = {name: described.pop(name) for name in unread}
        self.params = unflatten_params(described)
        """Shapes, dtypes and shardings of the parameters that are held."""
        self._read: dict[str, frozenset[str]] = {}
        """By function, the parameters that it reads."""
        self._plan_caches(model.kv_cache_spec, cache_type)
        self._jit(model, logprobs_mode)

    def _plan_caches(self, spec: KVCacheSpec, cache_type: type[LayerCache] | None) -> None:
        dtype, self.num_lent = self._shape.dtype, spec.num_lent
        self.cache_type = cache_type or choose_cache_type(
            self.placement.platform,
            spec,
            dtype,
            num_shards=self.placement.num_kv_shards,
        )
        self._stored = storage_dtype(dtype, self.placement.platform)
        is_plain = self.cache_type is TransposedCache
        self._new_cache = partial(
            allocate,
            spec,
            block_size=self.block_size,
            dtype=self._stored if is_plain else dtype,
            cache_type=self.cache_type,
            sharding=self.placement.head_sharding,
            num_state_slots=self.num_state_slots,
        )

    def _jit(self, model: Any, logprobs_mode: LogprobsMode) -> None:
        graphdef, placement = self._shape.graphdef, self.placement
        # Outputs have the inputs' shardings: else the next call would be recompiled.
        whole: Any = placement.replicated
        kv_cache = self._shard_cache(model.kv_cache_spec)
        self._shardings = DeviceArrays(StepState(kv_cache, whole), whole, whole)

        def jit(function: Any, **options: Any) -> Any:
            exact = with_exact_products(function, placement.platform, self._shape.dtype)
            return jax.jit(exact, compiler_options=compiler_options(placement.platform), **options)

        described = flatten_params(self.params) | self._unread

        def make_encode(compute: Any) -> Any:
            returns_rows = self.keeps_rows or bool(self._unread)
            function = partial(encode, graphdef, self.adapted, compute, returns_rows=returns_rows)
            return with_read_params(function, described) if self._unread else function

        self._readers = {
            "step": partial(step, graphdef, self.adapted, self._adds_row_to_one(placement, model)),
            "sample": partial(sample, graphdef, self.adapted, placement, logprobs_mode),
            "pool": partial(pool_rows, graphdef),
        }
        """Functions that are called for each token, over whole trees of parameters."""
        step_of, sample_of, pool_of = (
            with_read_params(function, described) for function in self._readers.values()
        )
        self._functions = {
            **{
                function: jit(
                    make_encode(calls.compute), donate_argnames="pool", out_shardings=whole
                )
                for function, calls in self.encoders.by_function.items()
            },
            "encode prompts": jit(
                partial(encode_prompts, graphdef, placement.gather),
                donate_argnames="pool",
                out_shardings=whole,
            ),
            "align": jit(
                partial(align, graphdef, placement.gather, self.alignment_heads),
                out_shardings=whole,
            ),
            "write": jit(write_rows, donate_argnames="pool", out_shardings=whole),
            "step": jit(
                step_of,
                static_argnames="layout",
                donate_argnames="state",
                out_shardings=(self._shardings.state, whole),
            ),
            "sample": jit(
                sample_of,
                static_argnames=_STATIC_NAMES,
                out_shardings=whole,
            ),
            "pool": jit(pool_of, out_shardings=whole),
        }
        self._jit_others(jit, kv_cache, whole)

    def _jit_others(self, jit: Any, kv_cache: Any, whole: Any) -> None:
        """Jit what has one program each: copies within caches, and to them."""
        own = self._drop_lent(self._shardings)
        self.write_extra = jit(
            partial(write_extra, self._shape.graphdef), donate_argnames="pool", out_shardings=whole
        )
        self.copy_states = jit(copy_states, donate_argnames="kv_cache", out_shardings=kv_cache)
        self.keep_states = jit(
            keep_states, donate_argnames="kv_cache", out_shardings=own.state.kv_cache
        )
        joining = partial(join_states, self._shape.graphdef)
        self.join_states = jit(
            with_read_params(joining, flatten_params(self.params)),
            donate_argnames="kv_cache",
            out_shardings=own.state.kv_cache,
        )
        self._block_sharding = self.placement.heads(self.cache_type.HEAD_AXIS + 1)
        self.gather_blocks = jit(gather_blocks, out_shardings=self._block_sharding)
        self.scatter_blocks = jit(
            scatter_blocks, donate_argnames="kv_cache", out_shardings=(kv_cache, whole)
        )
        adapters = jax.tree.map(lambda leaf: leaf.sharding, self.describe_adapters())
        self.load_adapter = jit(load_adapter, donate_argnames="adapters", out_shardings=adapters)

    def _shard_cache(self, spec: KVCacheSpec) -> Any:
        """Return the shardings of the caches: one of all blocks, or of each layer's arrays."""
        heads: Any = self.placement.heads(self.cache_type.HEAD_AXIS)
        if spec.kept_width:
            return (*[heads] * len(spec.layers), self.placement.replicated)
        if not spec.states:
            return heads
        states = (
            StateCache(tuple(self.placement.slots(one.shape, one.cut_axis) for one in part.arrays))
            for part in spec.states
        )
        return (*[heads] * len(spec.layers), *states)

    @classmethod
    def _adds_row_to_one(cls, placement: Placement, model: Any) -> bool:
        """Return whether a lone token is computed beside padding (`step`).

        On a GPU XLA makes a quarter fewer kernels of two rows than of one, whose norms it does not
        fuse and whose products it adds up without matrix units (docs/performance.md).
        """
        return placement.platform == "gpu" or cls._is_small(placement, model, is_tower=False)

    @staticmethod
    def _is_small(placement: Placement, model: Any, *, is_tower: bool) -> bool:
        """Return whether a row has one state in all programs, and so needs another beside it.

        On the CPU, where no product depends on the number of rows (docs/determinism.md).
        """
        towers = getattr(model, "tower_names", ())
        weights = (
            module.weight.get_value() if isinstance(module, Linear) else module.describe_whole()
            for path, module in nnx.iter_modules(model)
            if isinstance(module, Linear | PackedLinear) and (path[0] in towers) == is_tower
        )
        return placement.platform == "cpu" and all(map(is_small, weights))

    @property
    def own_params(self) -> Params:
        """`params` without those that the engine's model holds."""
        leaves = flatten_params(self.params)
        return unflatten_params({n: leaf for n, leaf in leaves.items() if n not in self.shared})

    @property
    def vocab_size(self) -> int:
        """Tokens that have a logit."""
        return self._shape.vocab_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a KV block on one device."""
        described = (self._drop_lent(self.describe_arrays(number)) for number in (1, 2))
        one, two = (shard_bytes(arrays.state.kv_cache) for arrays in described)
        return two - one

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots of recurrent layers' states, on one device."""
        return shard_bytes(_find_states(self.describe_arrays(1)))

    # ---- arrays --------------------------------------------------------------------------------

    def make_arrays(self, num_blocks: int) -> DeviceArrays:
        """Allocate everything but the caches that are lent, zeroed.

        On the CPU a block takes memory when it is first written, or by `take_blocks`.
        """
        return jax.tree.map(self._make_zeros, self._drop_lent(self.describe_arrays(num_blocks)))

    def _make_zeros(self, described: jax.ShapeDtypeStruct) -> Array:
        zeros = _zeros_of(described)
        if self.placement.platform == "cpu":
            for shard in jax.block_until_ready(zeros).addressable_shards:
                return_pages_of_zeros(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        return zeros

    def take_blocks(self, kv_cache: KVCache, first: int, stop: int) -> None:
        """Have the system give the memory of some blocks of the CPU before they are written."""
        if self.placement.platform != "cpu":
            return
        for array in jax.tree.leaves(find_paged(kv_cache)):
            for shard in array.addressable_shards:
                block_bytes = shard.data.nbytes // len(shard.data)
                address = shard.data.unsafe_buffer_pointer() + first * block_bytes
                take_pages(address, (stop - first) * block_bytes)

    def describe_arrays(self, num_blocks: int) -> DeviceArrays:
        """Return shapes, dtypes and shardings of all arrays."""
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
        pool = jnp.zeros((num_rows, shape.embed_width), self._stored)
        previous = jnp.zeros(buckets.sample[-1], jnp.int32)
        return DeviceArrays(
            StepState(self._new_cache(num_blocks=num_blocks), hidden), pool, previous
        )

    def _drop_lent(self, arrays: DeviceArrays) -> DeviceArrays:
        """Return arrays, or their descriptions, without the caches that are lent."""
        if not self.num_lent:
            return arrays
        state = arrays.state
        return arrays._replace(state=state._replace(kv_cache=state.kv_cache[self.num_lent :]))

    def describe_block(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of one block's arrays, as `gather_blocks` returns them."""
        gathered = jax.eval_shape(
            gather_blocks, self.describe_arrays(1).state.kv_cache, np.zeros(1, np.int32)
        )
        return [jax.ShapeDtypeStruct(one.shape[1:], one.dtype) for one in gathered]

    @property
    def bytes_per_host_block(self) -> int:
        """Bytes of a KV block of all devices, in host memory."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self.describe_block())

    def put_blocks(self, blocks: Sequence[np.ndarray]) -> list[Any]:
        """Return what `gather_blocks` has returned as `scatter_blocks` takes it, on the devices.

        One device gets it with the call itself. It must not change any more.
        """
        if self.placement.mesh is None:
            return [self.placement.give(one) for one in blocks]
        return self.placement.put(blocks, self._block_sharding)

    def host_bytes(self, num_blocks: int) -> dict[str, int]:
        """Return the bytes of all arrays in the host's memory, by cause; none of accelerators."""
        if self.placement.platform != "cpu":
            return {}
        arrays = self._drop_lent(self.describe_arrays(num_blocks))
        number = len(self.placement.local_devices)
        parts = {
            "weights": self.own_params,
            "kv_cache": arrays.state.kv_cache,
            "encoder_outputs": arrays.pool,
            "hidden_states": (arrays.state.hidden, arrays.previous),
            "adapters": self.describe_adapters(),
        }
        return {cause: number * shard_bytes(part) for cause, part in parts.items()}

    def make_adapters(self) -> AdapterArrays | None:
        """Allocate all slots, zeroed; None: the engine has no adapters."""
        return jax.tree.map(_zeros_of, self.describe_adapters())

    def describe_adapters(self) -> Mapping[str, Any] | None:
        """Return shapes, dtypes and shardings of `make_adapters`."""
        if self.adapted is None:
            return None
        shapes, home = self.adapted.shapes, self.placement.home
        shardings = {name: param_sharding(name, leaf.shape, home) for name, leaf in shapes.items()}
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
            for name, leaf in shapes.items()
        }

    def empty_tables(self, num_rows: int) -> SampleTables:
        """Return the tables of a sample, on the host, which ask for nothing."""
        return empty_tables(num_rows, self.history_len, self.vocab_size)

    def empty_call(self, function: str, size: int) -> HostCall:
        """Return a call of padding."""
        if function == "write":
            return self.write_calls.empty(size)
        if function == "encode prompts":
            return self.prompt_calls.empty(size)
        zeros = np.zeros(size, np.int32)
        if function == "pool":
            return PoolCall(zeros)
        return AlignCall(zeros, np.zeros(self.max_encoder_len, np.int32))

    # ---- programs ------------------------------------------------------------------------------

    def make(self, num_blocks: int, keys: Iterable[ProgramKey] | None = None) -> list[Program]:
        """Return programs to compile; `keys` None: all."""
        arrays = self.describe_arrays(num_blocks)
        chosen = self.buckets.keys if keys is None else keys
        return [self._make(key, arrays) for key in chosen]

    def by_kind(self, num_blocks: int) -> dict[str, list[Program]]:
        """Return the programs of each function, the largest first."""
        programs: dict[str, list[Program]] = {name: [] for name in self._functions}
        for key, program in zip(self.buckets.keys, self.make(num_blocks), strict=True):
            programs[key.function].append(program)
        return programs

    def _make(self, key: ProgramKey, arrays: DeviceArrays) -> Program:
        described = self._describe_call(key, arrays)
        if key.function in self._readers:
            described["params"] = self.select_params(key.function, self.params)
        return Program(_label(key), self._functions[key.function], described)

    def _describe_call(self, key: ProgramKey, arrays: DeviceArrays) -> dict[str, Any]:
        """Return a call's arguments; of a function with `params` by name without these."""
        function, size = key
        if function == "step":
            return self._describe_step(size, arrays)
        if function == "sample":
            return self._describe_sample(size, arrays)
        if function in self.encoders.by_function:
            return self._describe_encode(function, size, arrays)
        held = {"params": self.params, "pool": arrays.pool, "hidden": arrays.state.hidden}
        given = self.empty_call(function, size)._asdict()
        described = {name: self._describe(one.shape, one.dtype) for name, one in given.items()}
        return {name: held[name] for name in HELD[function]} | described

    def select_params(self, function: str, params: Params) -> dict[str, Any]:
        """Return by name the parameters that "step", "sample" or "pool" is called with."""
        leaves = flatten_params(params)
        return {name: leaves[name] for name in sorted(self.find_read_by(function))}

    def find_read_by(self, function: str) -> frozenset[str]:
        """Return the names of the parameters that "step", "sample" or "pool" is called with."""
        if function not in self._read:
            kinds = {_kind(key.size): key for key in self.buckets.keys if key.function == function}
            arrays, read = self.describe_arrays(1), self._readers[function]
            found = (self._trace(read, self._describe_call(key, arrays)) for key in kinds.values())
            self._read[function] = frozenset[str]().union(*found)
        return self._read[function]

    def find_encoder_params(self) -> frozenset[str]:
        """Return the names of the parameters that encoder outputs depend on.

        Those that `encode` reads: of a model whose items are tokens' embeddings, the table, too.
        """
        if self._unread:
            return frozenset(flatten_params(self.params))
        sizes = self.buckets.encode_sizes
        found = (self._find_read(name, many[0]) for name, many in sizes.items() if many)
        return frozenset[str]().union(*found)

    def _find_read(self, function: str, bucket: int) -> frozenset[str]:
        given = self._describe_encode(function, bucket, self.describe_arrays(1))
        del given["params"]
        compute = self.encoders.by_function[function].compute
        return self._trace(partial(encode, self._shape.graphdef, self.adapted, compute), given)

    def _trace(self, function: Any, given: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of the parameters that a function reads."""
        static = {name: given[name] for name in _STATIC_NAMES if name in given}
        rest = {name: one for name, one in given.items() if name not in static}
        call = partial(function, **static)
        traced = jax.make_jaxpr(lambda params, rest: call(params=params, **rest))(self.params, rest)
        _, is_read = dce_jaxpr(traced.jaxpr, [True] * len(traced.out_avals))
        # The parameters' leaves come first, in the order of the tree.
        return frozenset(compress(flatten_params(self.params), is_read))

    def _describe_step(self, bucket: StepBucket, arrays: DeviceArrays) -> dict[str, Any]:
        layout = step_layout(bucket, self.step_sizes)
        return {
            "layout": layout,
            "state": arrays.state,
            "pool": arrays.pool,
            "previous": arrays.previous,
            "packed": self._describe((layout.size + self.sample_layout.size,)),
            "adapters": self.describe_adapters() if bucket.has_adapters else None,
        }

    def _describe_encode(self, function: str, bucket: int, arrays: DeviceArrays) -> dict[str, Any]:
        inputs, num_outputs = self.encoders.by_function[function].describe(bucket)
        return {
            "params": self.params,
            "pool": arrays.pool,
            "inputs": inputs,
            "dst_rows": self._describe((num_outputs,)),
            "adapters": self.describe_adapters() if ADAPTER_SLOTS in inputs else None,
        }

    def _describe_sample(self, bucket: SampleBucket, arrays: DeviceArrays) -> dict[str, Any]:
        tables = self.empty_tables(bucket.num_rows)
        return {
            "layout": self.sample_layout,
            "num_rows": bucket.num_rows,
            "is_plain": bucket.is_plain,
            "hidden": arrays.state.hidden,
            "packed": self._describe((self.sample_layout.size,)),
            "tables": jax.tree.map(lambda table: self._describe(table.shape), tables),
            "previous": arrays.previous,
            "adapters": self.describe_adapters(),
        }

    def _describe(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.placement.replicated)


def _find_states(arrays: DeviceArrays) -> list[StateCache]:
    """Return the caches of recurrent layers, which stand behind the others."""
    return [one for one in arrays.state.kv_cache if isinstance(one, StateCache)]


def _zeros_of(described: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(described.shape, described.dtype, device=described.sharding)


def _describe_param(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _kind(size: Any) -> Any:
    """Return what a size's program does that others of its function do not."""
    if isinstance(size, StepBucket):
        return size.has_spans, size.num_states > 0, size.has_adapters
    return size.is_plain if isinstance(size, SampleBucket) else None


def _label(key: ProgramKey) -> str:
    """Return the label of a program in the log."""
    function, size = key
    if isinstance(size, StepBucket):
        more = " with adapters" if size.has_adapters else ""
        return f"step {size.num_tokens} x {size.num_requests}{more}"
    if isinstance(size, SampleBucket):
        return f"sample {size.num_rows}{' greedy' if size.is_plain else ''}"
    return f"encode {size} prompts" if function == "encode prompts" else f"{function} {size}"
