"""The jitted functions, and the shapes that they are compiled for.

All arguments but the parameters are given as shapes, so that programs are compiled, and their
memory is known, before anything is allocated.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Shaped

from mmjax.engine.device.batch_layout import (
    ADAPTER_SLOTS,
    sample_layout,
    step_layout,
)
from mmjax.engine.device.compilation import CompiledFunction, Program, compiler_options
from mmjax.engine.device.encoder import make_encoder_calls
from mmjax.engine.device.functions import (
    AdaptedModel,
    AdapterArrays,
    ModelShape,
    StepState,
    encode,
    encode_prompts,
    load_adapter,
    sample,
    step,
    write_extra,
    write_rows,
)
from mmjax.engine.device.mesh import Placement, shard_bytes
from mmjax.engine.device.precomputed import PrecomputedEmbeds
from mmjax.engine.device.prompt_calls import PromptCalls
from mmjax.engine.device.sample_tables import SampleTables, empty_tables
from mmjax.engine.scheduling.buckets import Buckets, SampleBucket, Sizes, StepBucket
from mmjax.layers.attention.api import choose_cache_type
from mmjax.layers.attention.kv_cache import LayerCache, TransposedCache, allocate
from mmjax.layers.cpu.product import is_small
from mmjax.layers.cpu.storage import storage_dtype
from mmjax.layers.linear import Linear
from mmjax.layers.module import Params, bind
from mmjax.models.host_inputs import HostInputs
from mmjax.rounding import cdiv
from mmjax.weights.sharding import param_sharding

# ---- the jitted functions ----------------------------------------------------------------------


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

        def jit_by_size(function: Any, **options: Any) -> CompiledFunction:
            return CompiledFunction(jit(function, **options))

        self.encode = jit_by_size(
            partial(encode, graphdef, self.adapted, self.encoder_calls.gather),
            donate_argnames="pool",
            out_shardings=whole,
        )
        self.encode_prompts = jit_by_size(
            partial(encode_prompts, graphdef, placement.gather),
            donate_argnames="pool",
            out_shardings=whole,
        )
        self.write_extra = jit(
            partial(write_extra, graphdef), donate_argnames="pool", out_shardings=whole
        )
        self.write_rows = jit_by_size(write_rows, donate_argnames="pool", out_shardings=whole)
        self.step = jit_by_size(
            partial(step, graphdef, self.adapted, self._is_small(placement, model, is_tower=False)),
            static_argnames="layout",
            donate_argnames="state",
            out_shardings=(self._shardings.state, whole),
        )
        self.sample = jit_by_size(
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

    def host_bytes(self, num_blocks: int) -> dict[str, int]:
        """Return the bytes of all arrays in the host's memory, by cause; none of accelerators."""
        if self._placement.platform != "cpu":
            return {}
        arrays, number = self.describe_arrays(num_blocks), len(self._placement.local_devices)
        parts = {
            "weights": self._params,
            "kv_cache": arrays.state.kv_cache,
            "encoder_outputs": arrays.pool,
            "hidden_states": (arrays.state.hidden, arrays.previous),
            "adapters": self.describe_adapters(),
        }
        return {cause: number * shard_bytes(part) for cause, part in parts.items()}

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
            yield self.step.program(step_label(bucket), bucket, arguments)

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
            # A small call is padded, so that some buckets have one program.
            size = next(iter(inputs.values())).shape[0]
            yield self.encode.program(f"encode {bucket}", size, arguments)

    def _encodes_prompts(self, arrays: DeviceArrays, sizes: Sequence[int]) -> Iterator[Program]:
        for size in reversed(sizes):
            inputs = {
                name: self._describe(array.shape)
                for name, array in self.prompt_calls.empty(size)._asdict().items()
            }
            arguments = {"params": self._params, "pool": arrays.pool, **inputs}
            yield self.encode_prompts.program(f"encode {size} prompts", size, arguments)

    def _writes(self, arrays: DeviceArrays, sizes: Sequence[int]) -> Iterator[Program]:
        for size in reversed(sizes):
            embeds = jax.ShapeDtypeStruct(
                (size, self._shape.hidden_size),
                self._shape.dtype,
                sharding=self._placement.replicated,
            )
            arguments = {"pool": arrays.pool, "embeds": embeds, "dst_rows": self._flat(size)}
            yield self.write_rows.program(f"write {size}", size, arguments)

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
            yield self.sample.program(sample_label(bucket), bucket, arguments)

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
