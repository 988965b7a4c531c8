"""`score`: log-probabilities of answers by the modules that serve, under `jit` and `grad`."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mmjax.config.engine_config import EngineConfig, MultiModalConfig
from mmjax.engine.device.compilation import with_exact_products
from mmjax.engine.device.functions import (
    ModelShape,
    compute_states,
    compute_whole,
    encode,
    encode_prompts,
    write_extra,
)
from mmjax.engine.model import resolve_dtype
from mmjax.errors import ConfigError
from mmjax.layers.attention.api import DenseAttentionMetadata, DenseCrossMetadata
from mmjax.layers.cpu.product import prefers_bfloat16
from mmjax.layers.module import Params, bind, build_abstract, rematerializing
from mmjax.models.host_inputs import Sees
from mmjax.models.interface import build_model, left_out_names
from mmjax.models.model_source import load_engine_config, stored_dtype
from mmjax.models.registry import load_model_class
from mmjax.processing.tensors.inputs import MultiModalInputs
from mmjax.rounding import cdiv
from mmjax.training.batch import BatchMaker, ScoreBatch
from mmjax.training.samples import Sample
from mmjax.weights.layouts import read_layouts
from mmjax.weights.load import load_params

LOGITS_AT_ONCE = 2**26
"""Logits that are computed at a time, and again for the gradient: 256 MiB."""


@runtime_checkable
class _HasConfig(Protocol):
    """An `LLM`."""

    config: EngineConfig


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredModel:
    """A model's structure, for `score`: a static argument, of which each object is another."""

    graphdef: Any
    abstract: Params
    """The parameters' shapes and dtypes: what they are computed in."""
    shape: ModelShape
    batch_maker: BatchMaker
    sees: Sees
    remat: bool
    """Whether gradients keep only what enters each block of decoder, tower and connector, and
    compute the rest of it again."""
    model_class: Any
    hf_config: Any
    parts: Mapping[str, Path] = field(default_factory=dict)
    """Where tensors are that a directory lacks: those of `ModelConfig`."""
    left_out: Sequence[str] = ()
    """Attributes of the model that are not computed, as no media are allowed."""

    @classmethod
    def of(
        cls, source: _HasConfig | str | Path, *, dtype: str | None = None, remat: bool = True
    ) -> "ScoredModel":
        """Return the model of an `LLM`, or of a directory (or hub id).

        Args:
            source: The `LLM`, whose weights or others of their shapes are scored with; or what an
                `LLM` is made of.
            dtype: What is computed in; None: the engine's.
            remat: As the field.

        Raises:
            ConfigError: Where the weights are quantised, which have no gradient.
        """
        if isinstance(source, str | Path):
            config = load_engine_config({"model": str(source)}).model
        else:
            config = source.config.model
        model_class = load_model_class(config.architecture, config.model_class)
        layouts = read_layouts(config.path, config.hf_config, model_class.rules(config.hf_config))
        if config.quantization is not None or layouts:
            raise ConfigError(
                f"the weights of `{config.model}` are quantised, which have no gradient; score "
                "with a checkpoint, or an `LLM`, of float weights"
            )
        platform, stored = jax.local_devices()[0].platform, stored_dtype(config.hf_config)
        return cls.build(
            model_class,
            config.hf_config,
            mm=config.mm,
            dtype=resolve_dtype(
                dtype or config.dtype, platform, stored, prefers_bfloat16=prefers_bfloat16()
            ),
            remat=remat,
            parts=config.parts,
        )

    @classmethod
    def build(
        cls,
        model_class: Any,
        hf_config: Any,
        *,
        mm: MultiModalConfig | None = None,
        dtype: Any = jnp.float32,
        remat: bool = True,
        parts: Mapping[str, Path] | None = None,
    ) -> "ScoredModel":
        """Return the model of a class and its configuration; `mm`: what media prompts may have."""
        graphdef, abstract = build_abstract(build_model, model_class, hf_config, mm, dtype=dtype)
        module = bind(graphdef, abstract)
        batch_maker = BatchMaker(
            model_class.host_inputs(hf_config),
            sees=module.sees,
            max_encoder_len=module.max_encoder_len,
        )
        return cls(
            graphdef=graphdef,
            abstract=abstract,
            shape=ModelShape.of(graphdef, abstract),
            batch_maker=batch_maker,
            sees=module.sees,
            remat=remat,
            model_class=model_class,
            hf_config=hf_config,
            parts=parts or {},
            left_out=() if mm is None else left_out_names(module, mm),
        )

    def make_batch(
        self, pairs: Sequence[tuple[MultiModalInputs | Sample, Sequence[int]]]
    ) -> ScoreBatch:
        """Return the batch of processed prompts and the token ids of their answers.

        Sizes are rounded up, so that few programs are compiled. Items of one hash are encoded once.
        ValueError for no prompt, an empty one, and an item that is given by its embeddings;
        RuntimeError where an item has no tensors.
        """
        return self.batch_maker.make(pairs)

    def load_params(self, path: str | Path) -> Params:
        """Return a directory's weights, in this model's dtype."""
        rules = self.model_class.rules(self.hf_config)
        options: Any = {"left_out": self.left_out, "parts": self.parts, "use_tqdm": False}
        return load_params(Path(path), self.abstract, rules, **options)


@partial(jax.jit, static_argnames="model")
def score(
    params: Params,
    model: ScoredModel,
    batch: ScoreBatch,
    temperature: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B A"]:
    """Return the log-probability of each token of the answers, 0 for padding.

    Of the model's distribution, without penalties or filters. Compiled, by itself or within a
    function that is; differentiable in `params`, in reverse.

    Args:
        params: The model's tree (`LLM.params`); arrays of another dtype are cast to the model's,
            so that a trainer's float32 gets gradients in float32.
        model: Static.
        batch: From `model.make_batch`.
        temperature: What logits are divided by, as where the answers were drawn.
    """
    exact = with_exact_products(_score, jax.default_backend(), model.shape.dtype)
    return exact(params, model, batch, temperature)


def _score(
    params: Params, model: ScoredModel, batch: ScoreBatch, temperature: float | Float[Array, ""]
) -> Float[Array, "B A"]:
    cast = jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), params, model.abstract)
    with rematerializing() if model.remat else nullcontext():
        pool = _encode(cast, model, batch)
        module, metadata = bind(model.graphdef, cast), _make_metadata(model, batch, pool)
        states, _ = compute_states(
            module,
            batch.token_ids.reshape(-1),
            src_index=batch.src_index.reshape(-1),
            pool=pool,
            positions=batch.positions.swapaxes(0, 1).reshape(3, -1),
            kv_cache=None,
            metadata=metadata,
        )
        num_rows, num_answers = batch.answer_ids.shape
        states = states.reshape(num_rows, -1, states.shape[-1])
        places = batch.answer_starts[:, None] - 1 + jnp.arange(num_answers, dtype=jnp.int32)[None]
        # What a token's probability is read of stands before it.
        before = jnp.minimum(places, states.shape[1] - 1)
        chosen = jnp.take_along_axis(states, before[:, :, None], axis=1)
        rows, ids = chosen.reshape(-1, states.shape[-1]), batch.answer_ids.reshape(-1)
        flat = _find_logprobs(module, rows, ids, temperature, model.shape.vocab_size)
    return jnp.where(batch.answer_mask, flat.reshape(num_rows, num_answers), 0.0)


def _encode(params: Params, model: ScoredModel, batch: ScoreBatch) -> Shaped[Array, "rows D"]:
    """Return the pool with the outputs of all encoders."""
    graphdef, shape = model.graphdef, model.shape
    pool = jnp.zeros((batch.num_pool_rows, shape.embed_width), shape.dtype)
    if model.batch_maker.num_extra_rows and batch.encoders:
        pool = write_extra(graphdef, params, pool)
    for inputs in batch.encoders:
        arguments = inputs._asdict()
        pool, _ = encode(graphdef, None, compute_whole, params=params, pool=pool, **arguments)
    if batch.prompts is not None:
        arguments = batch.prompts.call._asdict()
        pool, _ = encode_prompts(graphdef, _alone, params=params, pool=pool, **arguments)
    return pool


def _alone(x: Array, axis: int) -> Array:
    """Return what the devices computed as it is: XLA gathers it where a program needs it."""
    return x


def _make_metadata(
    model: ScoredModel, batch: ScoreBatch, pool: Shaped[Array, "rows D"]
) -> DenseAttentionMetadata:
    """Return what every token sees, as `layers.attention.metadata` says of `span_end`."""
    index = jnp.arange(batch.token_ids.shape[1], dtype=jnp.int32)
    query, key = index[None, :, None], index[None, None, :]
    mask, beyond = key <= query, None
    if model.sees == "reference":
        beyond = mask & (key < batch.answer_starts[:, None, None])
    if batch.span_end is not None:
        ends = batch.span_end[:, :, None]
        ahead = key < jnp.abs(ends)
        if model.sees == "prompt":
            beyond = ahead
        if model.sees == "all_items":
            # Between items are tokens that see no later one, nor are seen.
            is_seen = batch.span_end > index[None] + 1
            ahead &= is_seen[:, None, :] | (key == ends - 1)
        mask = mask | ahead
    mask = mask & (key < batch.lengths[:, None, None])
    token_index = jnp.broadcast_to(index[None], batch.token_ids.shape)
    if batch.prompts is None:
        return DenseAttentionMetadata(token_index, mask, beyond)
    rows = batch.prompts.state_rows
    states = pool[jnp.maximum(rows, 0).reshape(-1)]
    is_seen = (rows >= 0)[:, None, :]
    if batch.prompts.seen is not None:
        first, end = batch.prompts.seen[:, 0, :, None], batch.prompts.seen[:, 1, :, None]
        place = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, None, :]
        is_seen = is_seen & (place >= first) & (place < end)
    cross = DenseCrossMetadata(is_seen=is_seen, encoder_hidden_states=states)
    return DenseAttentionMetadata(token_index, mask, beyond, cross)


def _find_logprobs(
    module: Any,
    states: Float[Array, "_rows D"],
    token_ids: Int[Array, " _rows"],
    temperature: float | Float[Array, ""],
    vocab_size: int,
) -> Float[Array, " _rows"]:
    """Return the log-probability of a token for each row, in chunks of `LOGITS_AT_ONCE`."""

    def find(part: tuple[Array, Array]) -> Float[Array, " _chunk"]:
        rows, ids = part
        logprobs = jax.nn.log_softmax(module.compute_logits(rows) / temperature, axis=-1)
        return jnp.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0]

    num_rows = len(token_ids)
    num_chunks = cdiv(num_rows, max(1, LOGITS_AT_ONCE // vocab_size))
    if num_chunks == 1:
        return jax.checkpoint(find)((states, token_ids))
    size = cdiv(num_rows, num_chunks)
    padding = size * num_chunks - num_rows
    padded = jnp.pad(states, ((0, padding), (0, 0))), jnp.pad(token_ids, (0, padding))
    chunks = tuple(x.reshape(num_chunks, size, *x.shape[1:]) for x in padded)
    found = jax.lax.map(jax.checkpoint(find, prevent_cse=False), chunks)
    return found.reshape(-1)[:num_rows]
