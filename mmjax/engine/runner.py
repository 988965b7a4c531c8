"""Runs what the scheduler decided: parameters, caches and the three jitted functions.

Knows no queue and no policy. Every array on the device has its final size from the start.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from mmjax.engine.batch import (
    BatchBuilder,
    Layout,
    step_layout,
    unpack_sample,
    unpack_step,
)
from mmjax.engine.buckets import Buckets, StepBucket, next_bucket
from mmjax.engine.encoder_rows import EncoderRows
from mmjax.engine.mesh import Placement
from mmjax.engine.outputs import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from mmjax.engine.request import EncoderItem
from mmjax.engine.sampler import SampleOutput, sample_full, sample_greedy
from mmjax.layers.kv_cache import KVCache, allocate
from mmjax.layers.module import Params, bind
from mmjax.transport.messages import TokenLogprobs

Replicate = Callable[[Array], Array]
"""Makes an array whole on every device that shares it; the identity on one device."""


class ModelShape(NamedTuple):
    """What the engine must know of a model before it allocates."""

    graphdef: Any
    """The model's structure, for `layers.module.bind`."""
    vocab_size: int
    hidden_size: int
    dtype: Any
    """Of hidden states, encoder outputs and the KV cache."""

    @classmethod
    def of(cls, graphdef: Any, params: Params) -> "ModelShape":
        """Ask the model's own functions, abstractly."""

        def probe(params: Params) -> tuple[Array, Array]:
            model = bind(graphdef, params)
            embeds = model.embed_input_ids(jnp.zeros(1, jnp.int32))
            return embeds, model.compute_logits(embeds)

        embeds, logits = jax.eval_shape(probe, params)
        return cls(graphdef, logits.shape[1], embeds.shape[1], embeds.dtype)


class StepState(NamedTuple):
    """What `step` consumes and returns: donated, so that nothing is copied."""

    kv_cache: KVCache
    hidden: Float[Array, "rows D"]
    """States after the final norm, of the size of the largest bucket: a step of T tokens fills the
    first T rows, so that `sample` compiles once for all of them."""


# ---- the three jitted functions ----------------------------------------------------------------


def encode(
    graphdef: Any,
    replicate: Replicate,
    params: Params,
    pool: Float[Array, "rows D"],
    inputs: Mapping[str, Array],
    dst_rows: Int[Array, " outputs"],
) -> Float[Array, "rows D"]:
    """Encode a bucket of units into their rows of the pool; padding has rows out of range."""
    embeds = bind(graphdef, params).embed_multimodal(**inputs)
    flat = embeds.reshape(-1, embeds.shape[-1]).astype(pool.dtype)
    return pool.at[dst_rows].set(replicate(flat), mode="drop")


def step(
    graphdef: Any,
    layout: Layout,
    params: Params,
    state: StepState,
    pool: Float[Array, "outputs D"],
    previous: Int[Array, " sampled"],
    packed: Int[Array, " size"],
) -> tuple[StepState, Int[Array, " rest"]]:
    """Compute a bucket of tokens: text, and embeddings out of the pool.

    Tokens that the host does not know yet are rows of the `previous` sample. Returned beside the
    state is what follows the step in its buffer: the sample's input, on the device already.
    """
    model = bind(graphdef, params)
    batch = unpack_step(layout, packed)
    sampled = previous[jnp.maximum(batch.token_from, 0)]
    text = model.embed_input_ids(jnp.where(batch.token_from >= 0, sampled, batch.token_ids))
    is_embed = (batch.src_index >= 0)[:, None]
    merged = jnp.where(is_embed, pool[jnp.maximum(batch.src_index, 0)], text)
    states, kv_cache = model(merged, batch.positions, state.kv_cache, batch.metadata)
    hidden = jax.lax.dynamic_update_slice(state.hidden, states, (0, 0))
    return StepState(kv_cache, hidden), packed[layout.size :]


def sample(
    graphdef: Any,
    replicate: Replicate,
    layout: Layout,
    num_rows: int,
    is_plain: bool,
    params: Params,
    hidden: Float[Array, "rows D"],
    packed: Int[Array, " size"],
) -> Int[Array, " R"] | SampleOutput:
    """Draw the next token of the rows that end a request's window.

    `is_plain`: all rows are greedy, without masks or log-probabilities. The tokens fill the first
    `num_rows` of an array that has one size always, since the next step reads it.
    """
    batch = unpack_sample(layout, packed, num_rows)
    logits = replicate(bind(graphdef, params).compute_logits(hidden[batch.rows]))
    if is_plain:
        return _pad_tokens(sample_greedy(logits), layout)
    drawn = sample_full(logits, batch)
    return drawn._replace(token_ids=_pad_tokens(drawn.token_ids, layout))


def _pad_tokens(token_ids: Int[Array, " R"], layout: Layout) -> Int[Array, " sampled"]:
    (capacity,) = layout.slices["rows"][1]
    return jnp.pad(token_ids, (0, capacity - len(token_ids)))


class InFlight(NamedTuple):
    """A step that was given to the device."""

    sampled: list[ScheduledRequest]
    """Whose tokens it samples, in the order of their rows."""
    drawn: Array | SampleOutput
    """Where nothing is sampled: something that is there once the step is over."""


class ModelRunner:
    """Holds the device's arrays, and runs steps over them."""

    def __init__(
        self,
        shape: ModelShape,
        params: Params,
        *,
        buckets: Buckets,
        num_blocks: int,
        block_size: int,
        max_blocks: int,
        num_encoder_rows: int,
        placement: Placement,
    ) -> None:
        model = bind(shape.graphdef, params)
        self.buckets = buckets
        self.rows = EncoderRows(num_encoder_rows)
        self._shape = shape
        self._params = params
        self._placement = placement
        self._encoder_spec = model.encoder_spec
        self._num_blocks = num_blocks
        self._new_cache = partial(
            allocate,
            model.kv_cache_spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=shape.dtype,
        )
        self._builder = BatchBuilder(
            num_blocks=num_blocks,
            block_size=block_size,
            max_blocks=max_blocks,
            max_num_seqs=buckets.sample[-1],
            rows_of=self.rows.get,
            has_spans=model.has_bidirectional_spans,
        )
        self._jit()
        self.reset()

    def _jit(self) -> None:
        graphdef, placement = self._shape.graphdef, self._placement
        # What comes out lies where it lay: else the next call would compile anew.
        self._encode = jax.jit(
            partial(encode, graphdef, placement.replicate),
            donate_argnames="pool",
            out_shardings=placement.replicated,
        )
        self._step = jax.jit(
            partial(step, graphdef),
            static_argnames="layout",
            donate_argnames="state",
            out_shardings=(
                StepState(placement.kv_cache, placement.replicated),
                placement.replicated,
            ),
        )
        self._sample = jax.jit(
            partial(sample, graphdef, placement.replicate),
            static_argnames=("layout", "num_rows", "is_plain"),
            out_shardings=placement.replicated,
        )
        self._step_layouts = {
            bucket: step_layout(bucket, self._builder.max_blocks) for bucket in self.buckets.steps
        }

    def reset(self) -> None:
        """Make all caches anew: at the start, and after a step that failed half-way."""
        self.rows.reset()
        placement = self._placement
        whole = placement.replicated
        self._state, self._pool, self._previous = placement.make(
            self._zeros, (StepState(placement.kv_cache, whole), whole, whole)
        )

    def _zeros(self) -> tuple[StepState, Array, Array]:
        shape = self._shape
        hidden = jnp.zeros((self.buckets.max_num_tokens, shape.hidden_size), shape.dtype)
        pool = jnp.zeros((self.rows.num_rows, shape.hidden_size), shape.dtype)
        previous = jnp.zeros(self.buckets.sample[-1], jnp.int32)
        return StepState(self._new_cache(), hidden), pool, previous

    # ---- one step ------------------------------------------------------------------------------

    def dispatch(self, output: SchedulerOutput) -> InFlight | None:
        """Have the device encode, compute and sample; return at once. None: there is no step.

        Tokens in flight are looked for in the sample of the dispatch before this one.
        """
        for identifier in output.freed_identifiers:
            self.rows.free(identifier)
        self._encode_items(output.encoder_items)
        if not output.requests:
            return None
        bucket = self.buckets.step_bucket(output.num_tokens, len(output.requests))
        packed, is_plain = self._builder.build(output.requests, bucket)
        rest = self._run_step(bucket, packed)
        sampled = [scheduled for scheduled in output.requests if scheduled.samples]
        if not sampled:
            return InFlight(sampled, rest)
        size = next_bucket(self.buckets.sample, len(sampled))
        return InFlight(sampled, self._run_sample(size, is_plain, rest))

    def read(self, in_flight: InFlight) -> ModelRunnerOutput:
        """Wait for a step; return the tokens of the requests whose window ends them."""
        if not in_flight.sampled:
            jax.block_until_ready(in_flight.drawn)
            return {}
        return _read(in_flight.sampled, jax.device_get(in_flight.drawn))

    def _run_step(self, bucket: StepBucket, packed: np.ndarray) -> Array:
        self._state, rest = self._step(
            layout=self._step_layouts[bucket],
            params=self._params,
            state=self._state,
            pool=self._pool,
            previous=self._previous,
            packed=self._placement.put(packed),
        )
        return rest

    def _run_sample(self, num_rows: int, is_plain: bool, rest: Array) -> Array | SampleOutput:
        drawn = self._sample(
            layout=self._builder.sample_layout,
            num_rows=num_rows,
            is_plain=is_plain,
            params=self._params,
            hidden=self._state.hidden,
            packed=rest,
        )
        self._previous = drawn.token_ids if isinstance(drawn, SampleOutput) else drawn
        return drawn

    def _run_encode(self, inputs: Mapping[str, np.ndarray], dst_rows: np.ndarray) -> None:
        num_units = len(next(iter(inputs.values())))
        on_device = self._placement.put(inputs, self._placement.units(num_units))
        rows = self._placement.put(dst_rows)
        self._pool = self._encode(
            params=self._params, pool=self._pool, inputs=on_device, dst_rows=rows
        )

    def _encode_items(self, items: Sequence[EncoderItem]) -> None:
        """Encode all units of `items`, which may share calls and be split over them."""
        items = [item for item in items if item.identifier not in self.rows]
        if not items:
            return
        rows = [self.rows.allocate(item.identifier, item.num_embeds) for item in items]
        dst_rows = np.concatenate(rows).reshape(-1, self._encoder_spec.tokens_per_unit)
        units = {
            name: np.concatenate([item.units[name] for item in items])
            for name in self._encoder_spec.inputs
        }
        start = 0
        for bucket, count in self.buckets.unit_calls(len(dst_rows)):
            inputs, padded_rows = self._empty_units(bucket)
            padded_rows[:count] = dst_rows[start : start + count]
            for name, padded in inputs.items():
                padded[:count] = units[name][start : start + count]
            self._run_encode(inputs, padded_rows.reshape(-1))
            start += count

    def _empty_units(self, bucket: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        spec = self._encoder_spec
        size = self._placement.padded_units(bucket)
        inputs = {
            name: np.zeros((size, *shape), dtype) for name, (shape, dtype) in spec.inputs.items()
        }
        return inputs, np.full((size, spec.tokens_per_unit), self.rows.num_rows, np.int32)

    # ---- warm-up -------------------------------------------------------------------------------

    def warm_up(self, *, use_tqdm: bool) -> int:
        """Compile and run every bucket on padding alone; return the number of programs."""
        calls = list(self._warm_up_calls())
        with tqdm(calls, desc="Compiling", unit="program", disable=not use_tqdm) as progress:
            for label, run in progress:
                progress.set_postfix_str(label)
                jax.block_until_ready(run())
        return len(calls)

    def _warm_up_calls(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for bucket in self.buckets.encode:
            inputs, rows = self._empty_units(bucket)
            yield f"encode {bucket}", partial(self._run_encode, inputs, rows.reshape(-1))
        for bucket in reversed(self.buckets.steps):
            label = f"step {bucket.num_tokens} x {bucket.num_requests}"
            yield label, partial(self._warm_up_step, bucket)
        for size in self.buckets.sample:
            for is_plain in (True, False):
                yield f"sample {size}", partial(self._warm_up_sample, size, is_plain)

    def _warm_up_step(self, bucket: StepBucket) -> Array:
        packed, fields = self._builder.empty_step(bucket)
        fields["num_blocks_bound"][...] = 1
        return self._run_step(bucket, packed)

    def _warm_up_sample(self, num_rows: int, is_plain: bool) -> Any:
        rest = self._warm_up_step(self.buckets.steps[0])
        return jax.device_get(self._run_sample(num_rows, is_plain, rest))


def _read(
    sampled: Sequence[ScheduledRequest], drawn: np.ndarray | SampleOutput
) -> ModelRunnerOutput:
    """Return each request's token, with log-probabilities where it asked for them."""
    if not isinstance(drawn, SampleOutput):
        tokens = drawn.tolist()
        return {
            scheduled.request.request_id: SampledToken(tokens[row])
            for row, scheduled in enumerate(sampled)
        }
    tokens = drawn.token_ids.tolist()
    output: ModelRunnerOutput = {}
    for row, scheduled in enumerate(sampled):
        num_wanted = scheduled.request.sampling_params.logprobs
        logprobs = None
        if num_wanted is not None:
            logprobs = TokenLogprobs(
                token_ids=[tokens[row], *drawn.top_token_ids[row, :num_wanted].tolist()],
                logprobs=[
                    float(drawn.logprobs[row]),
                    *drawn.top_logprobs[row, :num_wanted].tolist(),
                ],
                sampled_rank=int(drawn.ranks[row]),
            )
        output[scheduled.request.request_id] = SampledToken(tokens[row], logprobs)
    return output
