"""Qwen3.5's decoder: gated DeltaNet (arXiv 2412.06464) in most layers, gated attention in others.

Its larger ones have experts beside a shared one, which has a gate. Parameters bear HF's names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import (
    DenseCache,
    KVCache,
    KVCacheSpec,
    LayerCache,
    LayerKVSpec,
    StateArray,
    StateCache,
    StateSpec,
)
from mmjax.layers.decoder import (
    Angles,
    Decoder,
    DecoderLayer,
    GroupedQueryAttention,
    read_kept_states,
)
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.moe import MixtureOfExperts, RouterConfig
from mmjax.layers.norm import GemmaRMSNorm, divide_by_rms
from mmjax.layers.recurrent.causal import CausalConvolution
from mmjax.layers.recurrent.delta import DeltaTokens, gated_delta_rule
from mmjax.layers.recurrent.rounding import rounded
from mmjax.layers.rope import text_angles

_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config:
    """The keys that arrays depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inside of the MLPs, or of an expert."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    rope_parameters: dict[str, Any]
    is_linear: tuple[bool, ...]
    """Per layer, whether it is a DeltaNet; else attention."""
    num_key_heads: int
    """Of a DeltaNet, as what follows."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    router: RouterConfig | None
    """How experts are chosen; None: there are none."""
    shared_intermediate_size: int
    """Inside of the expert that all tokens have."""

    @staticmethod
    def from_hf(hf_config: Any) -> "Qwen35Config":
        """Read HF's config; `CheckpointError` for what a decoder of this kind cannot have."""
        kinds = hf_config.layer_types
        unknown = set(kinds) - {_LINEAR, _FULL}
        if unknown:
            raise CheckpointError(
                f"`layer_types` holds {sorted(unknown)}; known: {_FULL}, {_LINEAR}"
            )
        num_keys, num_values = hf_config.linear_num_key_heads, hf_config.linear_num_value_heads
        if num_values % num_keys or hf_config.linear_conv_kernel_dim < 2:
            raise CheckpointError(
                f"`linear_num_value_heads` is {num_values}, which must be a multiple of "
                f"`linear_num_key_heads`, {num_keys}; and `linear_conv_kernel_dim` is "
                f"{hf_config.linear_conv_kernel_dim}, which must be 2 or more"
            )
        return read_config(
            Qwen35Config,
            hf_config,
            # NOTE: HF assumes these sections where the config names none, and always this order.
            rope_parameters={
                "mrope_section": [11, 11, 10],
                **hf_config.rope_parameters,
                "mrope_interleaved": True,
            },
            is_linear=tuple(kind == _LINEAR for kind in kinds),
            num_key_heads=num_keys,
            num_value_heads=num_values,
            key_dim=hf_config.linear_key_head_dim,
            value_dim=hf_config.linear_value_head_dim,
            conv_taps=hf_config.linear_conv_kernel_dim,
            **_read_mlp(hf_config),
        )

    @property
    def conv_width(self) -> int:
        """Channels of a DeltaNet's convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_spec(self) -> StateSpec:
        """What a DeltaNet keeps of a request: its convolution's last inputs, and its matrices."""
        inputs = StateArray((self.conv_taps - 1, self.conv_width), cut_axis=1)
        matrices = StateArray((self.num_value_heads, self.key_dim, self.value_dim), cut_axis=0)
        return StateSpec((inputs, matrices))


def _read_mlp(hf_config: Any) -> Mapping[str, Any]:
    if not hf_config.model_type.startswith("qwen3_5_moe"):
        return {"router": None, "shared_intermediate_size": 0}
    router = RouterConfig(
        num_experts=hf_config.num_experts,
        top_k=hf_config.num_experts_per_tok,
        is_normalized=True,
    )
    return {
        "intermediate_size": hf_config.moe_intermediate_size,
        "router": router,
        "shared_intermediate_size": hf_config.shared_expert_intermediate_size,
    }


class GatedNorm(nnx.Module):
    """A norm whose outputs are gated (HF: `Qwen3_5RMSNormGated`)."""

    def __init__(self, width: int, *, eps: float, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(
        self, x: Float[Array, "T N H"], gate: Float[Array, "T N H"]
    ) -> Float[Array, "T N H"]:
        """Normalise the last axis, round, and let through as much as the gate does."""
        normed = divide_by_rms(x, self.eps).astype(x.dtype) * self.weight[...][None, None]
        opened = jax.nn.silu(gate.astype(jnp.float32))
        return (normed.astype(jnp.float32) * opened).astype(x.dtype)


class GatedDeltaNet(nnx.Module):
    """A recurrent layer whose matrices are corrected and decay, its outputs normed and gated."""

    def __init__(self, config: Qwen35Config, *, dtype: Any) -> None:
        width, num_heads = config.hidden_size, config.num_value_heads
        values = num_heads * config.value_dim
        options = {"use_bias": False, "dtype": dtype}
        self.in_proj_qkv = Linear(width, config.conv_width, **options)
        self.in_proj_z = Linear(width, values, **options)
        self.in_proj_b = Linear(width, num_heads, **options)
        self.in_proj_a = Linear(width, num_heads, **options)
        self.conv1d = CausalConvolution(config.conv_width, config.conv_taps, **options)
        self.dt_bias = nnx.Param(jnp.ones((num_heads,), jnp.float32))
        self.A_log = nnx.Param(jnp.zeros((num_heads,), jnp.float32))
        self.norm = GatedNorm(config.value_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.out_proj = Linear(values, width, **options)
        keys = config.num_key_heads * config.key_dim
        self.cuts, self.widths = (
            (keys, 2 * keys),
            (config.key_dim, config.key_dim, config.value_dim),
        )
        self.activation = get_activation(config.hidden_act)

    def __call__(
        self,
        x: Float[Array, "T D"],
        layer_input: None,
        cache: StateCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], StateCache | None]:
        """Return what each token reads, and the layer's cache with the state of each request."""
        inputs, matrices = (None, None) if cache is None else cache.arrays
        mixed, inputs = self.conv1d(self.in_proj_qkv(x), inputs, metadata)
        query, key, value = self._cut(self.activation(mixed))
        beta = jax.nn.sigmoid(self.in_proj_b(x))
        tokens = DeltaTokens(query, key, value, self._log_decay(x), beta)
        out, matrices = gated_delta_rule(tokens, matrices, metadata)
        gated = self.norm(out, self.in_proj_z(x).reshape(out.shape))
        kept = None if cache is None else StateCache((inputs, matrices))
        return self.out_proj(gated.reshape(len(x), -1)), kept

    def _cut(self, mixed: Float[Array, "T _mixed"]) -> list[Float[Array, "T _heads _width"]]:
        """Return queries, keys and values by heads."""
        parts = jnp.split(mixed, self.cuts, axis=-1)
        pairs = zip(parts, self.widths, strict=True)
        return [part.reshape(len(part), -1, width) for part, width in pairs]

    def _log_decay(self, x: Float[Array, "T D"]) -> Float[Array, "T N"]:
        """Return the logarithm of what each head's matrix is multiplied by, float32."""
        steps = jax.nn.softplus(
            self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None]
        )
        return rounded(-jnp.exp(self.A_log[...].astype(jnp.float32))[None] * steps)


class GatedAttention(GroupedQueryAttention):
    """Attention whose outputs are gated by what stands beside each head's query."""

    def __init__(self, config: Qwen35Config, *, dtype: Any) -> None:
        norm = {"eps": config.rms_norm_eps, "dtype": dtype}
        super().__init__(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            has_qkv_bias=config.attention_bias,
            has_output_bias=config.attention_bias,
            norms=(GemmaRMSNorm(config.head_dim, **norm), GemmaRMSNorm(config.head_dim, **norm)),
            dtype=dtype,
        )
        both, options = 2 * config.num_attention_heads * config.head_dim, {"dtype": dtype}
        self.q_proj = Linear(config.hidden_size, both, use_bias=config.attention_bias, **options)

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Angles | None,
        cache: LayerCache | DenseCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], LayerCache | DenseCache | None]:
        """Attend, and return the layer's cache with this step's keys and values."""
        wide = self.q_proj(x).reshape(len(x), -1, 2, self.head_dim)
        query, gate = (wide[:, :, part].reshape(len(x), -1) for part in range(2))
        out, cache = self.attend(query, x, angles, cache, metadata)
        return self.o_proj(out * jax.nn.sigmoid(gate)), cache


class RowGate(Linear):
    """A linear layer of one output, summed row by row: so a token has the same bits in any step."""

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T 1"]:
        """Project the last axis; added in float32."""
        products = x.astype(jnp.float32) * self.weight[...].astype(jnp.float32)
        out = products.sum(-1, keepdims=True).astype(x.dtype)
        return out if self.lora is None else out + self.lora(x)


class MixtureBesideGated(MixtureOfExperts):
    """Routed experts, and one that all tokens have, as much as its gate lets through."""

    def __init__(self, config: Qwen35Config, *, dtype: Any) -> None:
        width, router = config.hidden_size, config.router
        assert router is not None, "a decoder without experts"
        options: dict[str, Any] = {"activation": config.hidden_act, "dtype": dtype}
        super().__init__(width, config.intermediate_size, router, num_shared=0, **options)
        self.shared_expert = GatedMLP(width, config.shared_intermediate_size, **options)
        self.shared_expert_gate = RowGate(width, 1, use_bias=False, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Transform every token by its experts, and by the shared one."""
        gate = jax.nn.sigmoid(self.shared_expert_gate(x))
        return super().__call__(x) + rounded(gate * self.shared_expert(x))


class Qwen35TextModel(Decoder):
    """Qwen3.5's text model."""

    def __init__(self, config: Qwen35Config, *, is_tied: bool, dtype: Any) -> None:
        self.config = config
        head_dim = config.head_dim
        paged = LayerKVSpec(
            num_kv_heads=config.num_key_value_heads, head_dim=head_dim, value_dim=head_dim
        )
        kinds = {True: config.state_spec, False: paged}
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[_build_layer(config, one, dtype=dtype) for one in config.is_linear],
            norm=GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.of_layers([kinds[one] for one in config.is_linear]),
            dtype=dtype,
        )

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Angles | None]:
        """Return the rotary angles of attention, which turn a part of each head."""
        angles = text_angles(self.config.rope_parameters, self.config.head_dim, positions)
        return [None if is_linear else angles for is_linear in self.config.is_linear]


class Qwen35MtpTextModel(Qwen35TextModel):
    """One layer of attention, over a token's embedding and the state of the one before it.

    It guesses the next token: `mtp` in files, whose names it bears, as vLLM's `qwen3_5_mtp.py`
    computes it. The table of tokens and the head are the decoder's own. A token stands in the slot
    of the one before it, whose state is read there; the first of a prompt is in no step.
    """

    def __init__(self, config: Qwen35Config, *, is_tied: bool, dtype: Any) -> None:
        super().__init__(replace(config, is_linear=(False,)), is_tied=is_tied, dtype=dtype)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = GemmaRMSNorm(width, eps=eps, dtype=dtype)
        self.pre_fc_norm_hidden = GemmaRMSNorm(width, eps=eps, dtype=dtype)
        self.fc = Linear(2 * width, width, use_bias=False, dtype=dtype)
        self.kv_cache_spec = replace(self.kv_cache_spec, kept_width=width)

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Return the states that guess, and the cache; `positions` are those of the tokens before.

        Behind a guess its state is read as the decoder's is.
        """
        caches, kept, states = read_kept_states(kv_cache, metadata)
        with jax.named_scope("join"):
            normed = self.pre_fc_norm_embedding(inputs_embeds), self.pre_fc_norm_hidden(states)
            joined = self.fc(jnp.concatenate(normed, axis=-1))
        hidden, changed = super().__call__(joined, positions, caches, metadata)
        return hidden, (*(changed or ()), kept)


def _build_layer(config: Qwen35Config, is_linear: bool, *, dtype: Any) -> nnx.Module:
    def make_norm() -> GemmaRMSNorm:
        return GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    if config.router is None:
        mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        )
    else:
        mlp = MixtureBesideGated(config, dtype=dtype)
    mixer = (GatedDeltaNet if is_linear else GatedAttention)(config, dtype=dtype)
    name = "linear_attn" if is_linear else "self_attn"
    return DecoderLayer(mixer, mlp, make_norm, mixer_name=name)
