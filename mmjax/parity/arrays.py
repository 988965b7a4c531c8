"""Run the model as the engine does (paged, tiled), recording every block's output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.config.engine_config import Quantization
from mmjax.engine.device.functions import AdaptedModel
from mmjax.layers.attention.api import CrossAttentionMetadata, PagedAttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache, allocate
from mmjax.layers.module import (
    Params,
    bind,
    build_abstract,
    flatten_params,
    tracing_every_block,
    unflatten_params,
)
from mmjax.models.host_inputs import (
    HostInputs,
    PackedEncoderSpec,
    PromptItem,
    RotaryPositions,
)
from mmjax.models.interface import AdapterSizes, build_model, embed_units
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import PROBED
from mmjax.rounding import cdiv, round_up
from mmjax.weights.adapter import AdapterReader, fill_slot, read_adapter_config, slot_axis
from mmjax.weights.load import load_params

BLOCK_SIZE = 16
TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One processed prompt."""

    token_ids: np.ndarray
    """int32[T]"""
    items: Sequence[PromptItem] = ()
    """In the order of the prompt."""
    encoder_token_ids: np.ndarray | None = None
    """int32[S]: the prompt of an encoder-decoder's encoder, where the items are; else None."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_embed(self) -> np.ndarray:
        """bool[T]: whether an encoder's row stands there."""
        return find_embeds(self.num_tokens, self.items)

    def span_end(self, *, is_bidirectional: bool) -> np.ndarray:
        """Return int32[T]: index + 1, or the exclusive end of the run of embeddings around it."""
        ends, is_embed = np.arange(1, self.num_tokens + 1), self.is_embed
        for i in range(self.num_tokens - 2, -1, -1):
            if is_bidirectional and is_embed[i] and is_embed[i + 1]:
                ends[i] = ends[i + 1]
        return ends.astype(np.int32)


def find_embeds(num_tokens: int, items: Sequence[PromptItem]) -> np.ndarray:
    """Return bool[T]: where an item's embedding stands, in a prompt of `num_tokens`."""
    is_embed = np.zeros(num_tokens, bool)
    for place, _ in items:
        inside = slice(place.offset, place.offset + place.length)
        # Neighbours may share a token of text, hence the or.
        is_embed[inside] |= True if place.is_embed is None else place.is_embed
    return is_embed


def make_sample(inputs: Any) -> Sample:
    """Return the sample of what our processor gave (`MultiModalInputs`)."""
    items = [
        PromptItem(place, item.get_data())
        for modality, places in inputs.mm_placeholders.items()
        for item, place in zip(inputs.mm_kwargs[modality], places, strict=True)
    ]
    encoder_ids = inputs.encoder_prompt_token_ids
    return Sample(
        token_ids=np.asarray(inputs.prompt_token_ids, np.int32),
        items=sorted(items, key=lambda item: item.position.offset),
        encoder_token_ids=None if encoder_ids is None else np.asarray(encoder_ids, np.int32),
    )


class PagedModel:
    """A model with its parameters, for one request of at most `max_len` tokens at a time.

    Programs: one for the encoder (one unit), one for decoding, one per 64 prompt tokens.
    """

    def __init__(
        self,
        model_class: type,
        hf_config: Any,
        params: Params,
        max_len: int,
        dtype: Any = jnp.float32,
        quantization: Quantization | None = None,
    ) -> None:
        self._parts = (model_class, hf_config, None, quantization)
        self.graphdef, abstract = build_abstract(build_model, *self._parts, dtype=dtype)
        self.dtype = dtype
        structure = bind(self.graphdef, abstract)
        self.model_class: Any = model_class
        self.host_inputs: HostInputs = self.model_class.host_inputs(hf_config)
        self.params = params
        self.cache_spec = structure.kv_cache_spec
        self.num_blocks = cdiv(max_len, BLOCK_SIZE)
        self.max_encoder_len = structure.max_encoder_len
        self.num_encoder_blocks = cdiv(self.max_encoder_len, BLOCK_SIZE)
        self.width = abstract["language_model"]["embed_tokens"]["weight"].shape[1]
        self._jit()

    def _jit(self) -> None:
        self._encode = jax.jit(partial(_encode, self.graphdef))
        self._encode_prompt = jax.jit(partial(_encode_prompt, self.graphdef))
        self._step = jax.jit(partial(_step, self.graphdef), static_argnames="is_probed")

    @classmethod
    def from_directory(
        cls,
        path: Path | str,
        model_class: Any,
        hf_config: Any,
        *,
        max_len: int,
        dtype: Any = jnp.float32,
        quantization: Quantization | None = None,
    ) -> "PagedModel":
        """Load a checkpoint, to compute in `dtype`."""
        parts = (model_class, hf_config, None, quantization)
        _, abstract = build_abstract(build_model, *parts, dtype=dtype)
        params = load_params(path, abstract, model_class.rules(hf_config), use_tqdm=False)
        return cls(model_class, hf_config, params, max_len, dtype, quantization)

    def load_adapter(self, path: Path) -> None:
        """Compute with an adapter from now on, wherever it has weights."""
        rank = read_adapter_config(path)[0].max_rank
        sizes = AdapterSizes(1, rank, jnp.dtype(self.dtype), has_towers=True)
        graphdef, abstract = build_abstract(build_model, *self._parts, sizes, dtype=self.dtype)
        shapes = AdaptedModel.of(graphdef, abstract, has_towers=True).shapes
        leaves = flatten_params(self.params)

        def read_base(name: str) -> np.ndarray | None:
            return np.asarray(leaves[name]) if name in leaves else None

        reader = AdapterReader(
            rules=self.model_class.rules(self._parts[1]),
            shapes={name: leaf.shape for name, leaf in shapes.items()},
            dtype=jnp.dtype(self.dtype),
            max_rank=rank,
            read_base=read_base,
        )
        arrays = reader.read(path).arrays
        for name, leaf in shapes.items():
            own = fill_slot(name, arrays.get(name), leaf.shape, leaf.dtype)
            leaves[name] = jnp.expand_dims(own, slot_axis(name))
            # One slot, which every row has.
            leaves[f"{name.rpartition('.')[0]}.slots"] = jnp.zeros(1, jnp.int32)
        self.graphdef, self.params = graphdef, unflatten_params(leaves)
        self._jit()

    def run(self, sample: Sample) -> dict[str, np.ndarray]:
        """Return every probed module's output and the logits at every prompt position."""
        encoded = self._run_encoder(sample)
        rows = encoded.pop("", None)
        step, _ = self._prefill(sample, rows, self._new_cache(), self._positions(sample))
        return encoded | {name: value[: sample.num_tokens] for name, value in step.items()}

    def generate(self, sample: Sample, max_tokens: int) -> tuple[int, ...]:
        """Return `max_tokens` greedy tokens, ignoring EOS."""
        return tuple(self.decode(sample, max_tokens).argmax(-1).tolist())

    def decode(self, sample: Sample, max_tokens: int) -> np.ndarray:
        """Return float32[max_tokens, V]: the logits that each greedy token was chosen by."""
        rows = self._run_encoder(sample).pop("", None)
        rotary = self._positions(sample)
        outputs, cache = self._prefill(sample, rows, self._new_cache(), rotary)
        logits = [outputs[LOGITS][sample.num_tokens - 1]]
        while len(logits) < max_tokens:
            place = sample.num_tokens + len(logits) - 1
            metadata = self._metadata(place, np.array([place + 1], np.int32), padded=1, tile=1)
            metadata = self._add_cross(metadata, sample, rows, is_first=False)
            positions = rotary.between(place, place + 1)
            token = np.array([logits[-1].argmax()], np.int32)
            outputs, cache = self._call(token, None, cache, metadata, positions)
            logits.append(outputs[LOGITS][0])
        return np.stack(logits)

    def embed(self, sample: Sample) -> np.ndarray:
        """Return float32[rows, D]: the embeddings of all items, in the order of the prompt."""
        return self._run_encoder(sample)[""]

    def _new_cache(self) -> KVCache:
        return allocate(
            self.cache_spec,
            num_blocks=self.num_blocks + self.num_encoder_blocks,
            block_size=BLOCK_SIZE,
            dtype=self.dtype,
        )

    def _positions(self, sample: Sample) -> RotaryPositions:
        indices = np.tile(np.arange(sample.num_tokens, dtype=np.int32), (3, 1))
        found = self.host_inputs.rotary_positions(sample.num_tokens, sample.items)
        return found or RotaryPositions(indices, 0)

    def _run_encoder(self, sample: Sample) -> dict[str, np.ndarray]:
        """Run towers and, of an encoder-decoder, the encoder.

        What the decoder takes is under the empty name: embeddings, or the hidden states.
        """
        outputs = self._run_towers(sample)
        if sample.encoder_token_ids is None:
            return outputs
        return outputs | self._run_prompt_encoder(sample.encoder_token_ids, sample, outputs)

    def _run_towers(self, sample: Sample) -> dict[str, np.ndarray]:
        """Encode item by item; all items' embeddings are under the empty name."""
        calls: list[dict[str, np.ndarray]] = []
        embeds: list[np.ndarray] = []
        with jax.default_matmul_precision("highest"):
            for _, tensors in sample.items:
                own = [jax.device_get(self._encode(self.params, u)) for u in self._units(tensors)]
                rows = np.concatenate([call.pop("").reshape(-1, self.width) for call in own])
                calls += own
                embeds.append(self._choose(rows, self.host_inputs.embed_rows(tensors)))
        if not calls:
            return {}
        outputs = {name: np.concatenate([call[name] for call in calls]) for name in calls[0]}
        return outputs | {"": np.concatenate(embeds)}

    def _run_prompt_encoder(
        self, token_ids: np.ndarray, sample: Sample, encoded: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Run an encoder-decoder's encoder over its prompt, padded to the longest."""
        count = len(token_ids)
        is_embed = find_embeds(count, sample.items)
        embeds = np.zeros((self.max_encoder_len, self.width), self.dtype)
        if is_embed.any():
            embeds[:count][is_embed] = encoded[""]
        pad = (0, self.max_encoder_len - count)
        ids = np.pad(np.where(is_embed, 0, token_ids), pad, constant_values=-1)[None]
        is_embed = np.pad(is_embed, pad)[None]
        with jax.default_matmul_precision("highest"):
            outputs = jax.device_get(self._encode_prompt(self.params, ids, is_embed, embeds[None]))
        # Hidden states are padded, as the prompt is.
        cut = {name: value[:, :count] for name, value in outputs.items()}
        return cut | {"": cut[""][0]}

    def _units(self, tensors: Mapping[str, np.ndarray]) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield what each call of the encoder gets: a unit, or a pack of one item."""
        spec = self.host_inputs.encoder_spec
        units = self.host_inputs.encoder_inputs(tensors)
        count = len(next(iter(units.values())))
        if isinstance(spec, PackedEncoderSpec):
            yield units | {"segment_ids": np.zeros(count, np.int32)}
            return
        for i in range(count):
            yield {name: value[i : i + 1] for name, value in units.items()}

    def _choose(self, rows: np.ndarray, embed_rows: np.ndarray | None) -> np.ndarray:
        """Return an item's embeddings, of the encoder's rows and the model's learned ones."""
        if embed_rows is None:
            return rows
        if self.host_inputs.num_extra_rows:
            extra = jax.device_get(bind(self.graphdef, self.params).extra_embeds())
            rows = np.concatenate([rows, extra[::-1]])
        return rows[embed_rows]

    def _prefill(
        self,
        sample: Sample,
        rows: np.ndarray | None,
        cache: KVCache,
        rotary: RotaryPositions,
    ) -> tuple[dict[str, np.ndarray], KVCache]:
        padded = round_up(sample.num_tokens, TILE)
        token_ids = np.zeros(padded, np.int32)
        token_ids[: sample.num_tokens] = sample.token_ids
        embeds = None
        if rows is not None and sample.encoder_token_ids is None:
            is_embed = np.zeros(padded, bool)
            is_embed[: sample.num_tokens] = sample.is_embed
            embeds = np.zeros((padded, rows.shape[-1]), rows.dtype)
            embeds[is_embed] = rows
            embeds = (is_embed, embeds)
        span_end = sample.span_end(is_bidirectional=self.model_class.has_bidirectional_spans)
        metadata = self._metadata(0, span_end, padded=padded, tile=TILE)
        metadata = self._add_cross(metadata, sample, rows, is_first=True)
        positions = rotary.between(0, sample.num_tokens)
        positions = np.pad(positions, ((0, 0), (0, padded - sample.num_tokens)))
        return self._call(token_ids, embeds, cache, metadata, positions)

    def _call(
        self,
        token_ids: np.ndarray,
        embeds: tuple[np.ndarray, np.ndarray] | None,
        cache: KVCache,
        metadata: PagedAttentionMetadata,
        positions: np.ndarray,
    ) -> tuple[dict[str, np.ndarray], KVCache]:
        with jax.default_matmul_precision("highest"):
            outputs, cache = self._step(
                self.params,
                token_ids,
                embeds,
                cache,
                metadata=metadata,
                positions=positions,
                is_probed=len(token_ids) > 1,
            )
        return jax.device_get(outputs), cache

    def _metadata(
        self, start: int, span_end: np.ndarray, *, padded: int, tile: int
    ) -> PagedAttentionMetadata:
        """Return the metadata of one request's tokens from `start` on; block ids are in order."""
        count = len(span_end)
        places = np.arange(start, start + count)

        def pad(values: np.ndarray, fill: int) -> np.ndarray:
            return np.pad(values, (0, padded - count), constant_values=fill).astype(np.int32)

        rows = np.arange(padded)
        fields: dict[str, Any] = {
            "slot_block": pad(places // BLOCK_SIZE, self.num_blocks + self.num_encoder_blocks),
            "slot_offset": pad(places % BLOCK_SIZE, 0),
            "token_index": pad(places, 0),
            "span_end": pad(span_end, 0),
            "tile_rows": np.where(rows < count, rows, padded).reshape(-1, tile).astype(np.int32),
            "tile_request": np.zeros(padded // tile, np.int32),
            "row_slot": pad(np.arange(count), 0),
            "block_tables": np.arange(self.num_blocks, dtype=np.int32)[None],
        }
        return PagedAttentionMetadata(**fields)

    def _add_cross(
        self,
        metadata: PagedAttentionMetadata,
        sample: Sample,
        states: np.ndarray | None,
        *,
        is_first: bool,
    ) -> PagedAttentionMetadata:
        """Return the metadata with that of cross-attention to an encoder's hidden states.

        Its blocks are behind the decoder's; the first step writes the states, padded to the longest
        prompt, later ones none.
        """
        if sample.encoder_token_ids is None:
            return metadata
        assert states is not None
        size, count = (self.max_encoder_len, len(states)) if is_first else (0, 0)
        places, end = np.arange(size), self.num_blocks + self.num_encoder_blocks
        slots = np.where(places < count, self.num_blocks + places // BLOCK_SIZE, end)
        fields: dict[str, Any] = {
            "slot_block": slots.astype(np.int32),
            "slot_offset": (places % BLOCK_SIZE).astype(np.int32),
            "lengths": np.array([len(states)], np.int32),
            "block_tables": np.arange(self.num_blocks, end, dtype=np.int32)[None],
            "encoder_hidden_states": np.pad(states[:count], ((0, size - count), (0, 0))),
        }
        return metadata._replace(cross=CrossAttentionMetadata(**fields))


def _encode(graphdef: Any, params: Params, unit: Mapping[str, Any]) -> dict[str, Any]:
    module = bind(graphdef, params)
    with record(module) as outputs:
        embeds = embed_units(module, unit)
    return outputs | {"": embeds}


def _encode_prompt(
    graphdef: Any, params: Params, token_ids: Any, is_embed: Any, embeds: Any
) -> dict[str, Any]:
    module = bind(graphdef, params)
    text = module.embed_input_ids(jnp.maximum(token_ids, 0).reshape(-1))
    merged = jnp.where(is_embed[:, :, None], embeds, text.reshape(embeds.shape))
    with record(module) as outputs:
        states = module.encode_prompts(merged, token_ids >= 0)
    return outputs | {"": states}


def _step(
    graphdef: Any,
    params: Params,
    token_ids: Any,
    embeds: tuple[Any, Any] | None,
    cache: KVCache,
    *,
    metadata: PagedAttentionMetadata,
    positions: Any,
    is_probed: bool,
) -> tuple[dict[str, Any], KVCache | None]:
    """Return the logits, and of a prompt what every probed module gave."""
    module = bind(graphdef, params)
    hidden = module.embed_input_ids(token_ids)
    if embeds is not None:
        is_embed, rows = embeds
        hidden = jnp.where(is_embed[:, None], rows, hidden)
    with record(module) if is_probed else nullcontext({}) as outputs:
        hidden, cache = module(hidden, positions, cache, metadata)
    return outputs | {LOGITS: module.compute_logits(hidden)}, cache


@contextmanager
def record(module: nnx.Module) -> Iterator[dict[str, Any]]:
    """Record the outputs of all probed modules while the body traces; yield `{name: output}`.

    Wraps `__call__` of their classes meanwhile, so that models need no debug outputs.
    """
    outputs: dict[str, Any] = {}
    names = {}
    for path, child in nnx.iter_modules(module):
        name = ".".join(str(part) for part in path)
        if PROBED.search(name):
            names[id(child)] = (name, child)
    classes = {type(child) for _, child in names.values()}
    originals = {cls: cls.__call__ for cls in classes}
    for cls, original in originals.items():
        cls.__call__ = _recording(original, names, outputs)
    try:
        with tracing_every_block():
            yield outputs
    finally:
        for cls, original in originals.items():
            cls.__call__ = original


def _recording(
    original: Callable[..., Any], names: Mapping[int, Sequence[Any]], outputs: dict[str, Any]
) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if id(self) in names:
            outputs[names[id(self)][0]] = result[0] if isinstance(result, tuple) else result
        return result

    return call
