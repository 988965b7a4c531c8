"""Buckets: the padded sizes that programs are compiled for; warm-up runs each of them.

The size of every step, encoder call and sample is rounded up to a bucket, so that the number of
programs is fixed, whatever the clients send. An engine serves with those that are compiled, once
the first of `Buckets.compile_order` are.
"""

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from typing import Any, NamedTuple

from mmjax.rounding import round_up

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
MANY_STATES = 2**13
"""Encoder hidden states of which a step has no more, unless the longest input alone has: every step
of a prompt projects as many in each layer, padding or not."""
STEP_COST = 128
"""What a step costs whatever its size, in tokens: weights are read, and the host prepares it."""
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


class ProgramKey(NamedTuple):
    """One program: a jitted function, and the bucket that it is compiled for."""

    function: str
    """"step", "encode", "encode clips", "encode prompts", "write", "align", "sample" or "pool"."""
    size: Any
    """A `StepBucket`, a `SampleBucket`, or a number of units, patches, prompts, rows or tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """All buckets of one engine."""

    decode: tuple[StepBucket, ...]
    """Steps that compute one token of each request."""
    mixed: tuple[StepBucket, ...]
    """Sorted by tokens, then by requests."""
    sample: tuple[int, ...]
    encode: tuple[int, ...]
    """Units, or patches of a packed encoder."""
    clips: tuple[int, ...] = ()
    """Rows of an encoder of clips alone, beside that."""
    write: tuple[int, ...] = ()
    """Precomputed embeddings; empty if the engine takes none."""
    prompts: tuple[int, ...] = ()
    """Prompts of an encoder-decoder model's encoder, all padded to its longest."""
    align: tuple[int, ...] = ()
    """Tokens of a text that is aligned with an encoder's states; empty if none is."""
    pool: tuple[int, ...] = ()
    """Rows whose states are read, of an engine that samples nothing."""
    has_adapters: bool = False
    """Whether there is each step with adapters, too."""
    pools: bool = False
    """Whether states are read, and no tokens sampled."""

    @classmethod
    def create(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        encode_sizes: Mapping[str, tuple[int, ...]] | None = None,
        max_written: int = 0,
        span_variants: Sequence[bool] = (True,),
        max_encoder_len: int = 0,
        max_aligned: int = 0,
        has_adapters: bool = False,
        num_guessed: int = 0,
        max_num_rows: int = 0,
        pools: bool = False,
    ) -> "Buckets":
        """Choose few buckets: 16 requests and 2,048 tokens give at most 31 programs.

        Mixed buckets for few requests exist only for few tokens, or if the tiles for
        `max_num_seqs` requests would outnumber those that the tokens fill.

        Args:
            max_num_seqs: Requests of the largest step.
            max_num_batched_tokens: Tokens of the largest step.
            encode_sizes: Sizes of the calls that encode items, by function; None: there are none.
            max_written: Precomputed embeddings that a step may write; 0: none.
            span_variants: Values of `has_spans`. Both if images attend in both directions and
                causal steps have a faster attention, which decoding then uses.
            max_encoder_len: Of an encoder-decoder model. Every mixed bucket has room for the
                encoder hidden states of a few requests: its prompts are short, so that a mixed
                step is usually a first one.
            max_aligned: Tokens of the longest text that is aligned with an encoder's states.
            has_adapters: Whether requests may have adapters: twice as many steps.
            num_guessed: Tokens that may be guessed behind a request's own. Each is a row of a
                decode step, whose sizes then include that of one request with all its guesses.
            max_num_rows: Rows of a step with guesses, at most.
            pools: Whether states are read, and no tokens sampled.
        """
        encoders = encode_sizes or {}
        num_states = max_encoder_len * min(MAX_STARTS, max_num_seqs)
        num_states = max(max_encoder_len, min(num_states, MANY_STATES))
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
        decode = ladder(1, max_num_seqs, 2)
        sample = ladder(1, max_num_seqs, 4)
        if num_guessed:
            largest = max(max_num_seqs, min(max_num_rows, max_num_seqs * (1 + num_guessed)))
            alone = min(largest, 1 + num_guessed)
            decode = sample = tuple(sorted({*ladder(1, largest, 2), alone}))
        return cls(
            decode=tuple(StepBucket(size, size, 1, all(span_variants)) for size in decode),
            mixed=tuple(mixed),
            sample=sample,
            encode=encoders.get("encode", ()),
            clips=encoders.get("encode clips", ()),
            write=_write_sizes(max_written),
            prompts=ladder(1, min(MAX_STARTS, max_num_seqs), 2) if max_encoder_len else (),
            align=(max_aligned,) if max_aligned else (),
            pool=ladder(1, top, 4) if pools else (),
            has_adapters=has_adapters,
            pools=pools,
        )

    @property
    def steps(self) -> list[StepBucket]:
        """Every bucket of `step`."""
        more = [replace(bucket, has_adapters=True) for bucket in (*self.decode, *self.mixed)]
        return [*self.decode, *self.mixed, *(more if self.has_adapters else ())]

    @property
    def keys(self) -> list[ProgramKey]:
        """All programs: by function, those that compile slowly first."""
        samples = [SampleBucket(*pair) for pair in product(self.sample, (True, False))]
        sizes: dict[str, Sequence[Any]] = {
            "step": self.steps,
            **self.encode_sizes,
            "encode prompts": self.prompts,
            "write": self.write,
            "align": self.align,
            "sample": () if self.pools else samples,
            "pool": self.pool,
        }
        return [ProgramKey(name, size) for name, many in sizes.items() for size in reversed(many)]

    @property
    def encode_sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the encoders' calls, by function."""
        return {"encode": self.encode, "encode clips": self.clips}

    @property
    def max_num_seqs(self) -> int:
        """Requests that a step may have, whatever it computes."""
        most = max(one.num_requests for one in self.mixed)
        return min(self.decode[-1].num_requests, self.sample[-1], most)

    @property
    def max_num_rows(self) -> int:
        """Tokens that a step may sample, where each is of a window of one."""
        return min(self.decode[-1].num_requests, self.sample[-1])

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens that a step of `max_num_seqs` requests may have."""
        most = self.max_num_seqs
        return max(one.num_tokens for one in self.mixed if one.num_requests >= most)

    @property
    def max_num_tokens(self) -> int:
        """Rows of the largest step."""
        return max(self.mixed[-1].num_tokens, self.decode[-1].num_tokens)

    @property
    def num_states(self) -> int:
        """Encoder hidden states that a step can write; 0: decoder only."""
        return self.mixed[-1].num_states

    @property
    def num_programs(self) -> int:
        """Number of programs."""
        return len(self.keys)

    def compile_order(self, *, least_tokens: int = 1) -> tuple[list[ProgramKey], int]:
        """Return all programs in the order of their use, and how many of them suffice to serve.

        The first compute one request at a time, in chunks; the next as many requests as there may
        be. Then come larger chunks and calls, and what spares padding.

        Args:
            least_tokens: Tokens of an image that cannot be divided; longer ones wait.
        """
        fewest = min(max(least_tokens, TILE_SIZE), self.mixed[-1].num_tokens)
        many = self.mixed[-1].num_requests
        chunk = min(
            o.num_tokens for o in self.mixed if o.num_requests == many and o.num_tokens >= fewest
        )
        few = min(one.num_requests for one in self.mixed if one.num_tokens == chunk)
        # With spans first: such a bucket holds steps without, too.
        mixed = sorted(
            self.mixed,
            key=lambda o: (
                (o.num_tokens != chunk, {few: 0, many: 1}.get(o.num_requests, 2)),
                (o.num_tokens < chunk, o.num_tokens, o.num_requests, not o.has_spans),
            ),
        )
        ordered = {kind: _ends_first(getattr(self, kind)) for kind in ("decode", "sample", "pool")}
        ordered["mixed"] = mixed
        by_kind = {kind: ordered.get(kind, getattr(self, kind)) for kind in _KINDS}
        rounds = [
            [
                key
                for kind, size in zip(by_kind, row, strict=True)
                for key in self._keys_of(kind, size)
            ]
            for row in zip_longest(*by_kind.values())
        ]
        return [key for keys in rounds for key in keys], len(rounds[0])

    def among(self, compiled: Container[ProgramKey]) -> "Buckets":
        """Return those of the buckets all of whose programs are compiled."""
        parts = {
            kind: tuple(
                size
                for size in getattr(self, kind)
                if all(key in compiled for key in self._keys_of(kind, size))
            )
            for kind in _KINDS
        }
        return replace(self, **parts)

    def _keys_of(self, kind: str, size: Any) -> list[ProgramKey]:
        """Return the programs of one size; none of None."""
        alone = dict.fromkeys(_KINDS, ()) | {kind: () if size is None else (size,)}
        return replace(self, **alone).keys

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
        hidden states, unless it is a request's first step. `has_spans`: a lone token needs one to
        see beyond a window.
        """
        is_decoding = num_tokens == num_requests and not num_states
        is_decoding = is_decoding and self.decode[0].has_spans >= has_spans
        found = min(
            bucket
            for bucket in (self.decode if is_decoding else self.mixed)
            if bucket.num_tokens >= num_tokens
            and bucket.num_requests >= num_requests
            and bucket.has_spans >= has_spans
            and bucket.num_states >= num_states
        )
        return replace(found, has_adapters=True) if has_adapters else found

    def cut(self, num_tokens: int, num_requests: int) -> int:
        """Return how many of a step's tokens to compute in it, so that little is padding.

        All of them, or as many as a smaller bucket holds, if that and a step of the others cost
        less: of 610 tokens 512, and 98 in a step of 128, in place of 1,024.
        """
        whole = self.step_bucket(num_tokens, num_requests).num_tokens
        sizes = [one.num_tokens for one in self.mixed if one.num_requests >= num_requests]
        first = max((size for size in sizes if size < num_tokens), default=0)
        if not first:
            return num_tokens
        other = self.step_bucket(num_tokens - first, num_requests).num_tokens
        return first if first + other + STEP_COST < whole else num_tokens


_KINDS = ("mixed", "decode", "sample", "encode", "clips", "prompts", "write", "align", "pool")
"""The fields of `Buckets` that hold sizes."""


def unit_sizes(max_units: int) -> tuple[int, ...]:
    """Return the sizes of the calls of an encoder of units, of which a step may encode so many."""
    return ladder(1, min(max_units, MAX_UNITS), 2) if max_units else ()


def split_calls(sizes: Sequence[int], number: int) -> Iterator[tuple[int, slice]]:
    """Split units over calls of some sizes: yield the size of each call, and which units it has.

    11 units, sizes 1, 2, 4, 8: (8, slice(0, 8)), (4, slice(8, 11)).
    """
    largest = max((1, *sizes))
    for start in range(0, number, largest):
        count = min(number - start, largest)
        yield next_bucket(sizes, count), slice(start, start + count)


def _ends_first(sizes: Sequence[Any]) -> Iterable[Any]:
    """Return sizes with the largest behind the smallest: 1, 8, 2, 4."""
    return dict.fromkeys((*sizes[:1], *sizes[-1:], *sizes))


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
