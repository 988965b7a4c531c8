"""Gemma 4: a tower that averages squares of patches, one that hears, projections, the decoder."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache
from mmjax.layers.attention.segments import refine_segments
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm, divide_by_rms
from mmjax.models.gemma4.assistant import Gemma4Assistant
from mmjax.models.gemma4.host_inputs import Gemma4HostInputs, Gemma4UnifiedHostInputs
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model, text_rules
from mmjax.models.tower_model import TOWER, WRAPPER_RULES
from mmjax.rounding import cdiv
from mmjax.towers.gemma4_conformer import Gemma4Conformer, Gemma4ConformerConfig
from mmjax.towers.gemma4_vit import Gemma4ViT, Gemma4ViTConfig
from mmjax.weights.rules import Rule, RuleTypes


class Gemma4MultimodalEmbedder(nnx.Module):
    """A tower's rows, normed without a weight, in the decoder's width."""

    def __init__(self, hf_config: Any, width: int, *, eps: float, dtype: Any) -> None:
        self.embedding_projection = Linear(
            width, hf_config.text_config.hidden_size, use_bias=False, dtype=dtype
        )
        self.eps, self.dtype = eps, dtype

    def __call__(self, rows: Float[Array, "_rows D"]) -> Float[Array, "_rows _out"]:
        """Round, norm and project."""
        normed = divide_by_rms(rows.astype(self.dtype), self.eps)
        return self.embedding_projection(normed.astype(self.dtype))


class Gemma4UnifiedVisionEmbedder(nnx.Module):
    """A projection of a square's pixels, and embeddings of its column and row, normed thrice."""

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vision = hf_config.vision_config
        norm = {"eps": 1e-5, "dtype": dtype}  # no key of the config
        num_values, width = 3 * vision.model_patch_size**2, vision.mm_embed_dim
        self.patch_ln1 = LayerNorm(num_values, **norm)
        self.patch_dense = Linear(num_values, width, use_bias=True, dtype=dtype)
        self.patch_ln2 = LayerNorm(width, **norm)
        self.pos_embedding = nnx.Param(jnp.zeros((vision.mm_posemb_size, 2, width), dtype))
        self.pos_norm = LayerNorm(width, **norm)
        self.multimodal_embedder = Gemma4MultimodalEmbedder(
            hf_config, vision.output_proj_dims, eps=vision.rms_norm_eps, dtype=dtype
        )

    def __call__(
        self, pixel_values: Float[Array, "P _pixels"], places: Int[Array, "P 2"]
    ) -> Float[Array, "P D"]:
        """Embed squares whose pixels are from 0 to 1, colours last; `places`: column and row."""
        table = self.pos_embedding[...]
        x = self.patch_dense(self.patch_ln1(pixel_values.astype(table.dtype)))
        x = self.patch_ln2(x) + (table[places[:, 0], 0] + table[places[:, 1], 1])
        return self.multimodal_embedder(self.pos_norm(x))


class Gemma4ForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name."""

    host_inputs = Gemma4HostInputs
    embed_vision: Any
    """What embeds the tower's rows, or, where there is no tower, squares of pixels."""
    assistant_class = Gemma4Assistant
    assistant_architectures = (
        "Gemma4AssistantForCausalLM",
        "Gemma4UnifiedAssistantForCausalLM",
    )

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        with self._mark_tower_model(hf_config, {"image", "video"}):
            self._build_tower(hf_config, dtype=dtype)
        if hf_config.audio_config is not None:
            with self._mark_tower_model(hf_config, "audio"):
                self._build_audio_tower(hf_config, dtype=dtype)
        self.language_model = build_text_model(hf_config, dtype=dtype)
        text = hf_config.get_text_config()
        self.sees = "items" if text.use_bidirectional_attention == "vision" else "past"
        names = ("image_token_id", "video_token_id", "audio_token_id")
        marks = (getattr(hf_config, name) for name in names)
        self.mark_ids = tuple(mark for mark in marks if mark is not None)
        self.pad_id: int = text.pad_token_id or 0

    def _build_tower(self, hf_config: Any, *, dtype: Any) -> None:
        vision = hf_config.vision_config
        self.vision_tower = Gemma4ViT(Gemma4ViTConfig.from_hf(vision), dtype=dtype)
        self.embed_vision = Gemma4MultimodalEmbedder(
            hf_config, vision.hidden_size, eps=vision.rms_norm_eps, dtype=dtype
        )

    def _build_audio_tower(self, hf_config: Any, *, dtype: Any) -> None:
        audio = hf_config.audio_config
        config = Gemma4ConformerConfig.from_hf(audio)
        self.audio_tower = Gemma4Conformer(config, dtype=dtype)
        self.embed_audio = Gemma4MultimodalEmbedder(
            hf_config, config.output_proj_dims, eps=audio.rms_norm_eps, dtype=dtype
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the hub's layout, which is also save_pretrained's.

        What layers that read another's keys have for keys and values is not read.
        """
        text = hf_config.get_text_config()
        num_layers, num_shared = text.num_hidden_layers, text.num_kv_shared_layers or 0
        audio, layers = r"^(model\.)?audio_tower\.", "audio_tower.encoder_layers."
        return (
            Rule(audio + r"layers\.(.*)\.linear\.", rf"{layers}\2."),
            Rule(audio + r"layers\.", layers),
            Rule(audio + r"(.*\.layer\d)\.norm\.", r"audio_tower.\2.channel_norm."),
            Rule(audio, "audio_tower."),
            Rule(r"^(model\.)?embed_audio\.", "embed_audio."),
            *(
                Rule(rf"language_model\.(model\.)?layers\.{number}\.self_attn\.[kv]_", None)
                for number in range(num_layers - num_shared, num_layers)
            ),
            *text_rules(hf_config),
            Rule(r"\.router\.norm\.", None),  # without a weight
            Rule(r"^model\.language_model\.(.*\.router\.)proj\.", r"language_model.\1"),
            Rule(
                TOWER + r"encoder\.layers\.(.*_proj)\.linear\.", r"vision_tower.encoder_layers.\3."
            ),
            Rule(TOWER + r"encoder\.layers\.", "vision_tower.encoder_layers."),
            Rule(TOWER, "vision_tower."),
            Rule(r"^(model\.)?embed_vision\.", "embed_vision."),
            *WRAPPER_RULES,
        )

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up the text embeddings; an item's mark is padding, also in an answer, as in HF."""
        return super().embed_input_ids(self._as_padding(token_ids))

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        **more: Array,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Run the language model, which may have an embedding of each token for each layer."""
        more = {name: self._as_padding(token_ids) for name, token_ids in more.items()}
        return super().__call__(inputs_embeds, positions, kv_cache, metadata, **more)

    def _as_padding(self, token_ids: Int[Array, " T"]) -> Int[Array, " T"]:
        is_mark = jnp.isin(token_ids, jnp.array(self.mark_ids, jnp.int32))
        return jnp.where(is_mark, self.pad_id, token_ids)

    def embed_multimodal(
        self, *, segment_ids: Int[Array, " P"], **inputs: Array
    ) -> Float[Array, "_rows D"]:
        """Return the embeddings of packed pictures and videos, or of packed clips."""
        if "input_features" in inputs:
            return self._embed_clips(segment_ids=segment_ids, **inputs)
        return self._embed_pictures(segment_ids=segment_ids, **inputs)

    def _embed_clips(
        self,
        *,
        input_features: Float[Array, "P _values"],
        num_frames: Int[Array, " P"],
        segment_ids: Int[Array, " P"],
    ) -> Float[Array, "P D"]:
        with jax.named_scope("audio_tower"):
            rows = self.audio_tower(input_features, num_frames=num_frames, segment_ids=segment_ids)
        return self.embed_audio(rows)

    def _embed_pictures(
        self,
        *,
        pixel_values: Float[Array, "P _pixels"],
        places: Int[Array, "P 2"],
        segment_ids: Int[Array, " P"],
        frame_ids: Int[Array, " P"],
    ) -> Float[Array, "_rows D"]:
        num_frames = cdiv(len(segment_ids), self.vision_tower.config.pooling_kernel_size**2)
        frames = refine_segments(segment_ids, frame_ids, num_parts=num_frames)
        with jax.named_scope("vision_tower"):
            rows = self.vision_tower(
                pixel_values, places=places, segment_ids=frames, item_ids=segment_ids
            )
        return self.embed_vision(rows)


class Gemma4UnifiedForConditionalGeneration(Gemma4ForConditionalGeneration):
    """Served as HF's class of this name: no towers, squares of pixels and samples alone."""

    host_inputs = Gemma4UnifiedHostInputs

    def _build_tower(self, hf_config: Any, *, dtype: Any) -> None:
        self.embed_vision = Gemma4UnifiedVisionEmbedder(hf_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map the files' layout, in which `embed_vision` is in two parts, and the module's."""
        inner = "embed_vision.multimodal_embedder.embedding_projection."
        return (
            Rule(r"^(model\.)?vision_embedder\.", "embed_vision."),
            Rule(r"^(model\.)?embed_vision\.embedding_projection\.", inner),
            *Gemma4ForConditionalGeneration.rules(hf_config),
        )

    def _build_audio_tower(self, hf_config: Any, *, dtype: Any) -> None:
        audio = hf_config.audio_config
        self.embed_audio = Gemma4MultimodalEmbedder(
            hf_config, audio.output_proj_dims, eps=audio.rms_norm_eps, dtype=dtype
        )

    def _embed_clips(
        self, *, input_features: Float[Array, "P _values"], **_: Array
    ) -> Float[Array, "P D"]:
        return self.embed_audio(input_features)

    def _embed_pictures(
        self, *, pixel_values: Float[Array, "P _pixels"], places: Int[Array, "P 2"], **_: Array
    ) -> Float[Array, "P D"]:
        # No square sees another.
        return self.embed_vision(pixel_values, places)
