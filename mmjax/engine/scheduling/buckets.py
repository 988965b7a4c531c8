"""Buckets: the padded sizes that programs are compiled for; warm-up runs each of them.

The size of every step, encoder call and sample is rounded up to a bucket, so that the number of
programs is fixed, whatever the clients send. An engine may serve with some of them while the others
compile: `Buckets.stages`.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

from mmjax.rounding import round_up

Size = TypeVar("Size", bound=Hashable)

TILE_SIZE = 64
"""Queries of one request that attention computes as one tile, outside of decoding."""
FEW_REQUESTS = 4
"""Steps with up to this many requests have more buckets: padding adds to their latency."""
SHORT_STEPS = (16, 32, 96, 192, 384)
"""Tokens of further buckets for few requests, beside the doublings of `TILE_SIZE`."""
BETWEEN_STEPS = (192, 384)
"""Those for many requests: a prompt with a picture, of some 300 tokens, beside decoding ones."""
MAX_STARTS = 4
"""Requests of an encoder-decoder model, with the longest encoder input, that a step may start."""
MAX_UNITS = 8
"""Units (images, crops) of the largest encoder call; more take several calls."""
WRITTEN_ROWS = (256, 2048)
"""Precomputed embeddings of the smallest and of the largest call of `write_rows`."""


@dataclass(frozen=True, slots=True, order=True)
class StepBucket:
    """Sizes of a step's arrays."""

    num_tokens: int
    """`T`"""
    num_requests: int
    """`R`"""
    tile_size: int
    """1 for decoding (every request computes one token, T equals R), else up to `TILE_SIZE`."""
    has_spans: bool = True
    """Whether tokens may attend to later ones of their image; if not, attention is causal."""
    num_states: int = 0
    """`S`: encoder hidden states whose keys and values the step may write; 0: decoder only."""
    has_adapters: bool = False
    """Whether its tokens may have adapters; a step of none computes without any."""

    @property
    def num_tiles(self) -> int:
        """Tiles that a split of T tokens over R requests, with at least one each, needs at most."""
        return (self.num_tokens - self.num_requests) // self.tile_size + self.num_requests


def next_bucket(sizes: Sequence[int], size: int) -> int:
    """Return the smallest of the sorted `sizes` that is at least `size`."""
    assert size <= sizes[-1], f"{size=} {sizes[-1]=}"
    return sizes[bisect_left(sizes, size)]


def ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Return `first`, `first * factor`, and so on, ending with exactly `last`."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)


class SampleBucket(NamedTuple):
    """The size of a sample."""

    num_rows: int
    is_plain: bool
    """Whether all rows are greedy, without masks or log-probabilities."""


class Sizes(NamedTuple):
    """The sizes that each function is compiled for."""

    steps: tuple[StepBucket, ...] = ()
    encode: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    write: tuple[int, ...] = ()
    sample: tuple[SampleBucket, ...] = ()

    def but_not(self, others: "Sizes") -> "Sizes":
        """Return those that are not among others."""
        parts: Any = map(_without, self, others)
        return Sizes(*parts)

    def __or__(self, others: "Sizes") -> "Sizes":
        """Return these, and then those of others that are not among them."""
        pairs: Any = zip(self, others.but_not(self), strict=True)
        return Sizes(*(mine + new for mine, new in pairs))


NO_SIZES = Sizes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """All buckets of one engine."""

    decode: tuple[int, ...]
    mixed: tuple[StepBucket, ...]
    """Sorted by tokens, then by requests."""
    sample: tuple[int, ...]
    encode: tuple[int, ...]
    """Units, or patches of a packed encoder."""
    write: tuple[int, ...] = ()
    """Precomputed embeddings; empty if the engine takes none."""
    prompts: tuple[int, ...] = ()
    """Prompts of an encoder-decoder model's encoder, all padded to its longest."""
    has_adapters: bool = False
    """Whether there is each step with adapters, too."""

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
        has_adapters: bool = False,
    ) -> "Buckets":
        """Choose few buckets: 16 requests and 2,048 tokens give at most 31 programs.

        Mixed buckets for few requests exist only for few tokens, or if the tiles for
        `max_num_seqs` requests would outnumber those that the tokens fill.

        Args:
            max_num_seqs: Requests of the largest step.
            max_num_batched_tokens: Tokens of the largest step.
            max_units: Units that a step may encode; 0: the encoder is packed, or there is none.
            patches: Sizes of the calls of a packed encoder.
            max_written: Precomputed embeddings that a step may write; 0: none.
            span_variants: Values of `has_spans`. Both if images attend in both directions and
                causal steps have a faster attention, which decoding then uses.
            max_encoder_len: Of an encoder-decoder model. Every mixed bucket has room for the
                encoder hidden states of a few requests: its prompts are short, so that a mixed
                step is usually a first one.
            has_adapters: Whether requests may have adapters: twice as many steps.
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
        sizes += [(num_tokens, max_num_seqs) for num_tokens in BETWEEN_STEPS if num_tokens < top]
        mixed = [
            StepBucket(num_tokens, num_requests, min(TILE_SIZE, num_tokens), has_spans, num_states)
            for num_tokens, num_requests in sorted(set(sizes))
            if not _holds_any_step(sizes, max_num_batched_tokens, num_tokens, num_requests)
            for has_spans in sorted(span_variants)
        ]
        return cls(
            decode=ladder(1, max_num_seqs, 2),
            mixed=tuple(mixed),
            sample=ladder(1, max_num_seqs, 4),
            encode=ladder(1, max(1, min(max_units, MAX_UNITS)), 2) if max_units else patches,
            write=_write_sizes(max_written),
            prompts=ladder(1, min(MAX_STARTS, max_num_seqs), 2) if max_encoder_len else (),
            has_adapters=has_adapters,
        )

    @property
    def steps(self) -> list[StepBucket]:
        """Every bucket of `step`."""
        without = [*(self._decode_bucket(size) for size in self.decode), *self.mixed]
        more = [replace(bucket, has_adapters=True) for bucket in without]
        return without + more if self.has_adapters else without

    @property
    def sizes(self) -> Sizes:
        """All sizes, by function."""
        samples = [SampleBucket(*pair) for pair in product(self.sample, (True, False))]
        return Sizes(tuple(self.steps), self.encode, self.prompts, self.write, tuple(samples))

    @property
    def max_num_seqs(self) -> int:
        """Requests that a step may have, whatever it computes."""
        return min(self.decode[-1], self.sample[-1], max(one.num_requests for one in self.mixed))

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens that a step of `max_num_seqs` requests may have."""
        most = self.max_num_seqs
        return max(one.num_tokens for one in self.mixed if one.num_requests >= most)

    @property
    def max_num_tokens(self) -> int:
        """Rows of the largest step."""
        return max(self.mixed[-1].num_tokens, self.decode[-1])

    @property
    def num_states(self) -> int:
        """Encoder hidden states that a step can write; 0: decoder only."""
        return self.mixed[-1].num_states

    @property
    def num_programs(self) -> int:
        """Number of programs, one for each of the `sizes`."""
        return sum(map(len, self.sizes))

    def stages(self, *, least_tokens: int = 1) -> list["Buckets"]:
        """Return buckets to serve with while the rest compile; each has all of the one before.

        The first computes one request at a time, in chunks; the second as many requests as there
        may be. Then come larger chunks and calls, and what spares padding. The last is all buckets.

        Args:
            least_tokens: Tokens of an image that cannot be divided; longer ones wait.
        """
        fewest = min(max(least_tokens, TILE_SIZE), self.mixed[-1].num_tokens)
        many = self.mixed[-1].num_requests
        large = [one for one in self.mixed if one.num_requests == many]
        chunk = next(one.num_tokens for one in large if one.num_tokens >= fewest)
        first = [one for one in self.mixed if one.num_tokens == chunk]
        few = first[0].num_requests
        # With spans first: such a bucket holds steps without, too.
        later = sorted(
            self.mixed,
            key=lambda o: (o.num_tokens < chunk, o.num_tokens, o.num_requests, not o.has_spans),
        )
        parts = {
            "mixed": _grow(
                later,
                [one for one in first if one.num_requests == few],
                [one for one in first if one.num_requests == many],
            ),
            "decode": _grow(self.decode, self.decode[:1], self.decode[-1:]),
            "sample": _grow(self.sample, self.sample[:1], self.sample[-1:]),
            "encode": _grow(self.encode, self.encode[:1], ()),
            "write": _grow(self.write, self.write[:1], ()),
            "prompts": _grow(self.prompts, self.prompts[:1], ()),
        }
        number = max(map(len, parts.values()))
        stages = [
            replace(self, **{kind: part[min(n, len(part) - 1)] for kind, part in parts.items()})
            for n in range(number)
        ]
        return list(dict.fromkeys(stages))

    def step_bucket(
        self,
        num_tokens: int,
        num_requests: int,
        *,
        has_spans: bool = False,
        num_states: int = 0,
        has_adapters: bool = False,
    ) -> StepBucket:
        """Return the bucket with the fewest tokens, then requests, that is large enough.

        Decoding has no spans, since a decoded token attends to no later one, and writes no encoder
        hidden states, unless it is a request's first step.
        """
        if num_tokens == num_requests and not num_states:
            found = self._decode_bucket(next_bucket(self.decode, num_tokens))
        else:
            found = min(
                bucket
                for bucket in self.mixed
                if bucket.num_tokens >= num_tokens
                and bucket.num_requests >= num_requests
                and bucket.has_spans >= has_spans
                and bucket.num_states >= num_states
            )
        return replace(found, has_adapters=True) if has_adapters else found

    def _decode_bucket(self, size: int) -> StepBucket:
        return StepBucket(size, size, 1, all(bucket.has_spans for bucket in self.mixed))


def split_calls(sizes: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Split units over calls of some sizes: (size, number of units) of each call.

    11 units, sizes 1, 2, 4, 8: [(8, 8), (4, 3)].
    """
    calls = []
    while number:
        size = next_bucket(sizes, min(number, sizes[-1]))
        calls.append((size, min(number, size)))
        number -= calls[-1][1]
    return calls


def _without(sizes: Sequence[Size], others: Sequence[Size]) -> tuple[Size, ...]:
    return tuple(one for one in sizes if one not in others)


def _grow(sizes: Sequence[Size], *first: Sequence[Size]) -> list[tuple[Size, ...]]:
    """Return growing parts of `sizes`, sorted: with those of `first`, in turn, then one more each.

    1, 2, 4, 8 and first (1,), (8,): [(1,), (1, 8), (1, 2, 8), (1, 2, 4, 8)].
    """
    taken: list[Size] = []
    parts = []
    given = {one for group in first for one in group}
    for group in (*first, *((one,) for one in sizes if one not in given)):
        taken += group
        parts.append(tuple(sorted(set(taken))))  # pyright: ignore[reportArgumentType]
    return parts


def _holds_any_step(
    sizes: Sequence[tuple[int, int]], max_num_batched_tokens: int, below: int, num_requests: int
) -> bool:
    """Return whether a bucket of fewer than `below` tokens has room for the largest step."""
    return any(
        max_num_batched_tokens <= tokens < below and requests >= num_requests
        for tokens, requests in sizes
    )


def _write_sizes(max_written: int) -> tuple[int, ...]:
    first, last = (min(size, max_written) for size in WRITTEN_ROWS)
    return ladder(first, last, 2) if max_written else ()
