"""The interface of JAX models to the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Float, Int

from mmjax.config import MultiModalConfig
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec
from mmjax.weights.rules import Rule

EncoderUnits = tuple[Mapping[str, np.ndarray], int]
"""Inputs of `embed_multimodal`, each `[units, ...]`; how many of its output rows, from the first,
the decoder attends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """An encoder of units of one fixed shape (an image, a tile, a crop).

    An item is one or more units; a call encodes a bucket of units of any number of items.
    """

    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    """Input of `embed_multimodal` -> (shape of one unit, dtype)."""
    tokens_per_unit: int
    """Embeddings per unit; an item's are its units', in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedEncoderSpec:
    """An encoder of items of any number of patches, packed into buckets of `P` patches.

    `embed_multimodal` also gets `segment_ids`, int32[P]: the index of a patch's item in the call,
    -1 for padding (rows of zeros). An item's patches are contiguous and in order. What depends on
    its grid (positions, rotary angles, window ids) are inputs, too, with a row per patch.
    """

    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    """Input of `embed_multimodal` -> (shape of one patch's row, dtype)."""
    patches_per_token: int
    """Consecutive patches per embedding; divides the number of patches of each item."""
    max_patches: int
    """Patches of the largest item that the processor makes."""


class MultiModalModel(Protocol):
    """An `nnx.Module` that describes structure only; all methods are pure."""

    RULES: Sequence[Rule]
    """From names in checkpoint files to names in this module's tree."""
    encoder_spec: EncoderSpec | PackedEncoderSpec
    kv_cache_spec: KVCacheSpec
    modalities: Sequence[str]
    """Supported modalities: the keys of `--limit-mm-per-prompt`."""
    tower_names: Sequence[str]
    """Attributes that only media need; set to None if the operator allows no media. Optional."""
    has_bidirectional_spans: bool
    """Whether attention is bidirectional within contiguous runs of an item's embeddings, each of
    which is then computed in one step. With `EncoderSpec` no run is longer than a unit."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None: ...

    @staticmethod
    def encoder_units(item: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return an item's inputs of `encoder_spec` as `[units, ...]` arrays, in numpy.

        Of a packed encoder: `[patches, ...]`, including positions and window ids.
        """
        ...

    def embed_multimodal(self, **inputs: Array) -> Float[Array, "U P D"] | Float[Array, "_rows D"]:
        """Encode `U` units into `P` embeddings each, or packed patches into embeddings."""
        ...

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up text embeddings (out-of-vocabulary placeholder ids read row 0)."""
        ...

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Run the language model; return hidden states after the final norm, and the cache."""
        ...

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project hidden states onto the vocabulary, in float32."""
        ...


class EncoderDecoderModel(MultiModalModel, Protocol):
    """An encoder-decoder model; `embed_multimodal` is the encoder, and returns its hidden states.

    `metadata.cross.encoder_hidden_states` holds those of requests that start in a step: each
    decoder layer projects them, calls `write_encoder`, and then attends by `cross_attention`.
    """

    max_encoder_len: int
    """Hidden states of the longest encoder input; absent or 0 in other models."""

    @staticmethod
    def encoder_input(
        spec: EncoderSpec, token_ids: Sequence[int], items: Sequence[Mapping[str, np.ndarray]]
    ) -> EncoderUnits:
        """Return the encoder input of a prompt of any length and its items' tensors.

        Units have the shapes of `spec`.
        """
        ...


def require_units(spec: EncoderSpec | PackedEncoderSpec) -> EncoderSpec:
    """Return an encoder-decoder model's spec; TypeError for a packed encoder."""
    if isinstance(spec, EncoderSpec):
        return spec
    raise TypeError(
        f"`encoder_spec` of an encoder-decoder is a `{type(spec).__name__}`; its encoder reads one "
        "prompt with all items as units: make it an `EncoderSpec`, or leave `max_encoder_len` out"
    )


def needs_tower(model_class: Any, mm: MultiModalConfig) -> bool:
    """Return whether the model's towers are needed: not if every limit is 0.

    An encoder-decoder model always needs its encoder. Precomputed embeddings need no tower.
    """
    has_names = bool(getattr(model_class, "tower_names", ()))
    return not has_names or any(map(mm.limit, model_class.modalities))


def build_model(model_class: Any, hf_config: Any, *, dtype: Any, has_tower: bool = True) -> Any:
    """Build a model's structure, without its towers if not `has_tower`."""
    model = model_class(hf_config, dtype=dtype)
    if not has_tower:
        for name in model_class.tower_names:
            setattr(model, name, None)
    return model


def get_max_encoder_len(model: Any) -> int:
    """Return a model's `max_encoder_len`; 0: decoder only."""
    return getattr(model, "max_encoder_len", 0)
