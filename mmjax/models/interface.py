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
"""Inputs of `embed_multimodal`, each `[units, ...]`; how many of their rows, from the first, are
states that the decoder sees."""

MultiModalEmbeddings = Array | Sequence[Array]
"""What `embed_multimodal` returns: one array, or a list or tuple of arrays `[rows, D]`, one for
each unit or item; all their rows, in order, are the call's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """How items become calls of `encode`: units of one fixed shape (a tile, a crop), in buckets.

    An item is one or more units; a call holds one bucket's units, of any number of items.
    """

    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    """Per input of `embed_multimodal`: shape of one unit, dtype."""
    tokens_per_unit: int
    """Rows that one unit gives; an item's rows are its units', in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedEncoderSpec:
    """How items of any size become calls of `encode`: rows of patches, packed into buckets of `P`.

    `embed_multimodal` is given `segment_ids`, int32[P], beside the inputs: the number of a row's
    item in the call, -1 for padding (rows of zeros). An item's rows stand together and in order.
    What depends on its grid (places, rotary rows, windows) are inputs too, a row for each patch.
    """

    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    """Per input of `embed_multimodal`: shape of one patch's row, dtype."""
    patches_per_token: int
    """So many rows, one behind the other, become one embedding; divides each item's number."""
    max_patches: int
    """Of the largest item that the processor makes."""


class MultiModalModel(Protocol):
    """An `nnx.Module` that only describes structure; all methods are pure."""

    RULES: Sequence[Rule]
    """Names in the checkpoint's files -> names in this module's tree."""
    encoder_spec: EncoderSpec | PackedEncoderSpec
    kv_cache_spec: KVCacheSpec
    modalities: Sequence[str]
    """What a prompt may hold beside text: the keys of `--limit-mm-per-prompt`."""
    tower_names: Sequence[str]
    """The attributes that media alone need: None where the operator allows no media. A class that
    does not say keeps all. `SupportsMultiModal` finds both by itself."""
    has_bidirectional_spans: bool
    """Whether a run of an item's embeddings (those without a mark between them) see each other both
    ways: a step then holds each run whole. Of units, none is longer than a unit."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None: ...

    @staticmethod
    def encoder_units(item: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return an item's tensors as `[units, ...]` arrays, named as in `encoder_spec`.

        A packed encoder's are `[patches, ...]`: its places and windows are computed here, in numpy.
        """
        ...

    def embed_multimodal(self, **inputs: Array) -> MultiModalEmbeddings:
        """Encode `U` units into `P` rows each, of the language model's width; a pack into rows."""
        ...

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up the text embeddings (an out-of-vocabulary placeholder id reads row 0)."""
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
    """A model whose decoder looks at an encoder of its own: `embed_multimodal` is that encoder.

    Its rows are the encoder's states. Where requests begin, `metadata.cross.states` holds theirs:
    each layer projects them, calls `write_encoder`, and looks at them with `cross_attention`.
    """

    max_encoder_len: int
    """States of the longest encoder; absent or 0 in every other model."""

    @staticmethod
    def encoder_input(
        spec: EncoderSpec, token_ids: Sequence[int], items: Sequence[Mapping[str, np.ndarray]]
    ) -> EncoderUnits:
        """Return what the encoder reads: its prompt, and the tensors of the items that lie there.

        The prompt is as long as the client made it; units have the shapes of `spec`.
        """
        ...


def require_units(spec: EncoderSpec | PackedEncoderSpec) -> EncoderSpec:
    """Return an encoder-decoder's spec; TypeError where its encoder takes no units."""
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

    An encoder-decoder's encoder reads text as well, and is always there. Embeddings in place of
    media need no tower.
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
    """Return a model's `max_encoder_len`; 0 for a decoder alone."""
    return getattr(model, "max_encoder_len", 0)


@contextmanager
def _collect_modules(model: Any) -> Iterator[list[str]]:
    """Yield a list; after the body it has the names of the modules and parameters set in it."""
    before = set(vars(model))
    names: list[str] = []
    yield names
    added = {name: value for name, value in vars(model).items() if name not in before}
    names += [name for name, value in added.items() if isinstance(value, nnx.Pytree | nnx.Variable)]
