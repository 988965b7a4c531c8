"""The model runner: runs scheduled steps with the parameters, the caches and the jitted functions.

Every array on the device has its final size from the start.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from mmjax.engine.device.batch import BatchBuilder, make_history
from mmjax.engine.device.encoder import EncoderCall, EncoderRows
from mmjax.engine.device.mesh import Call, Placement, SampleKind
from mmjax.engine.device.padding import PaddingCounter
from mmjax.engine.device.precomputed import WriteCall
from mmjax.engine.device.programs import Programs
from mmjax.engine.device.prompt_calls import PromptCall
from mmjax.engine.device.sampler import SampleOutput
from mmjax.engine.scheduling.buckets import (
    Buckets,
    SampleBucket,
    Sizes,
    StepBucket,
    next_bucket,
)
from mmjax.engine.scheduling.outputs import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.layers.module import Params
from mmjax.logger import get_logger
from mmjax.transport.messages import TokenLogprobs

logger = get_logger(__name__)


class InFlight(NamedTuple):
    """A step that was dispatched to the device."""

    sampled: list[ScheduledRequest]
    """Requests whose tokens it samples, in the order of their rows."""
    drawn: Array | SampleOutput
    """The sample; if nothing is sampled, an array that is ready once the step has run."""
    encoded: Array | None
    """Ready once its items are encoded; None: it has none."""


class ModelRunner:
    """Holds the device's arrays, and runs steps over them."""

    def __init__(
        self,
        programs: Programs,
        params: Params,
        *,
        num_blocks: int,
        block_size: int,
        max_blocks: int,
        has_spans: bool,
        placement: Placement,
        max_encoder_blocks: int = 0,
    ) -> None:
        self.buckets = programs.buckets
        self.ready = programs.buckets
        """The sizes that calls may have."""
        self.prepare: Callable[[Sizes], None] | None = None
        """Compiles the programs of sizes that are not compiled yet; None: those of `ready` are."""
        self._steps = self.buckets.steps
        self.rows = EncoderRows(programs.num_encoder_rows, programs.num_extra_rows)
        self._programs = programs
        self._params = params
        self._placement = placement
        self._encoder_calls = programs.encoder_calls
        self._num_blocks = num_blocks
        self._builder = BatchBuilder(
            num_blocks=num_blocks,
            block_size=block_size,
            max_blocks=max_blocks,
            max_num_seqs=self.buckets.sample[-1],
            rows_of=self.rows.get,
            has_spans=has_spans,
            max_encoder_blocks=max_encoder_blocks,
        )
        self._no_history = {
            num_rows: placement.put(self._empty_history(num_rows))
            for num_rows in self.buckets.sample
        }
        """For samples in which every token may be repeated; stays on the device."""
        self._padding = PaddingCounter()
        self._encoded: Array | None = None
        """Ready once the last encoder call has run."""
        self._is_leading = False
        """Whether every call is broadcast to following processes."""
        self._make_arrays()

    def reset(self) -> None:
        """Reallocate all caches, after a failed step."""
        self._broadcast(Call.RESET)
        self.rows.reset()
        # The device has no room for both, and the exception's traceback may refer to the old ones.
        for array in jax.tree.leaves((self._state, self._pool, self._previous)):
            array.delete()
        self._make_arrays()

    def _empty_history(self, num_rows: int) -> np.ndarray:
        return np.zeros((num_rows, self._programs.history_len), np.int32)

    def _make_arrays(self) -> None:
        self._state, self._pool, self._previous = self._programs.make_arrays(self._num_blocks)
        if self._programs.num_extra_rows:
            self._pool = self._programs.write_extra(params=self._params, pool=self._pool)

    # ---- one step ------------------------------------------------------------------------------

    def dispatch(self, output: SchedulerOutput) -> InFlight | None:
        """Encode, compute and sample without waiting for the device; None for an empty step.

        Tokens in flight are those of the previous dispatch's sample.
        """
        for identifier in output.freed_identifiers:
            self.rows.free(identifier)
        self._encoded = None
        self._encode_items(output.encoder_items)
        if not output.requests:
            return None
        bucket = self.ready.step_bucket(
            output.num_tokens,
            len(output.requests),
            has_spans=self._builder.needs_spans(output.requests),
            num_states=self._builder.count_states(output.requests),
        )
        logger.debug(
            "step: %d requests in %s, %d items encoded",
            *(len(output.requests), bucket, len(output.encoder_items)),
        )
        self._padding.add(bucket, output.num_tokens)
        packed, is_plain = self._builder.build(output.requests, bucket)
        rest = self._run_step(bucket, packed)
        sampled = [scheduled for scheduled in output.requests if scheduled.samples]
        if not sampled:
            return InFlight(sampled, rest, self._encoded)
        size = next_bucket(self.ready.sample, len(sampled))
        history = None if is_plain else make_history(sampled, size, self._programs.history_len)
        return InFlight(sampled, self._run_sample(size, is_plain, rest, history), self._encoded)

    def wait_encoded(self, in_flight: InFlight) -> None:
        """Wait for a step's items."""
        if in_flight.encoded is not None:
            jax.block_until_ready(in_flight.encoded)

    def read(self, in_flight: InFlight) -> ModelRunnerOutput:
        """Wait for a step, and return its sampled tokens."""
        if not in_flight.sampled:
            jax.block_until_ready(in_flight.drawn)
            return {}
        return _read(in_flight.sampled, jax.device_get(in_flight.drawn))

    def _run_step(self, bucket: StepBucket, packed: np.ndarray) -> Array:
        if self._is_leading:
            self._broadcast(Call.STEP, self._steps.index(bucket))
        self._prepare(steps=(bucket,))
        self._state, rest = self._programs.step(
            layout=self._programs.step_layouts[bucket],
            params=self._params,
            state=self._state,
            pool=self._pool,
            previous=self._previous,
            packed=self._placement.put(packed),
        )
        return rest

    def _run_sample(
        self, num_rows: int, is_plain: bool, rest: Array, history: np.ndarray | None = None
    ) -> Array | SampleOutput:
        kind = SampleKind.PLAIN if is_plain else SampleKind.FULL
        kind = kind if history is None else SampleKind.WITH_HISTORY
        self._broadcast(Call.SAMPLE, num_rows, kind)
        self._prepare(sample=(SampleBucket(num_rows, is_plain),))
        no_history = self._no_history[num_rows]
        drawn = self._programs.sample(
            layout=self._programs.sample_layout,
            num_rows=num_rows,
            is_plain=is_plain,
            params=self._params,
            hidden=self._state.hidden,
            packed=rest,
            history=no_history if history is None else self._placement.put(history),
            previous=self._previous,
        )
        self._previous = drawn.token_ids if isinstance(drawn, SampleOutput) else drawn
        return drawn

    def _run_encode(self, call: EncoderCall) -> None:
        size = len(next(iter(call.inputs.values())))
        self._broadcast(Call.ENCODE, size)
        self._prepare(encode=(size,))
        on_device = self._placement.put(call.inputs, self._encoder_calls.sharding(size))
        rows = self._placement.put(call.dst_rows)
        self._pool, self._encoded = self._programs.encode(
            params=self._params, pool=self._pool, inputs=on_device, dst_rows=rows
        )

    def _run_write(self, call: WriteCall) -> None:
        self._broadcast(Call.WRITE, len(call.dst_rows))
        self._prepare(write=(len(call.dst_rows),))
        embeds, rows = self._placement.put(tuple(call))
        self._pool = self._programs.write_rows(pool=self._pool, embeds=embeds, dst_rows=rows)

    def _run_encode_prompts(self, call: PromptCall) -> None:
        self._broadcast(Call.ENCODE_PROMPTS, len(call.token_ids))
        self._prepare(prompts=(len(call.token_ids),))
        on_device = self._placement.put(call._asdict())
        self._pool, self._encoded = self._programs.encode_prompts(
            params=self._params, pool=self._pool, **on_device
        )

    def _prepare(self, **sizes: Any) -> None:
        if self.prepare is not None:
            self.prepare(Sizes(**sizes))

    def _encode_items(self, items: Sequence[EncoderItem]) -> None:
        """Encode, or write, the items that are not in the pool yet; then prompts with items."""
        new = [item for item in items if item.identifier not in self.rows]
        places = {item.identifier: self._allocate_rows(item) for item in new}
        encoded = [item for item in new if item.embeds is None and item.prompt is None]
        if encoded:
            rows = [places[item.identifier] for item in encoded]
            for call in self._encoder_calls.fill(encoded, rows, self.ready.encode):
                self._run_encode(call)
        written = [item for item in new if item.embeds is not None]
        if written:
            rows = [places[item.identifier] for item in written]
            for write in self._programs.precomputed.fill(written, rows, self.ready.write):
                self._run_write(write)
        states = [item for item in new if item.prompt is not None]
        prompt_calls = self._programs.prompt_calls
        for prompt_call in prompt_calls.fill(states, self.rows.get, self.ready.prompts):
            self._run_encode_prompts(prompt_call)

    def _allocate_rows(self, item: EncoderItem) -> np.ndarray:
        """Return where each of an item's outputs goes."""
        if item.rows is None:
            return self.rows.allocate(item.identifier, item.num_embeds)
        num_outputs = self._encoder_calls.count_outputs(item)
        return self.rows.allocate_chosen(item.identifier, item.rows, num_outputs)

    # ---- several processes ---------------------------------------------------------------------

    def wait(self) -> None:
        """Broadcast that there is no call, so that the followers' collective does not time out."""
        self._broadcast(Call.WAIT)

    def end(self) -> None:
        """Broadcast the end to the followers, and log what of the steps was padding."""
        self._broadcast(Call.END)
        self._is_leading = False
        if lines := self._padding.describe():
            logger.info("steps by their size, tokens x requests:\n%s", "\n".join(lines))
        self._padding = PaddingCounter()

    def follow(self) -> None:
        """Make every call that the leader broadcasts, on its arrays, until it ends."""
        rest: Array | None = None
        while True:
            call, first, second = self._placement.receive_call()
            if call is Call.END:
                return
            if call is Call.RESET:
                self.reset()
            elif call is Call.ENCODE:
                self._run_encode(self._encoder_calls.empty(first))
            elif call is Call.WRITE:
                self._run_write(self._programs.precomputed.empty(first))
            elif call is Call.ENCODE_PROMPTS:
                self._run_encode_prompts(self._programs.prompt_calls.empty(first))
            elif call is Call.STEP:
                bucket = self._steps[first]
                rest = self._run_step(bucket, self._builder.empty_step(bucket)[0])
            elif call is Call.SAMPLE:
                assert rest is not None, "a sample follows a step"
                has_history = second == SampleKind.WITH_HISTORY
                history = self._empty_history(first) if has_history else None
                self._run_sample(first, second == SampleKind.PLAIN, rest, history)

    def _broadcast(self, call: Call, first: int = 0, second: int = 0) -> None:
        if self._is_leading:
            self._placement.broadcast_call(call, first, second)

    # ---- warm-up -------------------------------------------------------------------------------

    def warm_up(self, buckets: Buckets) -> None:
        """Run the programs of `buckets` on padding; compiles those that are not compiled."""
        for call in self._warm_up_calls(buckets):
            jax.block_until_ready(call())

    def lead(self) -> None:
        """Broadcast every call from now on, if there are processes that follow this one."""
        self._is_leading = self._placement.is_shared and self._placement.is_leader
        self.wait()

    def _warm_up_calls(self, buckets: Buckets) -> Iterator[Callable[[], Any]]:
        for bucket in buckets.encode:
            yield partial(self._run_encode, self._encoder_calls.empty(bucket))
        for size in buckets.write:
            yield partial(self._run_write, self._programs.precomputed.empty(size))
        for size in buckets.prompts:
            yield partial(self._run_encode_prompts, self._programs.prompt_calls.empty(size))
        for bucket in reversed(buckets.steps):
            yield partial(self._warm_up_step, bucket)
        for size in buckets.sample:
            for is_plain in (True, False):
                yield partial(self._warm_up_sample, buckets.steps[0], size, is_plain)

    def _warm_up_step(self, bucket: StepBucket) -> Array:
        packed, _ = self._builder.empty_step(bucket)
        return self._run_step(bucket, packed)

    def _warm_up_sample(self, bucket: StepBucket, num_rows: int, is_plain: bool) -> Any:
        rest = self._warm_up_step(bucket)
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
