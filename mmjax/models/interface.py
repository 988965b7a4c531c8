"""What the engine asks of every model's array half."""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.config.engine_config import MultiModalConfig, Quantization
from mmjax.errors import CheckpointError, ConfigError
from mmjax.layers.attention.api import AttentionMetadata, with_gaps
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec
from mmjax.layers.decoder import Decoder
from mmjax.layers.linear import Linear
from mmjax.layers.lora import EmbedLoRA, LoRA
from mmjax.layers.quantization import (
    Int8Linear,
    Layouts,
    PackedLinear,
    place_packed,
    quantize_language_model,
)
from mmjax.models.host_inputs import AFFINE, HostInputs, Sees
from mmjax.processing.image_processors.affine import apply_affine
from mmjax.weights.rules import RuleTypes

MultiModalEmbeddings = Array | Sequence[Array]
"""What `embed_multimodal` returns: one array, or a list or tuple of arrays `[rows, D]`, one for
each unit or item; all their rows, in order, are the call's."""


class SupportsMultiModal:
    """vLLM's interface of this name, as far as it means something here: a base beside `nnx.Module`.

    `__init__` builds the parts that media alone need under `_mark_tower_model`, and those of the
    language model under `_mark_language_model`.
    """

    modalities: Sequence[str] = ()
    """Those that towers are marked for: the keys of `--limit-mm-per-prompt`."""
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
        names = self._language_model_names or ("language_model",)
        marked = [getattr(self, name, None) for name in names]
        for module in marked:
            if hasattr(module, "embed_input_ids"):
                return module
        raise NotImplementedError(
            f"`{type(self).__name__}` has no `language_model` that has `embed_input_ids`, and sets "
            "none under `_mark_language_model`; do so, or override `get_language_model`"
        )

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up the text embeddings; the engine writes those of media over them."""
        return self.get_language_model().embed_input_ids(token_ids)


class MultiModalModel(nnx.Module, SupportsMultiModal):
    """What every model's array half is: towers and connectors before a `language_model`.

    A module that only describes structure; all methods are pure. A family defines `__init__`,
    `rules` and `embed_multimodal`, and names its `host_inputs`. What media alone need it builds
    under `_mark_tower_model`.
    """

    host_inputs: ClassVar[type[HostInputs]]
    mtp_class: ClassVar[type["MultiModalModel"] | None] = None
    """What guesses tokens ahead as an `MtpTextModel` does."""
    mtp_layers_key: ClassVar[str] = "num_nextn_predict_layers"
    """The key of a decoder's config that says how many such layers the checkpoint has."""
    assistant_class: ClassVar[type["MultiModalModel"] | None] = None
    """What guesses tokens ahead from a checkpoint of its own, over caches that this model lends."""
    assistant_architectures: ClassVar[Sequence[str]] = ()
    """What HF calls it."""
    shared_names: ClassVar[Sequence[str]] = ()
    """Of what guesses: how names of parameters begin that the model it guesses for holds."""
    unadapted: ClassVar[Sequence[str]] = ()
    """Modules of towers whose layers `extra_embeds` applies, by their attributes. Adapters of them
    are refused, for these embeddings are computed once, and all requests read them."""
    read_by_extra: ClassVar[Sequence[str]] = ()
    """Modules of towers that `extra_embeds` reads: an engine holds them whose items are encoded
    elsewhere."""
    sees: Sees = "past"
    """What a prompt's tokens see; an instance may set it by its config. `items`: a run of an item's
    embeddings (those without a mark between them) see each other both ways, so that a step holds
    each run whole. Of units, none is longer than a unit. `all_items`: all of a prompt's embeddings
    do, whatever is between them, and a step holds what is from the first to the last. `prompt`: a
    step holds all of a prompt. `reference`: windows of the decoder's layers keep the prompt."""
    max_encoder_len: int = 0
    """Tokens of the longest prompt of an encoder-decoder's encoder; 0 for a decoder alone.

    `embed_multimodal` encodes an item, once for all prompts about it; `encode_prompts` is the
    encoder over a prompt with the items' embeddings. `metadata.cross.encoder_hidden_states` holds
    its hidden states of requests that start in a step: each decoder layer projects them, calls
    `write_encoder`, and then attends by `cross_attention`.
    """
    num_token_ids: int = 0
    """Ids that a prompt may hold: more than there are logits, where tokens behind the vocabulary
    are read and never sampled. 0: as many as there are logits."""
    language_model: Decoder

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} must build its modules")

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Return how names in the checkpoint's files become names in this module's tree."""
        return ()

    @staticmethod
    def find_alignment_heads(path: Path, hf_config: Any) -> Sequence[tuple[int, int]]:
        """Return the cross-attention's heads whose weights tell a token's place in the encoder's.

        Pairs of a layer of the decoder and a head; none: `align` is not called. `path`: the
        checkpoint's directory.
        """
        return ()

    @classmethod
    def maxtext_rules(cls, hf_config: Any) -> Sequence[RuleTypes]:
        """Return how MaxText's names become names in this module's tree."""
        raise CheckpointError(
            f"mmjax has no rules for MaxText's checkpoints of `{cls.__name__}`; it reads those of "
            "Gemma 3 and Qwen3-VL"
        )

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What one token stores."""
        return self.language_model.kv_cache_spec

    # As every signature that a family gives it: the inputs of its `encoder_spec`, by name.
    def embed_multimodal(self, *args: Any, **inputs: Any) -> MultiModalEmbeddings:
        """Encode `U` units into `P` rows each, of the language model's width; a pack into rows.

        `1 + len(fed_layers)` times as wide where items have features for layers of the decoder.
        """
        raise NotImplementedError(f"{type(self).__name__} must encode its items")

    def align(
        self,
        token_ids: Int[Array, " T"],
        states: Float[Array, "S D"],
        heads: Sequence[tuple[int, int]],
    ) -> Float[Array, "_heads T S"]:
        """Return how much the tokens of one text attend to an encoder's states, in float32."""
        raise NotImplementedError(f"{type(self).__name__} has no heads that align")

    def encode_prompts(
        self, inputs_embeds: Float[Array, "B S D"], is_token: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Return the hidden states of an encoder-decoder's encoder, those of padding finite.

        `inputs_embeds`: tokens as `embed_input_ids` looks them up, and the items' embeddings
        among them. `is_token` is false for padding, which no token may see.
        """
        raise NotImplementedError(f"{type(self).__name__} has no encoder that reads a prompt")

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the learned embeddings that `host_inputs.embed_rows` has among an item's."""
        raise NotImplementedError(
            f"{type(self).__name__} has no learned embeddings among an item's"
        )

    def __call__(
        self,
        inputs_embeds: Float[Array, "T _wide"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        **more: Array,
    ) -> tuple[Float[Array, "T _wide"], KVCache | None]:
        """Run the language model; return hidden states after the final norm, and the cache.

        `more`: the `token_ids` of a language model that reads them.
        """
        metadata = with_gaps(metadata) if self.sees == "all_items" else metadata
        with jax.named_scope("language_model"):
            return self.language_model(inputs_embeds, positions, kv_cache, metadata, **more)

    def project_states(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R _width"]:
        """Return what becomes vectors of hidden states: themselves, where a model says no more."""
        return hidden_states

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project hidden states onto the vocabulary, in float32."""
        return self.language_model.compute_logits(hidden_states)


def embed_units(model: Any, inputs: Mapping[str, Array]) -> Float[Array, "... D"]:
    """Return the rows of a call's units, whose bytes become the pixels that the model takes."""
    given = dict(inputs)
    affine = given.pop(AFFINE, None)
    if affine is not None:
        with jax.named_scope("pixels"):
            given = {
                name: apply_affine(array, affine) if array.dtype == jnp.uint8 else array
                for name, array in given.items()
            }
    return join_embeds(model.embed_multimodal(**given))


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


def left_out_names(model: Any, mm: MultiModalConfig, *, has_towers: bool = True) -> tuple[str, ...]:
    """Return the attributes of the towers, where every limit is 0 and no prompt needs them.

    Precomputed embeddings need no tower. Without `has_towers` another process has them, but for
    learned vectors, which `extra_embeds` may read, and `read_by_extra`.
    """
    names = tuple(getattr(model, "tower_names", ()))
    if not has_towers:
        is_kept = {one: isinstance(getattr(model, one), nnx.Variable) for one in names}
        return tuple(one for one in names if not is_kept[one] and one not in model.read_by_extra)
    return () if names and any(map(mm.limit, model.modalities)) else names


class AdapterSizes(NamedTuple):
    """The room for adapters beside a model's layers."""

    num_slots: int
    rank: int
    dtype: Any
    has_towers: bool
    """Whether towers and connectors have room, too."""


def build_model(
    model_class: Any,
    hf_config: Any,
    mm: MultiModalConfig | None = None,
    quantization: Quantization | Layouts | None = None,
    adapters: AdapterSizes | None = None,
    *,
    dtype: Any,
    has_towers: bool = True,
    tapped_layers: Sequence[int] = (),
) -> Any:
    """Build a model's structure, without its towers where, by `mm`, no prompt needs them.

    `has_towers`: as `left_out_names`. `quantization`: what is made of float weights, or how a
    checkpoint has them. `tapped_layers`: as of `Decoder.tap`.
    """
    model = model_class(hf_config, dtype=dtype)
    if tapped_layers:
        text = model.language_model
        if model.max_encoder_len or not isinstance(text, Decoder):
            raise ConfigError(
                f"`speculative_config` names an EAGLE-3 head, but `{model_class.__name__}` gives "
                "no states of its layers; give another method"
            )
        text.tap(tapped_layers)
    for name in () if mm is None else left_out_names(model, mm, has_towers=has_towers):
        setattr(model, name, None)
    if isinstance(quantization, str):
        quantize_language_model(model, quantization)
    elif quantization:
        place_packed(model, quantization)
    if adapters is not None:
        _add_adapters(model, adapters)
    return model


def _add_adapters(model: Any, sizes: AdapterSizes) -> None:
    shape = {"num_slots": sizes.num_slots, "rank": sizes.rank, "dtype": sizes.dtype}
    for path, module in list(nnx.iter_modules(model)):
        is_text = path[:1] == ("language_model",)
        # What becomes of states is no part of a step, which alone has adapters.
        has_room = is_text or (sizes.has_towers and path[:1] != ("embedding_proj_layer",))
        has_room &= path[:1] not in [(name,) for name in model.unadapted]
        if isinstance(module, PackedLinear | Linear | Int8Linear) and has_room:
            is_packed = isinstance(module, PackedLinear)
            matrix = module.describe_whole() if is_packed else module.weight
            out_features, in_features = matrix.shape
            module.lora = nnx.data(LoRA(in_features, out_features, **shape))
    text = model.language_model
    vocab_size, width = text.embed_tokens.weight.shape
    text.embed_tokens.lora = nnx.data(EmbedLoRA(vocab_size, width, **shape))
    num_logits = vocab_size if text.lm_head is None else text.lm_head.weight.shape[0]
    text.lora = nnx.data(LoRA(width, num_logits, **shape))


@contextmanager
def _collect_modules(model: Any) -> Iterator[list[str]]:
    """Yield a list; after the body it has the names of the modules and parameters set in it."""
    before = set(vars(model))
    names: list[str] = []
    yield names
    added = {name: value for name, value in vars(model).items() if name not in before}
    names += [name for name, value in added.items() if isinstance(value, nnx.Pytree | nnx.Variable)]
