"""Hashes of KV-cache blocks for prefix caching: everything that a block's keys depend on.

A block's hash covers its tokens, all blocks before it (by its parent's hash), and what token ids do
not say: the adapter, the items whose placeholders it overlaps, the request's cache salt.
Tokens and identifiers in, bytes out.

NOTE: the features must be in the prompt whose blocks are hashed. An encoder-decoder model's are in
the encoder prompt, and every block of its decoder depends on them: do not share those by hash.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
from blake3 import blake3

from mmjax.processing.tensors.inputs import PlaceholderRange

BlockHash = bytes
"""32 bytes, which identify a full block and all blocks before it."""

BlockHashAlgorithm = Literal["sha256", "blake3"]

ExtraKey = tuple[str, str] | tuple[str, str, str] | tuple[str, str, int]
"""`("lora", name)` or `("lora", name, version or path)`; `("mm", identifier, offset)`;
`("cache_salt", salt)`; `("positions", key)`; `("ahead", digest)`."""

_ENCODER = msgspec.msgpack.Encoder()
_HASHERS: Mapping[BlockHashAlgorithm, Callable[[bytes], Any]] = {
    "sha256": sha256,
    "blake3": blake3,
}


@runtime_checkable
class PlacedItem(Protocol):
    """An item of a prompt: a `MultiModalFeatureSpec` or the engine's `EncoderItem`."""

    @property
    def identifier(self) -> str:
        """Equal identifiers have equal embeddings."""
        ...

    @property
    def mm_position(self) -> PlaceholderRange:
        """Where its placeholder is in the prompt."""
        ...


@runtime_checkable
class HashableRequest(Protocol):
    """What the hashes of a request's blocks depend on, besides its tokens.

    The adapter is `lora_name`, or `lora_request` with a `lora_name` and a `lora_version` or a
    `lora_path`. Where a prompt's positions depend on all of it, `positions_key` says how. Where
    keys depend on tokens of later blocks, `seen_ahead` has the first position of such a key, and a
    digest of all that is seen.
    """

    @property
    def mm_features(self) -> Sequence[PlacedItem] | None:
        """Sorted by `mm_position.offset`."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Only requests of the same salt share blocks."""
        ...


@runtime_checkable
class HashablePrompt(HashableRequest, Protocol):
    """A request with its tokens."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Token ids, placeholders expanded."""
        ...


def make_none_hash(seed: str = "") -> BlockHash:
    """Return the parent hash of first blocks; caches of different seeds share no hash."""
    return sha256(_ENCODER.encode(("mmjax.block_hash", 1, seed))).digest()


NONE_HASH: BlockHash = make_none_hash()
"""The parent hash of a request's first block, unless a seed is given."""


def generate_block_hash_extra_keys(
    request: HashableRequest, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[ExtraKey, ...] | None, int]:
    """Return what a block's hash covers besides tokens, and `start_mm_idx` of the next block.

    An image whose placeholder begins 3 tokens before the block gives `("mm", identifier, -3)`.

    Args:
        request: Its features are sorted by offset.
        start_token_idx: The block's first token.
        end_token_idx: The token after the block.
        start_mm_idx: First feature that may overlap the block; -1: the last one.

    Returns:
        The keys, or None if there are none; the first feature that a later block may overlap.
    """
    mm_keys, next_mm_idx = _mm_keys(
        request.mm_features or (), start_token_idx, end_token_idx, start_mm_idx
    )
    keys = (
        *_lora_keys(request),
        *mm_keys,
        *_salt_keys(request, start_token_idx),
        *_position_keys(request, start_token_idx),
        *_ahead_keys(request, start_token_idx, end_token_idx),
    )
    return keys or None, next_mm_idx


def hash_block_tokens(
    parent: BlockHash | None,
    token_ids: Sequence[int] | np.ndarray,
    extra_keys: tuple[ExtraKey, ...] | None = None,
    algorithm: BlockHashAlgorithm = "sha256",
) -> BlockHash:
    """Return the hash of a full block; `parent` is the previous block's (None: it is the first)."""
    tokens = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
    # msgpack frames types and lengths, so different inputs never encode alike.
    framed = _ENCODER.encode((parent or NONE_HASH, tokens, extra_keys))
    return _HASHERS[algorithm](framed).digest()


def iter_block_hashes(
    request: HashablePrompt,
    block_size: int,
    *,
    token_ids: Sequence[int] | np.ndarray | None = None,
    previous: Sequence[BlockHash] = (),
    algorithm: BlockHashAlgorithm = "sha256",
    none_hash: BlockHash = NONE_HASH,
) -> Iterator[BlockHash]:
    """Yield the hashes of a request's full blocks after the `previous` ones.

    `token_ids`: prompt and output tokens; None: the prompt's.
    """
    if token_ids is None:
        token_ids = request.prompt_token_ids
    parent = previous[-1] if previous else none_hash
    mm_idx = 0
    for start in range(len(previous) * block_size, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        extra_keys, mm_idx = generate_block_hash_extra_keys(request, start, end, mm_idx)
        parent = hash_block_tokens(parent, token_ids[start:end], extra_keys, algorithm)
        yield parent


def _mm_keys(
    features: Sequence[PlacedItem], start: int, end: int, first: int
) -> tuple[list[ExtraKey], int]:
    index = max(first + len(features), 0) if first < 0 else first
    keys: list[ExtraKey] = []
    next_mm_idx = None
    while index < len(features) and features[index].mm_position.offset < end:
        offset = features[index].mm_position.offset
        stop = offset + features[index].mm_position.length
        if max(start, offset) < min(end, stop):
            keys.append(("mm", features[index].identifier, offset - start))
        if stop > end and next_mm_idx is None:
            next_mm_idx = index
        index += 1
    return keys, index if next_mm_idx is None else next_mm_idx


def _lora_keys(request: HashableRequest) -> list[ExtraKey]:
    adapter = getattr(request, "lora_request", None)
    name = getattr(request if adapter is None else adapter, "lora_name", None)
    if name is None:
        return []
    own = getattr(adapter, "lora_version", None) or getattr(adapter, "lora_path", None)
    return [("lora", name)] if own is None else [("lora", name, own)]


def _salt_keys(request: HashableRequest, start: int) -> list[ExtraKey]:
    # Later blocks depend on it through their parents.
    return [("cache_salt", request.cache_salt)] if start == 0 and request.cache_salt else []


def _position_keys(request: HashableRequest, start: int) -> list[ExtraKey]:
    key = getattr(request, "positions_key", "")
    return [("positions", key)] if start == 0 and key else []


def _ahead_keys(request: HashableRequest, start: int, end: int) -> list[ExtraKey]:
    # Blocks before it do not depend on the digest, later ones do through their parents.
    position, digest = getattr(request, "seen_ahead", None) or (-1, "")
    return [("ahead", digest)] if start <= position < end else []
