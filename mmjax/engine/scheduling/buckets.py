"""The padded sizes that programs are compiled for; all of them are walked in warm-up.

Every size that a step, an encoder call or a sample may have is rounded up to one of these, so the
number of programs is the length of these lists, whatever the clients send.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from mmjax.rounding import round_up

TILE_SIZE = 64
"""Queries of one request that attend together, where some request has more than one."""
FEW_REQUESTS = 4
"""A step of so few has a prompt's or a new turn's latency to lose: its padding is kept small."""
SHORT_STEPS = (16, 32, 96, 192, 384)
"""Tokens of few requests that have buckets beside the doublings of `TILE_SIZE`."""
MAX_STARTS = 4
"""Requests of an encoder-decoder, with the longest encoders, that may begin in one step."""
MAX_UNITS = 8
"""Units (pictures, crops) of the largest encoder call; more take several calls."""
WRITTEN_ROWS = (256, 2048)
"""Precomputed embeddings of the smallest and of the largest call that writes them."""


@dataclass(frozen=True, slots=True, order=True)
class StepBucket:
    """Sizes of a step's arrays."""

    num_tokens: int
    """`T`"""
    num_requests: int
    """`R`"""
    tile_size: int
    """1 where every request computes one token (then T equals R), else up to `TILE_SIZE`."""
    has_spans: bool = True
    """Whether tokens may see later ones, of their own image; without, attention is causal."""
    num_states: int = 0
    """`S`: encoder states that the step has room to write; an encoder-decoder's alone."""

    @property
    def num_tiles(self) -> int:
        """Tiles that hold any split of T tokens over R requests, each of which has one at least."""
        return (self.num_tokens - self.num_requests) // self.tile_size + self.num_requests


def next_bucket(sizes: Sequence[int], size: int) -> int:
    """Return the smallest of the sorted `sizes` that is at least `size`."""
    assert size <= sizes[-1], f"{size=} {sizes[-1]=}"
    return sizes[bisect_left(sizes, size)]


def ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Return `first`, times `factor`, and so on, ending with exactly `last`."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """All sizes of one engine."""

    decode: tuple[int, ...]
    mixed: tuple[StepBucket, ...]
    """Sorted by tokens, then by requests."""
    sample: tuple[int, ...]
    encode: tuple[int, ...]
    """Units, or patches of a pack."""
    write: tuple[int, ...] = ()
    """Precomputed embeddings; none where they are not taken."""

    @classmethod
    def create(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_units: int,
        patches: tuple[int, ...] = (),
        max_written: int = 0,
        span_variants: Sequence[bool] = (True,),
        max_encoder_len: int = 0,
    ) -> "Buckets":
        """Choose a short ladder: 16 requests and 2,048 tokens give at most 29 programs.

        Few requests get a mixed bucket of their own only where the tiles of the many would
        outnumber those that the tokens fill, or where tokens are few. `patches`: sizes of packed
        encoder calls, where an encoder takes no units. `max_written`: precomputed embeddings that a
        step may take in; 0: none. `span_variants`: values of `has_spans`;
        both where images see both ways and causal steps have a faster attention, which decoding
        then uses. `max_encoder_len`: of an encoder-decoder, a few of whose requests may begin in
        one step. All mixed buckets have room for those: such prompts are short, and a mixed step
        is a first one.
        """
        num_states = max_encoder_len * min(MAX_STARTS, max_num_seqs)
        top = round_up(max_num_batched_tokens, TILE_SIZE)
        few = min(FEW_REQUESTS, max_num_seqs)
        sizes = [
            (num_tokens, num_requests)
            for num_tokens in ladder(TILE_SIZE, top, 2)
            for num_requests in ladder(few, max_num_seqs, 4)
            if num_requests == max_num_seqs or num_requests * TILE_SIZE >= num_tokens
        ]
        sizes += [(num_tokens, few) for num_tokens in SHORT_STEPS if num_tokens < top]
        mixed = [
            StepBucket(num_tokens, num_requests, min(TILE_SIZE, num_tokens), has_spans, num_states)
            for num_tokens, num_requests in sorted(sizes)
            for has_spans in sorted(span_variants)
        ]
        return cls(
            decode=ladder(1, max_num_seqs, 2),
            mixed=tuple(mixed),
            sample=ladder(1, max_num_seqs, 4),
            encode=ladder(1, max(1, min(max_units, MAX_UNITS)), 2) if max_units else patches,
            write=_write_sizes(max_written),
        )

    @property
    def steps(self) -> list[StepBucket]:
        """Every bucket of `step`."""
        return [*(self._decode_bucket(size) for size in self.decode), *self.mixed]

    @property
    def max_num_tokens(self) -> int:
        """Rows of the largest step."""
        return max(self.mixed[-1].num_tokens, self.decode[-1])

    @property
    def num_states(self) -> int:
        """Encoder states that a step can write; 0 for a decoder alone."""
        return self.mixed[-1].num_states

    @property
    def num_programs(self) -> int:
        """What warm-up compiles; `sample` has two variants."""
        encoder = len(self.encode) + len(self.write)
        return len(self.decode) + len(self.mixed) + 2 * len(self.sample) + encoder

    def step_bucket(
        self, num_tokens: int, num_requests: int, *, has_spans: bool = False, num_states: int = 0
    ) -> StepBucket:
        """Return the bucket with the fewest tokens, then requests, that holds a step.

        A token that is its request's only one sees none behind it, so decoding has no spans; and it
        writes no encoder's states, unless it is the request's first.
        """
        if num_tokens == num_requests and not num_states:
            return self._decode_bucket(next_bucket(self.decode, num_tokens))
        return min(
            bucket
            for bucket in self.mixed
            if bucket.num_tokens >= num_tokens
            and bucket.num_requests >= num_requests
            and bucket.has_spans >= has_spans
            and bucket.num_states >= num_states
        )

    def _decode_bucket(self, size: int) -> StepBucket:
        return StepBucket(size, size, 1, all(bucket.has_spans for bucket in self.mixed))

    def unit_calls(self, num_units: int) -> list[tuple[int, int]]:
        """Split units over encoder calls: (bucket, units in it) for each call.

        11 units, buckets of 1, 2, 4, 8: [(8, 8), (4, 3)].
        """
        calls = []
        while num_units:
            bucket = next_bucket(self.encode, min(num_units, self.encode[-1]))
            calls.append((bucket, min(num_units, bucket)))
            num_units -= calls[-1][1]
        return calls


def _write_sizes(max_written: int) -> tuple[int, ...]:
    first, last = (min(size, max_written) for size in WRITTEN_ROWS)
    return ladder(first, last, 2) if max_written else ()
