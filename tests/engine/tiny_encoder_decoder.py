"""A tiny random encoder-decoder for engine tests, and its oracle in numpy: no paging, no cache.

The encoder makes a state of every token of its prompt, text or a row of the image, and of the mean
of all of them.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PretrainedConfig

from mmjax.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmjax.engine.core import EngineCore
from mmjax.layers.attention.api import attention, cross_attention, write_encoder
from mmjax.layers.attention.kv_cache import KVCacheSpec, LayerKVSpec
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.module import build_abstract, flatten_params, unflatten_params
from mmjax.models.host_inputs import EncoderSpec, HostInputs
from mmjax.models.interface import MultiModalModel
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from mmjax.transport.messages import EngineCoreRequest

VOCAB_SIZE, WIDTH, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 96, 32, 2, 2, 16
SCALE = HEAD_DIM**-0.5
ROWS_PER_UNIT, PIXELS = 2, 6
MAX_MODEL_LEN = 64
MAX_ENCODER_LEN = 20
"""Not whole blocks: the last one is padded."""
PICTURE_LEN = 4
BLOCK_SIZE = 8


class CrossHeads(NamedTuple):
    """Heads of cross-attention."""

    num: int
    num_kv: int
    key: int
    value: int


SHARED_HEADS = CrossHeads(NUM_HEADS, NUM_HEADS, HEAD_DIM, HEAD_DIM)
"""Those of self-attention, whose cache then holds both."""
OWN_HEADS = CrossHeads(4, 2, 8, 5)
"""Others, in an entry of `KVCacheSpec.layers` behind their layer's."""


class TinyLayer(nnx.Module):
    """Self-attention, cross-attention and a product, each added to what came in."""

    def __init__(self, heads: CrossHeads, dtype: Any) -> None:
        square = {"in_features": WIDTH, "out_features": WIDTH, "use_bias": False, "dtype": dtype}
        self.q, self.k, self.v, self.o = (Linear(**square) for _ in range(4))
        self.heads = heads
        options = {"use_bias": False, "dtype": dtype}
        self.cross_q = Linear(WIDTH, heads.num * heads.key, **options)
        self.cross_k = Linear(WIDTH, heads.num_kv * heads.key, **options)
        self.cross_v = Linear(WIDTH, heads.num_kv * heads.value, **options)
        self.cross_o = Linear(heads.num * heads.value, WIDTH, **options)
        self.fc = Linear(**square)

    def __call__(
        self, hidden: Any, caches: Sequence[Any], metadata: Any
    ) -> tuple[Any, Sequence[Any]]:
        """Run the layer; a first step writes its encoder's keys and values before it looks.

        `caches`: of both attentions, or one that they share.
        """
        query, key, value = (
            _split(project(hidden), NUM_HEADS) for project in (self.q, self.k, self.v)
        )
        own, first = attention(query, key, value, caches[0], metadata, scale=SCALE)
        hidden = hidden + self.o(own.reshape(-1, WIDTH))
        cross: Any = first if len(caches) == 1 else caches[1]
        states, heads = metadata.cross.encoder_hidden_states, self.heads
        if len(states):
            key, value = (
                _split(project(states), heads.num_kv) for project in (self.cross_k, self.cross_v)
            )
            cross = write_encoder(key, value, cross, metadata)
        query = _split(self.cross_q(hidden), heads.num)
        seen = cross_attention(query, cross, metadata, scale=heads.key**-0.5)
        hidden = hidden + self.cross_o(seen.reshape(len(seen), -1))
        hidden = hidden + jnp.tanh(self.fc(hidden))
        return hidden, (cross,) if len(caches) == 1 else (first, cross)


class TinyHostInputs(HostInputs):
    """An image's pixels, cut into units of two rows."""

    encoder_spec = EncoderSpec(
        inputs={"pixels": ((ROWS_PER_UNIT, PIXELS), "float32")}, tokens_per_unit=ROWS_PER_UNIT
    )

    def units(self, item: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return {"pixels": item["pixels"].reshape(-1, ROWS_PER_UNIT, PIXELS)}


class TinyEncoderDecoder(MultiModalModel):
    """An encoder-decoder in a few lines."""

    host_inputs = TinyHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.max_encoder_len = hf_config.max_encoder_len
        self.embed = Embed(VOCAB_SIZE, WIDTH, dtype=dtype)
        self.places = Embed(MAX_MODEL_LEN, WIDTH, dtype=dtype)
        self.eye = Linear(PIXELS, WIDTH, use_bias=False, dtype=dtype)
        self.encoder = Linear(WIDTH, WIDTH, use_bias=False, dtype=dtype)
        self.heads = CrossHeads(*hf_config.cross_heads)
        self.layers = nnx.List([TinyLayer(self.heads, dtype) for _ in range(NUM_LAYERS)])

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return cache_spec(self.heads)

    def embed_multimodal(self, pixels: Any) -> Any:
        """Return an embedding of each row of each unit."""
        return self.eye(pixels.reshape(-1, PIXELS)).reshape(*pixels.shape[:2], WIDTH)

    def encode_prompts(self, inputs_embeds: Any, is_token: Any) -> Any:
        """Return a state for each place; what padding holds is not read."""
        weights = is_token.astype(inputs_embeds.dtype)[:, :, None]
        mean = (inputs_embeds * weights).sum(1, keepdims=True) / jnp.maximum(
            weights.sum(1, keepdims=True), 1
        )
        both = inputs_embeds + mean
        return jnp.tanh(self.encoder(both.reshape(-1, WIDTH))).reshape(both.shape)

    def embed_input_ids(self, token_ids: Any) -> Any:
        return self.embed(token_ids)

    def __call__(
        self, inputs_embeds: Any, positions: Any, kv_cache: Any, metadata: Any, **more: Any
    ) -> Any:
        """Run the decoder."""
        hidden, caches = inputs_embeds + self.places(positions[0]), []
        per_layer = len(kv_cache) // NUM_LAYERS
        for number, layer in enumerate(self.layers):
            own = kv_cache[number * per_layer : (number + 1) * per_layer]
            hidden, own = layer(hidden, own, metadata)
            caches += own
        return hidden, tuple(caches)

    def compute_logits(self, hidden_states: Any) -> Any:
        return self.embed.project(hidden_states)


def _split(x: Any, num_heads: int) -> Any:
    return x.reshape(len(x), num_heads, -1)


def cache_spec(heads: CrossHeads = SHARED_HEADS) -> KVCacheSpec:
    """Return what the layers cache: for both attentions, or for each of them."""
    own = LayerKVSpec(num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, value_dim=HEAD_DIM)
    if heads == SHARED_HEADS:
        return KVCacheSpec((own,) * NUM_LAYERS)
    cross = LayerKVSpec(num_kv_heads=heads.num_kv, head_dim=heads.key, value_dim=heads.value)
    return KVCacheSpec((own, cross) * NUM_LAYERS)


def encoder_decoder_config(heads: CrossHeads = SHARED_HEADS) -> PretrainedConfig:
    """Return the little that the engine asks of a config."""
    sizes: Any = {"num_attention_heads": NUM_HEADS, "max_encoder_len": MAX_ENCODER_LEN}
    sizes["cross_heads"] = list(heads)
    return PretrainedConfig(**sizes)


@lru_cache
def tiny_params(heads: CrossHeads = SHARED_HEADS) -> Any:
    """Return random parameters, loud enough that every input changes the answer."""
    _, abstract = build_abstract(
        TinyEncoderDecoder, encoder_decoder_config(heads), dtype=jnp.dtype(jnp.float32)
    )
    rng = np.random.default_rng(0)
    return unflatten_params(
        {
            name: jnp.asarray(rng.standard_normal(leaf.shape) / leaf.shape[-1] ** 0.5 * 2.3)
            for name, leaf in sorted(flatten_params(abstract).items())
        }
    )


def tiny_encoder_decoder(
    *,
    num_blocks: int | None = None,
    encoder_cache_size: int | None = None,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    heads: CrossHeads = SHARED_HEADS,
    **scheduler: Any,
) -> EngineCore:
    """Start an engine over the tiny model; `num_blocks` None: room for all requests."""
    bytes_per_block = cache_spec(heads).width * BLOCK_SIZE * 4
    config = EngineConfig(
        model=ModelConfig(
            model="tiny",
            path=Path("."),
            hf_config=encoder_decoder_config(heads),
            architecture="TinyEncoderDecoder",
            max_model_len=MAX_MODEL_LEN,
        ),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=None if num_blocks is None else num_blocks * bytes_per_block,
            encoder_cache_size=encoder_cache_size,
            enable_prefix_caching=True,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **scheduler
        ),
        use_tqdm=False,
    )
    return EngineCore(config, model_class=TinyEncoderDecoder, params=tiny_params(heads))


def picture_feature(seed: int) -> MultiModalFeatureSpec:
    """Return a picture at the beginning of the encoder's prompt."""
    pixels = np.random.default_rng(seed).standard_normal((PICTURE_LEN, PIXELS)).astype(np.float32)
    elem = MultiModalFieldElem(data=3 * pixels, field=MultiModalBatchedField())
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem({"pixels": elem}),
        modality="image",
        identifier=f"picture-{seed}",
        mm_position=PlaceholderRange(offset=0, length=PICTURE_LEN),
        mm_hash=f"picture-{seed}",
    )


def message(
    request_id: str,
    encoder_ids: Sequence[int] | None,
    decoder_ids: Sequence[int],
    *,
    picture: int | None = None,
    **sampling: Any,
) -> EngineCoreRequest:
    """Build a greedy request; `picture`: its seed. Its places in the prompt hold any ids."""
    sampling = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(decoder_ids),
        encoder_prompt_token_ids=None if encoder_ids is None else list(encoder_ids),
        mm_features=[] if picture is None else [picture_feature(picture)],
        sampling_params=SamplingParams(**sampling),
    )


# ---- the oracle: the whole sequence anew for every token -----------------------------------------


def dense_greedy(request: EngineCoreRequest, heads: CrossHeads = SHARED_HEADS) -> list[int]:
    """Return the greedy answer by dense passes in numpy, float64."""
    weights = _weights(heads)
    states = _dense_states(weights, request)
    token_ids, answer = list(request.prompt_token_ids), []
    for _ in range(request.sampling_params.max_tokens or 0):
        answer.append(int(_dense_logits(weights, heads, states, token_ids).argmax()))
        token_ids.append(answer[-1])
    return answer


@lru_cache
def _weights(heads: CrossHeads) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tiny_params(heads))


def _dense_states(weights: Any, request: EngineCoreRequest) -> np.ndarray:
    embeds = weights["embed"]["weight"][np.array(request.encoder_prompt_token_ids)]
    for feature in request.mm_features:
        assert feature.tensors is not None
        pixels = feature.tensors.get_data()["pixels"].astype(np.float64)
        embeds[: len(pixels)] = pixels @ weights["eye"]["weight"].T
    return np.tanh((embeds + embeds.mean(0)) @ weights["encoder"]["weight"].T)


def _dense_logits(
    weights: Any, heads: CrossHeads, states: np.ndarray, token_ids: Sequence[int]
) -> np.ndarray:
    """Return the logits behind the last token, float64[V]."""
    count = len(token_ids)
    hidden = weights["embed"]["weight"][list(token_ids)] + weights["places"]["weight"][:count]
    causal = np.tril(np.ones((count, count), bool))
    for number in range(NUM_LAYERS):
        layer = {name: part["weight"].T for name, part in weights["layers"][number].items()}
        own = _softmax_attention(
            hidden @ layer["q"], hidden @ layer["k"], hidden @ layer["v"], causal, SHARED_HEADS
        )
        hidden = hidden + own @ layer["o"]
        everything = np.ones((count, len(states)), bool)
        seen = _softmax_attention(
            hidden @ layer["cross_q"],
            states @ layer["cross_k"],
            states @ layer["cross_v"],
            everything,
            heads,
        )
        hidden = hidden + seen @ layer["cross_o"]
        hidden = hidden + np.tanh(hidden @ layer["fc"])
    return hidden[-1] @ weights["embed"]["weight"].T


def _softmax_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray, heads: CrossHeads
) -> np.ndarray:
    query, key, value = (
        _split(query, heads.num),
        _split(key, heads.num_kv),
        _split(value, heads.num_kv),
    )
    key, value = (np.repeat(x, heads.num // heads.num_kv, axis=1) for x in (key, value))
    scores = np.einsum("tnh,snh->nts", query, key) * heads.key**-0.5
    scores = np.where(mask, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), value)
    return out.reshape(len(query), -1)
