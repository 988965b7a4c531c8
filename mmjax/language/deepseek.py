"""DeepSeek-V2's decoder (arXiv 2405.04434): latent attention and a mixture of experts.

Its smallest model, and those of DeepSeek's OCR models, have plain attention; Unlimited-OCR's has
windows that keep the prompt (arXiv 2606.23050). DeepSeek-V3's router (arXiv 2412.19437) is one of
its `topk_method`s. DeepSeek-V3, which Kimi K2 is (arXiv 2507.20534), compresses queries, too, and
so does Mistral 4, whose router is of softmaxes and whose queries grow with their positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.attention.api import AttentionMetadata, attention
from mmjax.layers.attention.kv_cache import KVCacheSpec, LayerCache
from mmjax.layers.decoder import Angles, Decoder, DecoderLayer, GroupedQueryAttention
from mmjax.layers.linear import Linear
from mmjax.layers.lora import product_by_head
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.moe import MixtureOfExperts, RouterConfig
from mmjax.layers.norm import RMSNorm
from mmjax.layers.rope import (
    apply_interleaved_rotary,
    apply_rotary,
    find_query_scales,
    find_score_factor,
    text_angles,
)

_LEFT_OUT: Mapping[str, Any] = MappingProxyType(
    {
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "mlp_bias": False,
        "n_group": 1,
        "n_shared_experts": None,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "use_mla": True,
    }
)
"""What a key means where a configuration leaves it out."""

_BY_KIND: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        "mistral4": {"scoring_func": "softmax", "topk_method": "greedy", "n_group": 1},
    }
)
"""By `model_type`, the keys that its class does not read: they say this, or are left out."""

_LATENT_EPS = 1e-6
"""Of the norms of latents: no key of the config, as `rms_norm_eps` is of the others alone."""

_ROPE_THETA = 10000
"""Where a configuration leaves it out."""

_ALLOWED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("softmax", "sigmoid"),
        "tie_word_embeddings": (False,),
        # The first of them is what the published class writes where none is given.
        "topk_method": ("gready", "greedy", "group_limited_greedy", "noaux_tc"),
    }
)
"""By key, the values that are served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Widths of latent attention, of one head (section 2.1)."""

    rank: int
    """The width of the latent, which all heads share: `kv_lora_rank`."""
    nope_dim: int
    """The width of the part of queries and keys that has no position."""
    rope_dim: int
    """The width of the part that has a position; its key is shared by all heads."""
    value_dim: int
    query_rank: int | None = None
    """The width of the latent that queries are made of: `q_lora_rank`; None: they have none."""
    is_interleaved: bool = True
    """Whether neighbours are a pair that is rotated, and not the halves of the rotated part."""
    score_factor: float = 1.0
    """What scores are multiplied by beside the root of a head's width: YaRN's, squared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """The keys that arrays depend on, of each config that `models/text_model.py` reads by this."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_dense_layers: int
    """How many of the first layers have no experts."""
    num_attention_heads: int
    num_key_value_heads: int
    latent: LatentConfig | None
    """None: plain attention."""
    router: RouterConfig
    num_shared_experts: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    windows: tuple[int | None, ...]
    """Per layer, how many tokens a token of an answer sees beside the prompt; None: all."""
    query_scales: tuple[int, tuple[float, ...]] | None = None
    """Queries are multiplied by one factor in each run of so many positions; None: they are not."""

    @classmethod
    def from_hf(cls, hf_config: Any, **changes: Any) -> "DeepseekConfig":
        """Read a configuration; `CheckpointError` for what is not served.

        `changes`: what a key means, whether it is there or not (`use_mla`).
        """
        values, rope = _read_keys(hf_config) | changes, _read_rope(hf_config)
        return read_config(
            cls,
            hf_config,
            num_dense_layers=_count_dense(hf_config, values["first_k_dense_replace"]),
            latent=_read_latent(hf_config, values, rope) if values["use_mla"] else None,
            router=_read_router(hf_config, values),
            num_shared_experts=values["n_shared_experts"] or 0,
            hidden_act=values["hidden_act"],
            rms_norm_eps=values["rms_norm_eps"],
            rope_parameters=rope,
            query_scales=find_query_scales(rope, hf_config.max_position_embeddings)
            if hf_config.model_type == "mistral4"
            else None,
            windows=_read_windows(hf_config),
        )

    @property
    def rotary_dim(self) -> int:
        """Width of what is rotated of a head."""
        if self.latent is None:
            return self.hidden_size // self.num_attention_heads
        return self.latent.rope_dim

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """The latent and the key with a position, as one head of all; or keys and values."""
        if self.latent is None:
            return KVCacheSpec.alike(
                self.num_hidden_layers,
                num_kv_heads=self.num_key_value_heads,
                head_dim=self.rotary_dim,
            )
        return KVCacheSpec.alike(
            self.num_hidden_layers,
            num_kv_heads=1,
            head_dim=self.latent.rank + self.latent.rope_dim,
            value_dim=self.latent.rank,
        )


def _read_keys(hf_config: Any) -> dict[str, Any]:
    """Return the keys that may be left out; `CheckpointError` for values that are not served."""
    own = _BY_KIND.get(hf_config.model_type, {})
    means = {**_LEFT_OUT, **own}
    values = {key: getattr(hf_config, key, value) for key, value in means.items()}
    for key, allowed in {**_ALLOWED, **{key: (value,) for key, value in own.items()}}.items():
        if values[key] not in allowed:
            raise CheckpointError(
                f"`language_config.{key}` is {values[key]!r}; mmjax serves "
                f"{' and '.join(repr(value) for value in allowed)}"
            )
    return values


def _count_dense(hf_config: Any, first_k_dense_replace: int) -> int:
    """Return how many of the first layers are dense; `mlp_layer_types` has a word for each."""
    kinds = getattr(hf_config, "mlp_layer_types", None)
    if kinds is None:
        return first_k_dense_replace
    number = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if {*kinds[number:]} - {"sparse"} or len(kinds) != hf_config.num_hidden_layers:
        raise CheckpointError(
            f"`mlp_layer_types` is {kinds}; mmjax serves a word for each of the "
            f"{hf_config.num_hidden_layers} layers, `dense` for the first and `sparse` behind them"
        )
    return number


def _read_windows(hf_config: Any) -> tuple[int | None, ...]:
    """Return the window of each layer, by `layer_types` and `sliding_window` (arXiv 2606.23050)."""
    num_layers, window = hf_config.num_hidden_layers, getattr(hf_config, "sliding_window", None)
    windows = {"full_attention": None, "reference_sliding_attention": window}
    kinds = getattr(hf_config, "layer_types", None) or ["full_attention"] * num_layers
    if {*kinds} - {*windows} or len(kinds) != num_layers:
        known = " or ".join(f"`{kind}`" for kind in windows)
        raise CheckpointError(
            f"`layer_types` is {list(kinds)}; mmjax serves {known} for each of the {num_layers} "
            "layers of this decoder"
        )
    if "reference_sliding_attention" in kinds and (not isinstance(window, int) or window < 1):
        raise CheckpointError(
            f"`sliding_window` is {window!r} beside layers of `reference_sliding_attention`; it "
            "must be a positive number of tokens"
        )
    return tuple(windows[kind] for kind in kinds)


def _read_rope(hf_config: Any) -> dict[str, Any]:
    """Return `rope_parameters`, as transformers joins `rope_theta` and `rope_scaling`."""
    given = dict(getattr(hf_config, "rope_parameters", None) or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise CheckpointError(
            f"`language_config.rope_scaling` is of type `{kind}`; mmjax serves a "
            f"`{hf_config.model_type}` with `default` and `yarn`"
        )
    theta = given.get("rope_theta") or getattr(hf_config, "rope_theta", None) or _ROPE_THETA
    share = given.pop("partial_rotary_factor", None)
    rope = {**given, "rope_type": kind, "rope_theta": float(theta)}
    rotated = getattr(hf_config, "qk_rope_head_dim", None)
    if share is None or rotated is None:  # HF's without latents turn whole heads, whatever it says
        return rope
    # Of Mistral 4 it is of a whole head, and says what `qk_rope_head_dim` says.
    head_dim = hf_config.head_dim
    if int(head_dim * share) != rotated:
        raise CheckpointError(
            f"`partial_rotary_factor` is {share}, of heads {head_dim} wide, and "
            f"`qk_rope_head_dim` {rotated}; they must agree"
        )
    return rope


def _read_latent(
    hf_config: Any, values: Mapping[str, Any], rope: Mapping[str, Any]
) -> LatentConfig:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes: dict[str, Any] = {key: getattr(hf_config, key, None) for key in keys}
    if values["q_lora_rank"] is not None:
        sizes["q_lora_rank"] = values["q_lora_rank"]
    for key, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise CheckpointError(
                f"`language_config.{key}` is {size!r}; latent attention needs a positive number, "
                "or `use_mla` false"
            )
    rank, nope_dim, rope_dim, value_dim = (sizes[key] for key in keys)
    return LatentConfig(
        rank=rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        query_rank=values["q_lora_rank"],
        is_interleaved=values["rope_interleave"],
        score_factor=find_score_factor(rope),
    )


def _read_router(hf_config: Any, values: Mapping[str, Any]) -> RouterConfig:
    method, num_experts = values["topk_method"], hf_config.n_routed_experts
    # Of one group, `greedy` and `group_limited_greedy` are the same.
    is_limited = method in ("group_limited_greedy", "noaux_tc")
    num_groups, num_chosen = values["n_group"] or 1, values["topk_group"] or 1
    if num_experts % num_groups or not 1 <= num_chosen <= num_groups:
        raise CheckpointError(
            f"`language_config.n_group` is {num_groups} and `topk_group` {num_chosen}; the first "
            f"must divide the {num_experts} experts, the second must be from 1 to the first"
        )
    return RouterConfig(
        num_experts=num_experts,
        top_k=hf_config.num_experts_per_tok,
        has_sigmoid=values["scoring_func"] == "sigmoid",
        has_correction_bias=method == "noaux_tc",
        num_groups=num_groups if is_limited else 1,
        num_chosen_groups=num_chosen if is_limited else 1,
        is_normalized=values["norm_topk_prob"],
        scale=float(values["routed_scaling_factor"]),
    )


class _Absorbed(Linear):
    """Weights of heads side by side, which attention multiplies itself, and adapters of them.

    `quantize_language_model` leaves them alone.
    """

    def by_head(self, x: Float[Array, "T N rank"]) -> Float[Array, "T N _out"]:
        """Multiply each head's inputs with its weights."""
        out = product_by_head(x, self._heads(x.shape[1]))
        return out if self.lora is None else out + self.lora.by_head(x)

    def absorb(self, x: Float[Array, "T N _out"]) -> Float[Array, "T N rank"]:
        """Multiply what meets each head's outputs with its transposed weights."""
        out = product_by_head(x, self._heads(x.shape[1]).transpose(0, 2, 1))
        return out if self.lora is None else out + self.lora.absorb(x)

    def _heads(self, num_heads: int) -> Float[Array, "N _out rank"]:
        return self.weight[...].reshape(num_heads, -1, self.weight.shape[-1])


class LatentAttention(nnx.Module):
    """Attention whose heads share one latent, from which each has its keys and values.

    `kv_b_proj` is absorbed (section 2.1.2): its keys' half is applied to the queries, which then
    meet the latents, and its values' half to the outputs. The latent and the rotated key are all
    that is cached.
    """

    def __init__(self, width: int, num_heads: int, latent: LatentConfig, *, dtype: Any) -> None:
        rank, rope_dim, options = latent.rank, latent.rope_dim, {"use_bias": False, "dtype": dtype}
        query_width = num_heads * (latent.nope_dim + rope_dim)
        if latent.query_rank is None:
            self.q_proj = Linear(width, query_width, **options)
        else:
            self.q_a_proj = Linear(width, latent.query_rank, **options)
            self.q_a_layernorm = RMSNorm(latent.query_rank, eps=_LATENT_EPS, dtype=dtype)
            self.q_b_proj = Linear(latent.query_rank, query_width, **options)
        self.kv_a_proj_with_mqa = Linear(width, rank + rope_dim, **options)
        self.kv_a_layernorm = RMSNorm(rank, eps=_LATENT_EPS, dtype=dtype)
        self.k_b_proj = _Absorbed(rank, num_heads * latent.nope_dim, **options)
        self.v_b_proj = _Absorbed(rank, num_heads * latent.value_dim, **options)
        self.o_proj = Linear(num_heads * latent.value_dim, width, **options)
        self.num_heads = num_heads
        self.latent = latent

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: tuple[Angles, Float[Array, " T"] | None],
        cache: LayerCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | None]:
        """Attend, and return the layer's cache with this step's latents.

        `layer_input`: the rotary angles, and what queries are multiplied by, or None.
        """
        angles, scales = layer_input
        rank, nope_dim = self.latent.rank, self.latent.nope_dim
        rotate = apply_interleaved_rotary if self.latent.is_interleaved else apply_rotary
        query = self.project_query(x)
        if scales is not None:
            query = query * scales.astype(x.dtype)[:, None, None]
        without, rotated = query[..., :nope_dim], query[..., nope_dim:]
        compressed = self.kv_a_proj_with_mqa(x)[:, None, :]
        latent, rope_key = self.kv_a_layernorm(compressed[..., :rank]), compressed[..., rank:]
        query = jnp.concatenate([self.k_b_proj.absorb(without), rotate(rotated, *angles)], axis=-1)
        key = jnp.concatenate([latent, rotate(rope_key, *angles)], axis=-1)
        scale = (nope_dim + self.latent.rope_dim) ** -0.5 * self.latent.score_factor
        out, cache = attention(query, key, latent, cache, metadata, scale=scale)
        return self.o_proj(self.v_b_proj.by_head(out).reshape(len(x), -1)), cache

    def project_query(self, x: Float[Array, "T D"]) -> Float[Array, "T N _nope_and_rope"]:
        """Return the queries by head, not rotated."""
        if self.latent.query_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return query.reshape(len(x), self.num_heads, -1)


class DeepseekTextModel(Decoder):
    """DeepSeek-V2's text model: dense layers first, then layers of experts."""

    def __init__(self, config: DeepseekConfig, *, is_tied: bool, dtype: Any) -> None:
        num_layers = config.num_hidden_layers
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[_build_layer(config, number, dtype=dtype) for number in range(num_layers)],
            norm=RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=config.kv_cache_spec,
            dtype=dtype,
        )
        self.config = config

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Any]:
        """Return the rotary angles, and beside them what queries of latents are multiplied by."""
        config = self.config
        angles = text_angles(config.rope_parameters, config.rotary_dim, positions)
        if config.latent is None:
            return [angles] * len(self.layers)
        scales = None
        if config.query_scales is not None:
            length, factors = config.query_scales
            scales = jnp.asarray(factors, jnp.float32)[positions[0] // length]
        return [(angles, scales)] * len(self.layers)


def _build_layer(config: DeepseekConfig, number: int, *, dtype: Any) -> nnx.Module:
    width, eps = config.hidden_size, config.rms_norm_eps
    is_dense = number < config.num_dense_layers
    mlp = _build_dense(config, dtype=dtype) if is_dense else _build_experts(config, dtype=dtype)
    attend = _build_attention(config, config.windows[number], dtype=dtype)
    return DecoderLayer(attend, mlp, lambda: RMSNorm(width, eps=eps, dtype=dtype))


def _build_attention(config: DeepseekConfig, window: int | None, *, dtype: Any) -> nnx.Module:
    width, num_heads = config.hidden_size, config.num_attention_heads
    if config.latent is not None:
        assert window is None, "no served model has both"
        return LatentAttention(width, num_heads, config.latent, dtype=dtype)
    return GroupedQueryAttention(
        width,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.rotary_dim,
        window=window,
        keeps_reference=window is not None,
        dtype=dtype,
    )


def _build_dense(config: DeepseekConfig, *, dtype: Any) -> nnx.Module:
    width, inner = config.hidden_size, config.intermediate_size
    return GatedMLP(width, inner, activation=config.hidden_act, dtype=dtype)


def _build_experts(config: DeepseekConfig, *, dtype: Any) -> nnx.Module:
    return MixtureOfExperts(
        config.hidden_size,
        config.moe_intermediate_size,
        config.router,
        num_shared=config.num_shared_experts,
        activation=config.hidden_act,
        dtype=dtype,
    )
