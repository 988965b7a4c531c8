"""A tiny random Gemma 3 for engine tests: arrays by formula, no torch, no files; and its oracle."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

from mmjax.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Precompile,
    SchedulerConfig,
)
from mmjax.engine.core import EngineCore
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract, flatten_params, unflatten_params
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.params.sampling_params import SamplingParams
from mmjax.parity.reference import make_pixels
from mmjax.processing.image_processors.affine import make_affine
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from mmjax.transport.messages import EngineCoreRequest, RequestOutputDelta

VOCAB_SIZE = 96
IMAGE_TOKEN = 95
BOI, EOI, EOS = 94, 93, 1
TOKENS_PER_IMAGE = 4
IMAGE_SIZE = 28
AFFINE = make_affine(rescale_factor=1 / 255, mean=(0.4, 0.5, 0.6), std=(0.25, 0.3, 0.35))
"""What pixels are made with."""
DENSE_LENGTH = 192
"""Tokens of the oracle's only shape."""


@lru_cache
def tiny_config() -> Gemma3Config:
    """Width 32, two sliding layers (window 24) and a global one; 4 soft tokens a picture."""
    return Gemma3Config(
        text_config=Gemma3TextConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            max_position_embeddings=1024,
        ),
        vision_config=SiglipVisionConfig(
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=IMAGE_SIZE,
            patch_size=7,
            vision_use_head=False,
        ),
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        boi_token_index=BOI,
        eoi_token_index=EOI,
        image_token_index=IMAGE_TOKEN,
    )


@lru_cache
def tiny_params(seed: int = 0) -> tuple[Any, Any]:
    """Return the graph and random parameters, loud enough that every input changes the answer."""
    return loud_params(tiny_config(), seed)


def loud_params(config: Any, seed: int = 0) -> tuple[Any, Any]:
    """Return the same for any Gemma 3 config."""
    graphdef, abstract = build_abstract(
        Gemma3ForConditionalGeneration, config, dtype=jnp.dtype(jnp.float32)
    )
    rng = np.random.default_rng(seed)
    leaves = {}
    for name, leaf in sorted(flatten_params(abstract).items()):
        value = rng.standard_normal(leaf.shape).astype(np.float32)
        if name.endswith("bias") or "norm" in name:
            value *= 0.05
            if "vision_tower" in name and name.endswith("weight"):
                value += 1.0
            if "q_norm" in name or "k_norm" in name:
                value += 1.0  # sharp attention: answers that do not settle on one token
        elif "embed_tokens" in name:
            value *= 0.05
        else:
            value *= 1.5 / np.sqrt(np.prod(leaf.shape[1:]))
        leaves[name] = jnp.asarray(value)
    return graphdef, unflatten_params(leaves)


def text(seed: int, length: int) -> list[int]:
    """Return random words."""
    return np.random.default_rng(seed).integers(2, 90, length).tolist()


def picture(seed: int, units: int = 1) -> np.ndarray:
    """Return the processed bytes of a picture, uint8[units, 3, Y, X]."""
    shape = (units, 3, IMAGE_SIZE, IMAGE_SIZE)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def image_feature(seed: int, offset: int, units: int = 1) -> MultiModalFeatureSpec:
    """Return a picture of `units` crops, each `boi, 4 embeddings, eoi`, at a place."""
    tensors = {"pixel_values": picture(seed, units), "image_affine": AFFINE}
    field = MultiModalBatchedField()
    mask = np.tile([False, *[True] * TOKENS_PER_IMAGE, False], units)
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem(
            {name: MultiModalFieldElem(data=data, field=field) for name, data in tensors.items()}
        ),
        modality="image",
        identifier=f"picture-{seed}-{units}",
        mm_position=PlaceholderRange(offset=offset, length=len(mask), is_embed=mask),
        mm_hash=f"picture-{seed}-{units}",
    )


def message(
    request_id: str, parts: Sequence[Any], *, eos: Sequence[int] = (), **sampling: Any
) -> EngineCoreRequest:
    """Build a request: a part is a list of token ids, or (picture seed, units)."""
    token_ids: list[int] = []
    features = []
    for part in parts:
        if isinstance(part, tuple):
            seed, units = part
            features.append(image_feature(seed, len(token_ids), units))
            token_ids += [BOI, *[IMAGE_TOKEN] * TOKENS_PER_IMAGE, EOI] * units
        else:
            token_ids += part
    sampling = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=features,
        sampling_params=SamplingParams(**sampling),
        eos_token_ids=list(eos),
    )


def with_embeds(request: EngineCoreRequest, embeds: Sequence[Any]) -> EngineCoreRequest:
    """Return the request with embeddings in place of its pictures, one array for each."""
    features = []
    for feature, rows in zip(request.mm_features, embeds, strict=True):
        elem = MultiModalFieldElem(data=rows, field=MultiModalBatchedField())
        name = f"embeds of {feature.identifier}"
        data = MultiModalKwargsItem({"image_embeds": elem})
        features.append(replace(feature, data=data, identifier=name, mm_hash=name))
    return msgspec.structs.replace(request, mm_features=features)


def engine_config(
    *,
    max_model_len: int = 128,
    num_blocks: int | None = None,
    precompile: Precompile | None = None,
    **settings: Any,
) -> EngineConfig:
    """Return a small engine's config; `num_blocks` None: room for all requests.

    `settings`: of the caches and of the scheduler.
    """
    names = settings.keys() & {one.name for one in fields(CacheConfig)}
    cache: dict[str, Any] = {"block_size": 8, **{name: settings.pop(name) for name in names}}
    if num_blocks is not None:
        # Keys and values, layers, width, float32.
        cache["kv_cache_memory_bytes"] = num_blocks * 2 * 3 * 16 * cache["block_size"] * 4
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **settings}
    return EngineConfig(
        model=ModelConfig(
            model="tiny",
            path=Path("."),
            hf_config=tiny_config(),
            architecture="Gemma3ForConditionalGeneration",
            max_model_len=max_model_len,
        ),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**settings),
        precompile=precompile,
        use_tqdm=False,
    )


def tiny_engine(**settings: Any) -> EngineCore:
    """Start an engine over the tiny model."""
    return start_tiny(engine_config(**settings))


def start_tiny(config: EngineConfig, params: Any = None, **given: Any) -> EngineCore:
    """Start an engine of a tiny model's configuration; `params` None: of `tiny_params`."""
    params = tiny_params()[1] if params is None else params
    return EngineCore(config, model_class=Gemma3ForConditionalGeneration, params=params, **given)


def drain(core: EngineCore) -> dict[str, list[RequestOutputDelta]]:
    """Step until nothing is left; return every request's news."""
    news: dict[str, list[RequestOutputDelta]] = {}
    while core.has_unfinished():
        for delta in core.step():
            news.setdefault(delta.request_id, []).append(delta)
    return news


def drain_through_failures(core: EngineCore) -> dict[str, list[int]]:
    """Step until nothing is left, again after each step that fails; return every answer."""
    answers: dict[str, list[int]] = {}
    while core.has_unfinished():
        try:
            deltas = core.step()
        except RuntimeError:
            assert core.recover() == []
            continue
        for delta in deltas:
            answers.setdefault(delta.request_id, []).extend(delta.new_token_ids)
    return answers


def check_idle(core: EngineCore) -> None:
    """Check that nothing is held, and that no step had to wait for a program."""
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.kv_cache_usage, stats.encoder_cache_usage) == (0.0, 0.0)
    assert stats.num_compilations == 0


def tokens_of(news: Sequence[RequestOutputDelta]) -> list[int]:
    """Return what a request was given in all."""
    return [token for delta in news for token in delta.new_token_ids]


def answer(core: EngineCore, request: EngineCoreRequest) -> list[int]:
    """Serve one request alone."""
    core.add_request(request)
    return tokens_of(drain(core)[request.request_id])


def serve_all(
    core: EngineCore, requests: Sequence[EngineCoreRequest]
) -> list[list[RequestOutputDelta]]:
    """Serve requests at once; return what each was told."""
    for request in requests:
        core.add_request(request)
    news = drain(core)
    return [news[request.request_id] for request in requests]


def answer_all(core: EngineCore, requests: Sequence[EngineCoreRequest]) -> list[list[int]]:
    """Serve requests at once; return their tokens."""
    return [tokens_of(news) for news in serve_all(core, requests)]


def report(core: EngineCore, requests: Sequence[EngineCoreRequest]) -> list[Any]:
    """Serve requests at once; return their tokens and log-probabilities, bit for bit."""
    return [
        (tokens_of(own), [one.logprobs for delta in own for one in delta.new_logprobs or []])
        for own in serve_all(core, requests)
    ]


# ---- the oracle: the whole sequence anew for every token, no cache -------------------------------


def dense_greedy(request: EngineCoreRequest) -> list[int]:
    """Return the greedy answer by dense forward passes."""
    token_ids = list(request.prompt_token_ids)
    answer: list[int] = []
    for _ in range(request.sampling_params.max_tokens or 0):
        logits = dense_logits(token_ids, request.mm_features)
        answer.append(int(np.argmax(logits[len(token_ids) - 1])))
        token_ids.append(answer[-1])
        if answer[-1] in request.eos_token_ids:
            break
    return answer


def dense_logits(token_ids: Sequence[int], features: Sequence[MultiModalFeatureSpec]) -> np.ndarray:
    """Return float32[DENSE_LENGTH, V]; rows beyond the tokens mean nothing."""
    ids = np.zeros(DENSE_LENGTH, np.int32)
    ids[: len(token_ids)] = token_ids
    index = np.arange(DENSE_LENGTH)
    end = index + 1
    embeds = np.zeros((DENSE_LENGTH, 32), np.float32)
    is_embed = np.zeros(DENSE_LENGTH, bool)
    for feature in features:
        assert feature.tensors is not None
        pixels = make_pixels(feature.tensors.get_data())["pixel_values"]
        encoded = np.asarray(_encode(pixels))
        encoded = encoded.reshape(-1, 32)
        for first, last in feature.mm_position.extract_embeds_range():
            run = slice(first, last + 1)
            embeds[run], encoded = encoded[: last + 1 - first], encoded[last + 1 - first :]
            is_embed[run] = True
            end[run] = last + 1
    mask = index[None, :] < end[:, None]
    return np.asarray(_forward(ids, embeds, is_embed, mask))


@jax.jit
def _encode(pixel_values: Any) -> Any:
    graphdef, params = tiny_params()
    return bind(graphdef, params).embed_multimodal(pixel_values=pixel_values)


@partial(jax.jit)
def _forward(ids: Any, embeds: Any, is_embed: Any, mask: Any) -> Any:
    graphdef, params = tiny_params()
    model = bind(graphdef, params)
    merged = jnp.where(is_embed[:, None], embeds, model.embed_input_ids(ids))
    index = jnp.arange(DENSE_LENGTH, dtype=jnp.int32)
    metadata = DenseAttentionMetadata(index[None], mask[None])
    states, _ = model(merged, jnp.broadcast_to(index[None], (3, DENSE_LENGTH)), None, metadata)
    return model.compute_logits(states)
