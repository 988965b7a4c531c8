"""A tiny random model with recurrent layers: Gemma 3's tower before a decoder of its own.

And what engines of such models are asked.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.engine_config import ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import (
    KVCacheSpec,
    LayerKVSpec,
    StateArray,
    StateCache,
    StateSpec,
)
from mmjax.layers.decoder import Decoder, GroupedQueryAttention
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import GatedMLP
from mmjax.layers.module import build_abstract, flatten_params, unflatten_params
from mmjax.layers.norm import RMSNorm
from mmjax.layers.recurrent.causal import short_convolution
from mmjax.layers.recurrent.delta import DeltaTokens, gated_delta_rule
from mmjax.layers.rope import text_angles
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration, Gemma3MultiModalProjector
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.transport.messages import EngineCoreRequest, RequestOutputDelta
from tests.engine.tiny import drain, engine_config, serve_all, tiny_config, tokens_of

WIDTH, VOCAB_SIZE = 32, 96
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 8
CONV_WIDTH, CHANNELS = 4, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
HEAD_DIM = 16
SPEC = KVCacheSpec.of_layers(
    [
        StateSpec(
            (
                StateArray((CONV_WIDTH - 1, CHANNELS), cut_axis=1),
                StateArray((VALUE_HEADS, KEY_DIM, VALUE_DIM), cut_axis=0),
            )
        ),
        LayerKVSpec(num_kv_heads=1, head_dim=HEAD_DIM, value_dim=HEAD_DIM),
        StateSpec((StateArray((2, WIDTH), cut_axis=1),)),
    ]
)


class DeltaMixer(nnx.Module):
    """Qwen3.5's in small."""

    def __init__(self, *, dtype: Any) -> None:
        self.in_proj = Linear(WIDTH, CHANNELS, use_bias=False, dtype=dtype)
        self.gates = Linear(WIDTH, 2 * VALUE_HEADS, use_bias=False, dtype=dtype)
        self.conv = nnx.Param(jnp.zeros((CHANNELS, CONV_WIDTH), dtype))
        self.out_proj = Linear(VALUE_HEADS * VALUE_DIM, WIDTH, use_bias=False, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Any,
        cache: StateCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], StateCache | None]:
        del angles
        conv, memory = (None, None) if cache is None else cache.arrays
        mixed, conv = short_convolution(self.in_proj(x), self.conv[...], None, conv, metadata)
        keys = KEY_HEADS * KEY_DIM
        query, key, value = jnp.split(jax.nn.silu(mixed), [keys, 2 * keys], axis=1)
        query, key = (part.reshape(-1, KEY_HEADS, KEY_DIM) for part in (query, key))
        value = value.reshape(-1, VALUE_HEADS, VALUE_DIM)
        decay, beta = jnp.split(self.gates(x).astype(jnp.float32), 2, axis=1)
        # A slow decay: what stood far before counts.
        given = DeltaTokens(query, key, value, -0.05 * jax.nn.softplus(decay), jax.nn.sigmoid(beta))
        out, memory = gated_delta_rule(given, memory, metadata)
        out = self.out_proj(out.reshape(len(x), -1))
        return out, None if cache is None else StateCache((conv, memory))


class ConvMixer(nnx.Module):
    """LFM2's in small."""

    def __init__(self, *, dtype: Any) -> None:
        self.in_proj = Linear(WIDTH, 3 * WIDTH, use_bias=False, dtype=dtype)
        self.conv = nnx.Param(jnp.zeros((WIDTH, 3), dtype))
        self.out_proj = Linear(WIDTH, WIDTH, use_bias=False, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        angles: Any,
        cache: StateCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], StateCache | None]:
        del angles
        before, behind, inner = jnp.split(self.in_proj(x), 3, axis=1)
        (conv,) = (None,) if cache is None else cache.arrays
        mixed, conv = short_convolution(before * inner, self.conv[...], None, conv, metadata)
        return self.out_proj(behind * mixed), None if cache is None else StateCache((conv,))


class Block(nnx.Module):
    """A mixer, or attention, and an MLP, each of which reads normed states."""

    def __init__(self, mixer: nnx.Module, *, dtype: Any) -> None:
        self.mixer = mixer
        self.mlp = GatedMLP(WIDTH, 48, activation="silu", dtype=dtype)
        self.first_norm, self.second_norm = (RMSNorm(WIDTH, eps=1e-6, dtype=dtype) for _ in "12")

    def __call__(
        self, x: Float[Array, "T D"], angles: Any, cache: Any, metadata: AttentionMetadata
    ) -> tuple[Float[Array, "T D"], Any]:
        out, cache = self.mixer(self.first_norm(x), angles, cache, metadata)
        x = x + out
        return x + self.mlp(self.second_norm(x)), cache


class RecurrentDecoder(Decoder):
    """Recurrent layers around one of attention."""

    def __init__(self, *, dtype: Any) -> None:
        attention = GroupedQueryAttention(
            WIDTH, num_heads=2, num_kv_heads=1, head_dim=HEAD_DIM, dtype=dtype
        )
        mixers = (DeltaMixer(dtype=dtype), attention, ConvMixer(dtype=dtype))
        super().__init__(
            vocab_size=VOCAB_SIZE,
            hidden_size=WIDTH,
            layers=[Block(mixer, dtype=dtype) for mixer in mixers],
            norm=RMSNorm(WIDTH, eps=1e-6, dtype=dtype),
            is_tied=True,
            kv_cache_spec=SPEC,
            dtype=dtype,
        )

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Any]:
        parameters = {"rope_type": "default", "rope_theta": 10000.0}
        return [text_angles(parameters, HEAD_DIM, positions)] * 3


class TinyRecurrent(Gemma3ForConditionalGeneration):
    """Takes the pictures of `tests.engine.tiny`, which are seen as text is."""

    sees = "past"

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        with self._mark_tower_model(hf_config, "image"):
            self.vision_tower = ViT(ViTConfig.from_hf(hf_config.vision_config), dtype=dtype)
            self.multi_modal_projector = Gemma3MultiModalProjector(hf_config, dtype=dtype)
        self.language_model = RecurrentDecoder(dtype=dtype)


@lru_cache
def recurrent_params() -> tuple[Any, Any]:
    """Return the graph and random parameters, loud enough that every input changes the answer."""
    graphdef, abstract = build_abstract(TinyRecurrent, tiny_config(), dtype=jnp.dtype(jnp.float32))
    rng = np.random.default_rng(0)
    leaves = {}
    for name, leaf in sorted(flatten_params(abstract).items()):
        value = rng.standard_normal(leaf.shape).astype(np.float32)
        if name.endswith("bias") or "norm" in name:
            value = 0.05 * value + name.endswith("weight")
        elif "embed_tokens" in name:
            value *= 0.3
        else:
            value *= 1.5 / np.sqrt(np.prod(leaf.shape[1:]))
        leaves[name] = jnp.asarray(value)
    return graphdef, unflatten_params(leaves)


def recurrent_engine(
    *,
    num_blocks: int | None = None,
    tensor_parallel_size: int = 1,
    **settings: Any,
) -> EngineCore:
    """Start an engine over the tiny model."""
    settings = {"max_model_len": 320, "num_state_snapshots": 4, **settings}
    if num_blocks is not None:
        block_bytes = 2 * HEAD_DIM * settings.get("block_size", 8) * 4
        settings["kv_cache_memory_bytes"] = num_blocks * block_bytes
    parallel = ParallelConfig(tensor_parallel_size=tensor_parallel_size)
    config = replace(engine_config(**settings), parallel=parallel)
    return EngineCore(config, model_class=TinyRecurrent, params=recurrent_params()[1])


# ---- what is asked, and what must hold -----------------------------------------------------------


Answer = list[tuple[int, Any]]
"""Tokens, each with its log-probabilities."""


def serve(core: EngineCore, requests: Sequence[EngineCoreRequest]) -> list[Answer]:
    """Serve all requests at once; return their answers."""
    return [answer_of(news) for news in serve_all(core, requests)]


def serve_found(core: EngineCore, request: EngineCoreRequest) -> tuple[int, Answer]:
    """Serve one request; return how many of its tokens were found, and its answer."""
    core.add_request(request)
    news = drain(core)[request.request_id]
    return news[0].num_cached_tokens, answer_of(news)


def serve_preempted(core: EngineCore, request: EngineCoreRequest, after: int) -> Answer:
    """Serve one request, which is preempted after so many steps; return its answer."""
    core.add_request(request)
    news = [delta for _ in range(after) for delta in core.step()]
    for running in list(core._scheduler.running):
        core._scheduler._preempt(running)
    news += drain(core).get(request.request_id, [])
    return answer_of(news)


def answer_of(news: Sequence[RequestOutputDelta]) -> Answer:
    """Return what a request was given in all."""
    logprobs = [one for delta in news for one in delta.new_logprobs or ()]
    return [
        (token, msgspec.to_builtins(one))
        for token, one in zip(tokens_of(news), logprobs, strict=True)
    ]


def check_random(core: EngineCore, requests: Sequence[EngineCoreRequest]) -> None:
    """Serve requests that arrive and are aborted at any step, within the planned slots."""
    rng, slots = random.Random(len(requests)), core._scheduler.state_slots
    assert slots is not None
    num_planned = core.config.scheduler.max_num_seqs + core.config.cache.num_state_snapshots
    assert slots.num_slots == num_planned
    num_bytes = count_state_bytes(core)
    to_come, open_ids, most_snapshots = list(requests), [], 0
    while to_come or core.has_unfinished():
        if to_come and rng.random() < 0.4:
            request = to_come.pop()
            open_ids.append(request.request_id)
            core.add_request(request)
        if open_ids and rng.random() < 0.05:
            core.abort([rng.choice(open_ids)])
        core.step()
        assert slots.num_running == len(core._scheduler.running)
        assert slots.num_running + slots.num_snapshots <= num_planned
        most_snapshots = max(most_snapshots, slots.num_snapshots)
    assert slots.num_running == 0
    assert most_snapshots >= core.config.cache.num_state_snapshots
    assert count_state_bytes(core) == num_bytes == core._runner._programs.state_bytes
    assert core.compilations == 0


def count_state_bytes(core: EngineCore) -> int:
    """Return the bytes of all slots on the device."""
    caches = core._runner._state.kv_cache
    return sum(x.nbytes for one in caches if isinstance(one, StateCache) for x in one.arrays)
