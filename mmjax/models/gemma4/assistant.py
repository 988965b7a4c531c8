"""What guesses tokens ahead of a Gemma 4: `google/gemma-4-E2B-it-assistant` and its kin."""

from collections.abc import Sequence
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.language.gemma4 import (
    Centroids,
    Gemma4AssistantTextModel,
    Gemma4Config,
    Gemma4TextModel,
)
from mmjax.models.gemma4.host_inputs import Gemma4HostInputs
from mmjax.models.interface import MultiModalModel
from mmjax.weights.rules import Rule, RuleTypes


class Gemma4Assistant(MultiModalModel):
    """HF's `Gemma4AssistantForCausalLM`, and that of the unified ones."""

    host_inputs = Gemma4HostInputs
    shared_names = ("language_model.embed_tokens.",)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        config = Gemma4Config.from_hf(hf_config.get_text_config(), is_assistant=True)
        self.language_model = Gemma4AssistantTextModel(
            config,
            backbone_width=hf_config.backbone_hidden_size,
            centroids=_read_centroids(hf_config, config.vocab_size),
            dtype=dtype,
        )

    def find_lent(self, model: MultiModalModel) -> tuple[int, ...]:
        """Return which of a model's caches its layers read, in the order of its own.

        Raises CheckpointError for a model that it was not trained with.
        """
        own, text = self.language_model, model.language_model
        assert isinstance(own, Gemma4AssistantTextModel), "it is no assistant"
        assert isinstance(text, Gemma4TextModel), "it guesses for Gemma 4"
        kinds, caches = own.find_last_caches(), text.find_last_caches()
        order = sorted(kinds, key=kinds.__getitem__)
        lent = tuple(caches[kind] for kind in order if kind in caches)
        theirs = tuple(text.kv_cache_spec.layers[place] for place in lent)
        has_keys = own.kv_cache_spec.layers == theirs
        sizes = (own.backbone_width, own.config.vocab_size)
        wanted = (text.config.hidden_size, text.config.vocab_size)
        if sizes != wanted or not has_keys:
            raise CheckpointError(
                f"an assistant was trained with a model of width {sizes[0]}, {sizes[1]} tokens "
                f"and keys of {_describe(own)}; the one that it would guess for has width "
                f"{wanted[0]}, {wanted[1]} tokens and keys of {_describe(text)}. Give the "
                "assistant that was published with it"
            )
        return lent

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the files' names; the table of tokens there is the head's."""
        return (
            Rule(r"^(model\.embed_tokens|lm_head)\.", "language_model.lm_head."),
            Rule(r"^masked_embedding\.", "language_model."),
            Rule(r"^(pre|post)_projection\.", r"language_model.\1_projection."),
            Rule(r"^model\.", "language_model."),
        )


def _describe(text: Gemma4TextModel) -> str:
    """Return the heads of each kind of layer."""
    spec = text.kv_cache_spec
    last = ((kind, spec.layers[place]) for kind, place in text.find_last_caches().items())
    return ", ".join(
        f"{one.num_kv_heads} x {one.head_dim} (`{kind}`)" for kind, one in sorted(last)
    )


def _read_centroids(hf_config: Any, vocab_size: int) -> Centroids | None:
    if not hf_config.use_ordered_embeddings:
        return None
    number, num_active = hf_config.num_centroids, hf_config.centroid_intermediate_top_k
    if vocab_size % number or not 1 <= num_active <= number:
        raise CheckpointError(
            f"`num_centroids` is {number} and `centroid_intermediate_top_k` {num_active}; mmjax "
            f"takes a divisor of the {vocab_size} tokens, and at most as many of them"
        )
    return Centroids(number, num_active)
