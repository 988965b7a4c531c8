"""What the engine asks of every model's class."""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config import MultiModalConfig
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec
from mmjax.weights.rules import Rule

EncoderUnits = tuple[Mapping[str, np.ndarray], int]
"""Inputs of `embed_multimodal`, each `[units, ...]`; how many of its output rows, from the first,
the decoder attends to."""

MultiModalEmbeddings = Array | Sequence[Array]
"""What `embed_multimodal` returns: one array, or a list or tuple of arrays `[rows, D]`, one for
each unit or item; all their rows, in order, are the call's."""


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
    """The attributes that media alone need: None where the operator allows no media. A class that
    does not say keeps all. `SupportsMultiModal` finds both by itself."""
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

    def embed_multimodal(self, **inputs: Array) -> MultiModalEmbeddings:
        """Encode `U` units into `P` rows each, of the language model's width; a pack into rows."""
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


class SupportsMultiModal:
    """vLLM's interface of this name, as far as it means something here: a base beside `nnx.Module`.

    `__init__` builds the parts that media alone need under `_mark_tower_model`, and those of the
    language model under `_mark_language_model`.
    """

    modalities: Sequence[str] = ()
    """Those that towers are marked for."""
    tower_names: Sequence[str] = ()
    """The attributes that are marked as towers."""
    _language_model_names: Sequence[str] = ()

    @contextmanager
    def _mark_tower_model(self, config: Any, modalities: str | Set[str]) -> Iterator[None]:
        """Mark the modules that the body sets as needed by these modalities alone.

        They are left out where `--limit-mm-per-prompt` allows no media at all. `config` is there
        because vLLM's has it: a port gives the one that it has, and nothing reads it.
        """
        added = {modalities} if isinstance(modalities, str) else modalities
        with _collect_modules(self) as names:
            yield
        self.modalities = tuple(dict.fromkeys((*self.modalities, *sorted(added))))
        self.tower_names = (*self.tower_names, *names)

    @contextmanager
    def _mark_language_model(self, config: Any) -> Iterator[None]:
        """Mark the modules that the body sets as parts of the language model; `config` as above."""
        with _collect_modules(self) as names:
            yield
        self._language_model_names = (*self._language_model_names, *names)

    def get_language_model(self) -> Any:
        """Return the marked module that embeds tokens; NotImplementedError where none does."""
        marked = [getattr(self, name) for name in self._language_model_names]
        for module in marked:
            if hasattr(module, "embed_input_ids"):
                return module
        raise NotImplementedError(
            f"`{type(self).__name__}` sets no module that has `embed_input_ids` under "
            "`_mark_language_model`; do so, or override `get_language_model`"
        )

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up the text embeddings; the engine writes those of media over them."""
        return self.get_language_model().embed_input_ids(token_ids)


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


def join_embeds(embeds: MultiModalEmbeddings | Any) -> Float[Array, "... D"]:
    """Return what `embed_multimodal` gave as one array: a list of arrays as all of their rows.

    TypeError for anything else.
    """
    if isinstance(embeds, Array):
        return embeds
    if not isinstance(embeds, list | tuple) or not all(isinstance(one, Array) for one in embeds):
        raise TypeError(
            f"`embed_multimodal` returned a `{type(embeds).__name__}`; return an array `[units, "
            "rows, D]` or `[rows, D]`, or a list of arrays `[rows, D]`, one for each unit"
        )
    return jnp.concatenate([one.reshape(-1, one.shape[-1]) for one in embeds])


def left_out_names(model: Any, mm: MultiModalConfig) -> tuple[str, ...]:
    """Return the attributes of the towers, where every limit is 0 and no prompt needs them.

    An encoder-decoder model always needs its encoder. Precomputed embeddings need no tower.
    """
    names = tuple(getattr(model, "tower_names", ()))
    return () if names and any(map(mm.limit, model.modalities)) else names


def build_model(model_class: Any, hf_config: Any, mm: MultiModalConfig, *, dtype: Any) -> Any:
    """Build a model's structure, without its towers where no prompt needs them."""
    model = model_class(hf_config, dtype=dtype)
    for name in left_out_names(model, mm):
        setattr(model, name, None)
    return model


def get_max_encoder_len(model: Any) -> int:
    """Return a model's `max_encoder_len`; 0: decoder only."""
    return getattr(model, "max_encoder_len", 0)


@contextmanager
def _collect_modules(model: Any) -> Iterator[list[str]]:
    """Yield a list; after the body it has the names of the modules and parameters set in it."""
    before = set(vars(model))
    names: list[str] = []
    yield names
    added = {name: value for name, value in vars(model).items() if name not in before}
    names += [name for name, value in added.items() if isinstance(value, nnx.Pytree | nnx.Variable)]
