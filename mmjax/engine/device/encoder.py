"""What fills the pool of encoder outputs: its rows, and the inputs of the calls that write them.

Items are units of one shape, or sequences of patches of any length, which are packed into one call
with a segment id each, which attention masks by; so a batch of images of mixed sizes is one call,
and no size needs another program. Of several devices each encodes units, or a pack, of its own.
Precomputed embeddings are written as they are, and an encoder-decoder's prompts are encoded from
text and from rows of the pool.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Float

from mmjax.cache.adapter_slots import NO_SLOT
from mmjax.engine.device.batch import ADAPTER_SLOTS
from mmjax.engine.device.mesh import Placement
from mmjax.engine.scheduling.buckets import ladder, next_bucket, split_calls, unit_sizes
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.errors import ConfigError
from mmjax.layers.attention.segments import BLOCK_SIZE, PADDING
from mmjax.models.host_inputs import EncoderSpec, HostInputs, PackedEncoderSpec
from mmjax.rounding import cdiv, round_up

MIN_PATCHES = 128
"""Size of the smallest bucket; all are multiples of it, as TPU kernels pad rows to it."""
MAX_PACKED_PATCHES = 4096
"""Patches of the largest call, unless a single item has more; others take several calls."""
USUAL_PATCHES = (1024, 4096)
"""Between these, of which most pictures have some, there is a bucket between two doublings, too."""
PADDING_ID = -1
"""In the token ids of an encoder's prompt: nothing stands there."""
TEXT_ROW = -1
"""In its `src_rows`: a token of text, or nothing, stands there."""

# ---- calls of `encode` --------------------------------------------------------------------------


class EncoderCall(NamedTuple):
    """The host's arguments of one call of `encode`."""

    function: str
    """The name of its programs."""
    bucket: int
    inputs: dict[str, np.ndarray]
    dst_rows: np.ndarray
    """int32[outputs]: rows of the pool; padding: `num_rows`, which is out of range."""


class Piece(NamedTuple):
    """Units, or patches, of one item in one call, or in one device's pack."""

    item: int
    """Index of the item."""
    first: int
    """Its first unit that is meant."""
    number: int
    start: int
    """Where that unit is in the call, or the pack."""
    pack: int = 0
    """Which of the call's packs."""


class EncoderCalls:
    """Makes a model's calls of `encode`, of units or of packed patches, both `units` below.

    Units of one item may be divided over calls. A bucket of patches is the size of each device's
    pack: even shards of one pack would cut images apart.
    """

    def __init__(
        self,
        spec: EncoderSpec | PackedEncoderSpec,
        placement: Placement,
        num_rows: int,
        *,
        min_units: int = 1,
        has_adapters: bool = False,
        function: str = "encode",
    ) -> None:
        """Smaller calls are padded to `min_units`. `has_adapters`: whether units have adapters."""
        self.function = function
        self.spec = spec
        self._placement = placement
        self._num_rows = num_rows
        self._min_units = min_units
        self._has_adapters = has_adapters

    def takes(self, item: EncoderItem) -> bool:
        """Return whether it encodes an item, or a part of it."""
        return self.spec.inputs.keys() <= item.units.keys()

    def count_units(self, item: EncoderItem) -> int:
        """Return how many units, or patches, of an item it encodes."""
        return len(item.units[next(iter(self.spec.inputs))])

    def count_outputs(self, item: EncoderItem) -> int:
        """Return how many embeddings it makes of them."""
        return self._num_outputs(self.count_units(item))

    def sharding(self, size: int) -> Sharding:
        """Return the sharding of the inputs of a call of `size` units."""
        return self._placement.units(size)

    def compute(
        self, embed: Callable[[Any, Any], Array], weights: Any, inputs: Mapping[str, Array]
    ) -> Float[Array, "... D"]:
        """Return all embeddings of a call, on every device, each of which embeds its own inputs.

        Call it under jit.
        """
        if isinstance(self.spec, PackedEncoderSpec):
            embed = self._placement.spread(embed)
        return self._placement.gather(embed(weights, inputs), 0)

    def fill(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray], sizes: Sequence[int]
    ) -> Iterator[EncoderCall]:
        """Yield the calls that encode items, each of one of the `sizes`.

        `rows`: where each of an item's outputs goes.
        """
        counts = [self.count_units(item) for item in items]
        for bucket, pieces in self._plan(counts, sizes):
            call = self.empty(bucket)
            for segment, (item, first, number, start, pack) in enumerate(pieces):
                own = slice(first, first + number)
                inside = slice(pack * bucket + start, pack * bucket + start + number)
                for name in self.spec.inputs:
                    call.inputs[name][inside] = items[item].units[name][own]
                if self._has_adapters:
                    call.inputs[ADAPTER_SLOTS][inside] = items[item].adapter_slot
                if "segment_ids" in call.inputs:
                    call.inputs["segment_ids"][inside] = segment
                outputs = rows[item][self._outputs(own)]
                place = pack * self._num_outputs(bucket) + self._num_outputs(start)
                call.dst_rows[place : place + len(outputs)] = outputs
            yield call

    def _plan(
        self, counts: Sequence[int], sizes: Sequence[int]
    ) -> Iterable[tuple[int, list[Piece]]]:
        spec = self.spec
        if isinstance(spec, PackedEncoderSpec):
            keys = {"patches_per_key": spec.patches_per_key, "num_packs": self._placement.size}
            return plan_calls(counts, sizes, spec.patches_per_start, **keys)
        return _plan_units(counts, sizes)

    def describe(self, bucket: int) -> tuple[dict[str, jax.ShapeDtypeStruct], int]:
        """Return the inputs of a bucket's program, and its number of embeddings."""
        call = self.empty(bucket)
        inputs = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(len(x)))
            for name, x in call.inputs.items()
        }
        return inputs, len(call.dst_rows)

    def empty(self, bucket: int) -> EncoderCall:
        """Return a call of padding, which is one segment of a pack."""
        is_packed = isinstance(self.spec, PackedEncoderSpec)
        if is_packed:
            size = bucket * self._placement.size
            num_outputs = self._num_outputs(bucket) * self._placement.size
        else:
            size = self._placement.padded_units(max(bucket, self._min_units))
            num_outputs = self._num_outputs(size)
        inputs = {
            name: np.zeros((size, *shape), dtype)
            for name, (shape, dtype) in self.spec.inputs.items()
        }
        if is_packed:
            inputs["segment_ids"] = np.full(size, PADDING, np.int32)
        if self._has_adapters:
            inputs[ADAPTER_SLOTS] = np.full(size, NO_SLOT, np.int32)
        dst_rows = np.full(num_outputs, self._num_rows, np.int32)
        return EncoderCall(self.function, bucket, inputs, dst_rows)

    def _num_outputs(self, size: int) -> int:
        if isinstance(self.spec, PackedEncoderSpec):
            return cdiv(size, self.spec.patches_per_token)
        return size * self.spec.tokens_per_unit

    def _outputs(self, units: slice) -> slice:
        first = self._num_outputs(units.start)
        return slice(first, first + self._num_outputs(units.stop - units.start))


class Encoders:
    """Makes the calls of all encoders: of `encoder_spec`, and of clips where another hears them."""

    def __init__(
        self,
        host_inputs: HostInputs,
        placement: Placement,
        num_rows: int,
        *,
        min_units: int = 1,
        has_adapters: bool = False,
    ) -> None:
        """As `EncoderCalls`."""
        specs = {"encode": host_inputs.encoder_spec}
        if host_inputs.clip_spec is not None:
            specs["encode clips"] = host_inputs.clip_spec
        self.by_function = {
            function: EncoderCalls(
                spec,
                placement,
                num_rows,
                min_units=min_units,
                has_adapters=has_adapters,
                function=function,
            )
            for function, spec in specs.items()
        }
        """By the names of their programs."""

    def of(self, item: EncoderItem) -> list[EncoderCalls]:
        """Return the calls of an item's encoder, or of both, in the order of its outputs."""
        return [calls for calls in self.by_function.values() if calls.takes(item)]

    def allocate(self, item: EncoderItem, pool_rows: "EncoderRows") -> np.ndarray:
        """Give rows of the pool to an item; return where each of its outputs goes."""
        if item.rows is None:
            return pool_rows.allocate(item.identifier, item.num_embeds)
        num_outputs = sum(calls.count_outputs(item) for calls in self.of(item))
        return pool_rows.allocate_chosen(item.identifier, item.rows, num_outputs)

    def fill(
        self,
        items: Sequence[EncoderItem],
        rows: Sequence[np.ndarray],
        sizes: Mapping[str, Sequence[int]],
    ) -> Iterator[EncoderCall]:
        """Yield the calls that encode items, as `EncoderCalls.fill`; `sizes`: by function."""
        left = list(rows)
        for function, calls in self.by_function.items():
            own = [place for place, item in enumerate(items) if calls.takes(item)]
            places = []
            for place in own:
                number = calls.count_outputs(items[place])
                places.append(left[place][:number])
                left[place] = left[place][number:]
            if own:
                yield from calls.fill([items[place] for place in own], places, sizes[function])


def _plan_units(counts: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, list[Piece]]]:
    """Yield calls with all units of all items, in order."""
    units = [(item, unit) for item, count in enumerate(counts) for unit in range(count)]
    for bucket, chosen in split_calls(sizes, len(units)):
        yield bucket, [Piece(*unit, 1, place) for place, unit in enumerate(units[chosen])]


def plan_calls(
    num_patches: Sequence[int],
    buckets: Sequence[int],
    patches_per_start: int,
    *,
    patches_per_key: int = 1,
    num_packs: int = 1,
) -> list[tuple[int, list[Piece]]]:
    """Put each item into the first call with room for it, and each call into its bucket.

    In the call an item goes to the emptiest of the packs, one for each device, as in vLLM's
    `get_load_balance_assignment`; the bucket holds the fullest.

    The largest first: items of 600, 700, 100 patches, buckets up to 1,024: 700 patches of item 1
    and, from 768 on, item 2's in one call; item 0's in another. An item starts where its own blocks
    of keys would, so that its embeddings are summed in one order whatever lies beside it
    (docs/determinism.md), and at a multiple of `patches_per_start`. `patches_per_key`: as the spec
    says.
    """
    calls: list[list[Piece]] = []
    ends: list[list[int]] = []
    """Of each call's packs."""
    for number in sorted(range(len(num_patches)), key=lambda n: -num_patches[n]):
        size = num_patches[number]
        assert 0 <= size <= buckets[-1], f"{size=} {buckets[-1]=}"
        block = BLOCK_SIZE * patches_per_key
        step = math.lcm(min(block, 1 << (size - 1).bit_length()), patches_per_start)
        starts = [round_up(min(packs), step) for packs in ends]
        place = next((n for n, s in enumerate(starts) if s + size <= buckets[-1]), len(calls))
        if place == len(calls):
            calls.append([])
            ends.append([0] * num_packs)
            starts.append(0)
        pack = ends[place].index(min(ends[place]))
        calls[place].append(Piece(number, 0, size, starts[place], pack))
        ends[place][pack] = starts[place] + size
    return [
        (next_bucket(buckets, max(packs)), pieces)
        for packs, pieces in zip(ends, calls, strict=True)
    ]


# ---- sizes ---------------------------------------------------------------------------------------


def largest_items(
    spec: EncoderSpec | PackedEncoderSpec,
    max_embeds_per_item: Mapping[str, int],
    max_model_len: int,
) -> Mapping[str, int]:
    """Return the most embeddings that are encoded at once: a unit's, or an item's in a prompt.

    `max_embeds_per_item`: as P0's processor says, by modality; ConfigError where a pack needs it.
    """
    if isinstance(spec, EncoderSpec):
        return {"image": spec.tokens_per_unit}
    if not max_embeds_per_item:
        raise ConfigError(
            "the encoder takes items of any size, and `max_embeds_per_item` does not say how large "
            "they are; give what the processor's `get_mm_max_tokens_per_item` returns"
        )
    return {m: max(1, min(most, max_model_len)) for m, most in max_embeds_per_item.items()}


def choose_sizes(
    spec: EncoderSpec | PackedEncoderSpec | None, encoder_budget: int, largest_item: int
) -> tuple[int, ...]:
    """Return the sizes of an encoder's calls, for a budget in embeddings; none without an encoder.

    `largest_item`: its embeddings; 0: no prompt may have one.
    """
    if spec is None or not largest_item:
        return ()
    if isinstance(spec, EncoderSpec):
        return unit_sizes(encoder_budget // spec.tokens_per_unit)
    per_embedding = spec.patches_per_kept or spec.patches_per_token
    return patch_buckets(
        largest_item=largest_item * per_embedding,
        encoder_budget=encoder_budget * per_embedding,
        patches_per_start=spec.patches_per_start,
    )


def patch_buckets(
    *, largest_item: int, encoder_budget: int, patches_per_start: int
) -> tuple[int, ...]:
    """Return the buckets of a packed encoder, all multiples of `patches_per_start`.

    Args:
        largest_item: Patches of the largest item, which the last bucket holds.
        encoder_budget: Patches that a step may encode.
        patches_per_start: What the places where items start are multiples of.
    """
    first = round_up(MIN_PATCHES, patches_per_start)
    last = max(largest_item, min(encoder_budget, MAX_PACKED_PATCHES))
    sizes = ladder(first, round_up(last, first), 2)
    usual = (one for one in sizes if one in range(*USUAL_PATCHES) and not one % (2 * first))
    between = (size + size // 2 for size in usual)
    return tuple(sorted({*sizes, *(size for size in between if size < sizes[-1])}))


# ---- precomputed embeddings ---------------------------------------------------------------------


class WriteCall(NamedTuple):
    """The host's arguments of one call of `write_rows`."""

    embeds: np.ndarray
    """[rows, D], in the pool's dtype."""
    dst_rows: np.ndarray
    """int32[rows]: rows of the pool; padding: `num_rows`, which is out of range."""


class WriteCalls:
    """Makes the calls of `write_rows`."""

    def __init__(self, *, num_rows: int, width: int, dtype: Any) -> None:
        """`num_rows`, `width` (the language model's) and `dtype` are the pool's."""
        self._num_rows, self._width, self._dtype = num_rows, width, np.dtype(dtype)

    def fill(
        self, items: Sequence[EncoderItem], rows: Sequence[np.ndarray], sizes: Sequence[int]
    ) -> Iterator[WriteCall]:
        """Yield the calls of the `sizes` that write items to their pool rows."""
        embeds = np.concatenate([item.embeds for item in items if item.embeds is not None])
        dst_rows = np.concatenate(rows)
        for size, chosen in split_calls(sizes, len(dst_rows)):
            call, count = self.empty(size), chosen.stop - chosen.start
            call.embeds[:count], call.dst_rows[:count] = embeds[chosen], dst_rows[chosen]
            yield call

    def empty(self, size: int) -> WriteCall:
        """Return a call of padding."""
        return WriteCall(
            np.zeros((size, self._width), self._dtype), np.full(size, self._num_rows, np.int32)
        )


# ---- prompts of an encoder-decoder's encoder -----------------------------------------------------


class PromptCall(NamedTuple):
    """The host's arguments of one call of `encode_prompts`."""

    token_ids: np.ndarray
    """int32[B, S]"""
    src_rows: np.ndarray
    """int32[B, S]: row of the pool, of an item's embedding."""
    dst_rows: np.ndarray
    """int32[B, S]: row of the pool, of a hidden state; padding: `num_rows`, out of range."""


class PromptCalls:
    """Makes the calls that compute encoders' hidden states."""

    def __init__(self, *, max_len: int, num_rows: int) -> None:
        self._max_len = max_len
        self._num_rows = num_rows

    def fill(
        self,
        items: Sequence[EncoderItem],
        rows_of: Callable[[str], np.ndarray],
        sizes: Sequence[int],
    ) -> Iterator[PromptCall]:
        """Yield calls of the `sizes` with all items, which are hidden states, in order.

        `rows_of` returns the pool's rows of an item by its identifier: of the states, where they
        go, and of the prompts' own items, which are encoded already.
        """
        for size, chosen in split_calls(sizes, len(items)):
            call = self.empty(size)
            for row, item in enumerate(items[chosen]):
                self._fill_row(call, row, item, rows_of)
            yield call

    def _fill_row(
        self,
        call: PromptCall,
        row: int,
        states: EncoderItem,
        rows_of: Callable[[str], np.ndarray],
    ) -> None:
        prompt = states.prompt
        assert prompt is not None, f"{states.identifier=} are no encoder's states"
        count = len(prompt.token_ids)
        src_rows = call.src_rows[row, :count]
        for item in prompt.items:
            item.place(src_rows, rows_of(item.identifier))
        # An id where an embedding stands need not be one of the vocabulary.
        call.token_ids[row, :count] = np.where(src_rows == TEXT_ROW, prompt.token_ids, 0)
        call.dst_rows[row, :count] = rows_of(states.identifier)

    def empty(self, size: int) -> PromptCall:
        """Return a call of padding."""
        shape = (size, self._max_len)
        return PromptCall(
            np.full(shape, PADDING_ID, np.int32),
            np.full(shape, TEXT_ROW, np.int32),
            np.full(shape, self._num_rows, np.int32),
        )


# ---- the pool of encoder outputs ----------------------------------------------------------------


class EncoderRows:
    """Hands out pool rows by identifier; any rows do, so nothing fragments.

    Behind the `num_rows` that are handed out lie the model's `num_extra_rows` learned embeddings.
    """

    def __init__(self, num_rows: int, num_extra_rows: int = 0) -> None:
        self.num_rows = num_rows
        self._num_rows_in_all = num_rows + num_extra_rows
        self._free = np.arange(num_rows, dtype=np.int32)[::-1].copy()
        """A stack; the first `num_free` entries are free."""
        self.num_free = num_rows
        self._rows: dict[str, np.ndarray] = {}
        self._embeds: dict[str, np.ndarray] = {}
        """Where an item's embeddings are not its rows in order."""

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._rows

    def allocate(self, identifier: str, num_embeds: int) -> np.ndarray:
        """Give rows to an item, int32[num_embeds], one per embedding in order."""
        assert num_embeds <= self.num_free, f"{num_embeds=} {self.num_free=}"
        assert identifier not in self._rows, f"{identifier=} has rows already"
        self.num_free -= num_embeds
        rows = self._free[self.num_free : self.num_free + num_embeds][::-1].copy()
        self._rows[identifier] = rows
        return rows

    def allocate_chosen(
        self, identifier: str, embed_rows: np.ndarray, num_outputs: int
    ) -> np.ndarray:
        """Give rows to those of an item's outputs that its embeddings are.

        Args:
            identifier: Of the item.
            embed_rows: int32[num_embeds], as `HostInputs.embed_rows` returns it.
            num_outputs: How many embeddings the encoder gives.

        Returns:
            int32[num_outputs]: where each output goes; out of range where no embedding is it.
        """
        is_extra = embed_rows < 0
        kept = np.unique(embed_rows[~is_extra])
        places = np.full(num_outputs, self._num_rows_in_all, np.int32)
        places[kept] = self.allocate(identifier, len(kept))
        # A negative number is counted from the first learned embedding on: -1, -2, ...
        extra = self.num_rows - 1 - embed_rows
        chosen = places[np.where(is_extra, 0, embed_rows)]
        self._embeds[identifier] = np.where(is_extra, extra, chosen).astype(np.int32)
        return places

    def get(self, identifier: str) -> np.ndarray:
        """Return the row of each of an item's embeddings, int32[num_embeds]."""
        embeds = self._embeds.get(identifier)
        return self._rows[identifier] if embeds is None else embeds

    def held(self, identifier: str) -> np.ndarray:
        """Return the rows that an item has, int32[rows]: of its outputs, those that are kept."""
        return self._rows[identifier]

    def free(self, identifier: str) -> None:
        """Take an item's rows back."""
        rows = self._rows.pop(identifier)
        self._embeds.pop(identifier, None)
        self._free[self.num_free : self.num_free + len(rows)] = rows[::-1]
        self.num_free += len(rows)

    def reset(self) -> None:
        """Take all rows back."""
        for identifier in list(self._rows):
            self.free(identifier)
