"""What the engine asks of every model's array half."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config import MultiModalConfig
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec
from mmjax.layers.decoder import Decoder
from mmjax.models.host_inputs import HostInputs
from mmjax.weights.rules import Rule, Split


class MultiModalModel(nnx.Module):
    """What every model's array half is: towers and connectors before a `language_model`.

    A module that only describes structure; all methods are pure. A family defines `__init__`,
    `rules` and `embed_multimodal`, and names its `host_inputs`.
    """

    host_inputs: ClassVar[type[HostInputs]]
    modalities: ClassVar[Sequence[str]] = ("image",)
    """What a prompt may hold beside text: the keys of `--limit-mm-per-prompt`."""
    tower_names: ClassVar[Sequence[str]] = ()
    """The attributes that media alone need: None where the operator allows no media. A class that
    does not say keeps all."""
    has_bidirectional_spans: ClassVar[bool] = False
    """Whether a run of an item's embeddings (those without a mark between them) see each other both
    ways: a step then holds each run whole. Of units, none is longer than a unit."""
    max_encoder_len: int = 0
    """States of the longest encoder; 0 for a decoder alone.

    An encoder-decoder's `embed_multimodal` is its encoder, and `host_inputs.encoder_input` makes
    what it reads. Its rows are the encoder's hidden states. Where requests begin,
    `metadata.cross.states` holds theirs: each layer projects them, calls `write_encoder`, and looks
    at them with `cross_attention`.
    """
    language_model: Decoder

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} must build its modules")

    @staticmethod
    def rules(hf_config: Any) -> Sequence[Rule | Split]:
        """Return how names in the checkpoint's files become names in this module's tree."""
        return ()

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What one token stores."""
        return self.language_model.kv_cache_spec

    # As every signature that a family gives it: the inputs of its `encoder_spec`, by name.
    def embed_multimodal(
        self, *args: Any, **inputs: Any
    ) -> Float[Array, "U P D"] | Float[Array, "_rows D"]:
        """Encode `U` units into `P` rows each, of the language model's width; a pack into rows."""
        raise NotImplementedError(f"{type(self).__name__} must encode its items")

    def extra_embeds(self) -> Float[Array, "_extra D"]:
        """Return the learned embeddings that `host_inputs.embed_rows` has among an item's."""
        raise NotImplementedError(
            f"{type(self).__name__} has no learned embeddings among an item's"
        )

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up the text embeddings (an out-of-vocabulary placeholder id reads row 0)."""
        return self.language_model.embed(token_ids)

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Run the language model; return hidden states after the final norm, and the cache."""
        with jax.named_scope("language_model"):
            return self.language_model(inputs_embeds, positions, kv_cache, metadata)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project hidden states onto the vocabulary, in float32."""
        return self.language_model.compute_logits(hidden_states)


def needs_tower(model_class: Any, mm: MultiModalConfig) -> bool:
    """Return whether prompts may hold what the towers encode: not where every limit is 0.

    An encoder-decoder's encoder reads text as well, and is always there. Embeddings in place of
    media need no tower.
    """
    has_names = bool(getattr(model_class, "tower_names", ()))
    return not has_names or any(map(mm.limit, model_class.modalities))


def build_model(model_class: Any, hf_config: Any, *, dtype: Any, has_tower: bool = True) -> Any:
    """Build a model's structure, without its towers where no prompt needs them."""
    model = model_class(hf_config, dtype=dtype)
    if not has_tower:
        for name in model_class.tower_names:
            setattr(model, name, None)
    return model
