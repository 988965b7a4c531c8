"""A tiny random model for pictures of any grid: a packed tower before the tiny Gemma's decoder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.engine_config import ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.attention.segments import refine_segments, segment_attention
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.module import bind, build_abstract, flatten_params, unflatten_params
from mmjax.layers.norm import LayerNorm
from mmjax.models.host_inputs import HostInputs, PackedEncoderSpec
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from mmjax.requests.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import IMAGE_TOKEN, engine_config, tiny_config

MERGE = 2
"""Patches along each side of the square that becomes one embedding."""
WINDOW = 4
"""Patches along each side of a window."""
MAX_SIDE = 20
MAX_WINDOWS = (MAX_SIDE // WINDOW) ** 2
PATCH_WIDTH, WIDTH, NUM_HEADS = 12, 24, 2

Attend = Callable[[Array, Array, Array], Array]
Grid = tuple[int, int]
"""Rows and columns of patches, both even."""


class PackedBlock(nnx.Module):
    """Attention by whoever is given, and a layer behind it."""

    def __init__(self, *, dtype: Any) -> None:
        self.norm = LayerNorm(WIDTH, eps=1e-6, dtype=dtype)
        self.qkv = Linear(WIDTH, 3 * WIDTH, use_bias=True, dtype=dtype)
        self.proj = Linear(WIDTH, WIDTH, use_bias=True, dtype=dtype)
        self.mlp = Linear(WIDTH, WIDTH, use_bias=True, dtype=dtype)

    def __call__(self, x: Float[Array, "P D"], attend: Attend) -> Float[Array, "P D"]:
        qkv = self.qkv(self.norm(x)).reshape(len(x), 3, NUM_HEADS, -1)
        x = x + self.proj(attend(qkv[:, 0], qkv[:, 1], qkv[:, 2]).reshape(x.shape))
        return x + jax.nn.gelu(self.mlp(x))


class PackedTower(nnx.Module):
    """A windowed block, a global one, and the merger."""

    def __init__(self, out_features: int, *, dtype: Any) -> None:
        self.patch_embed = Linear(PATCH_WIDTH, WIDTH, use_bias=True, dtype=dtype)
        self.rows = Embed(MAX_SIDE, WIDTH, dtype=dtype)
        self.columns = Embed(MAX_SIDE, WIDTH, dtype=dtype)
        self.windowed = PackedBlock(dtype=dtype)
        self.whole = PackedBlock(dtype=dtype)
        self.merger = Linear(MERGE**2 * WIDTH, out_features, use_bias=True, dtype=dtype)

    def __call__(
        self,
        pixel_values: Float[Array, "P _pixels"],
        places: Int[Array, "P 2"],
        attend: tuple[Attend, Attend],
    ) -> Float[Array, "_rows D"]:
        x = self.patch_embed(pixel_values)
        x = x + self.rows(places[:, 0]) + self.columns(places[:, 1])
        x = self.whole(self.windowed(x, attend[0]), attend[1])
        return self.merger(x.reshape(-1, MERGE**2 * WIDTH))


class PackedHostInputs(HostInputs):
    """Patches, their places and their windows."""

    encoder_spec = PackedEncoderSpec(
        inputs={
            "pixel_values": ((PATCH_WIDTH,), "float32"),
            "places": ((2,), "int32"),
            "window_ids": ((), "int32"),
        },
        patches_per_token=MERGE**2,
    )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches, where they are, and in which window; in the order of the merger."""
        places = places_of(*item["grid"].tolist())
        windows = places // WINDOW @ np.array([MAX_SIDE // WINDOW, 1])
        return {"pixel_values": item["pixel_values"], "places": places, "window_ids": windows}


class PackedForConditionalGeneration(MultiModalModel):
    """The tower before a decoder that sees what comes before."""

    host_inputs = PackedHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.language_model = build_text_model(hf_config, dtype=dtype)
        width = hf_config.text_config.hidden_size
        self.visual = PackedTower(width, dtype=dtype)

    def embed_multimodal(
        self,
        pixel_values: Float[Array, "P _pixels"],
        places: Int[Array, "P 2"],
        window_ids: Int[Array, " P"],
        segment_ids: Int[Array, " P"],
    ) -> Float[Array, "_rows D"]:
        windows = refine_segments(segment_ids, window_ids, num_parts=MAX_WINDOWS)
        scale = (WIDTH // NUM_HEADS) ** -0.5
        attend = [
            partial(segment_attention, segment_ids=ids, scale=scale)
            for ids in (windows, segment_ids)
        ]
        return self.visual(pixel_values, places, (attend[0], attend[1]))


def places_of(height: int, width: int) -> np.ndarray:
    """Return int64[P, 2]: row and column of each patch, square by square of the merger."""
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    places = np.stack([rows, columns], -1).reshape(height // MERGE, MERGE, width // MERGE, MERGE, 2)
    return places.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


@lru_cache
def packed_params() -> tuple[Any, Any]:
    """Return the graph and random parameters, loud enough that every patch changes the answer."""
    graphdef, abstract = build_abstract(
        PackedForConditionalGeneration, tiny_config(), dtype=jnp.dtype(jnp.float32)
    )
    rng = np.random.default_rng(4)
    leaves = {}
    for name, leaf in sorted(flatten_params(abstract).items()):
        value = rng.standard_normal(leaf.shape).astype(np.float32)
        if name.endswith("bias") or "norm" in name:
            value *= 0.05
            if name.startswith("visual") and name.endswith("weight"):
                value += 1.0
            if "q_norm" in name or "k_norm" in name:
                value += 1.0
        elif "embed_tokens" in name:
            value *= 0.05
        else:
            value *= 1.5 / np.sqrt(leaf.shape[-1])
        leaves[name] = jnp.asarray(value)
    return graphdef, unflatten_params(leaves)


def picture(seed: int, grid: Grid) -> dict[str, np.ndarray]:
    """Return the processed tensors of a picture."""
    shape = (grid[0] * grid[1], PATCH_WIDTH)
    pixels = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return {"pixel_values": pixels, "grid": np.array(grid)}


def picture_feature(
    seed: int, grid: Grid, offset: int, **instead: np.ndarray
) -> MultiModalFeatureSpec:
    """Return a picture at a place of the prompt; `instead`: tensors that replace the right ones."""
    tensors = picture(seed, grid) | instead
    name = f"picture-{seed}-{grid[0]}-{grid[1]}"
    field = MultiModalBatchedField()
    elems = {k: MultiModalFieldElem(data=value, field=field) for k, value in tensors.items()}
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem(elems),
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=offset, length=grid[0] * grid[1] // MERGE**2),
        mm_hash=name,
    )


def packed_message(request_id: str, parts: Sequence[Any], **sampling: Any) -> EngineCoreRequest:
    """Build a request: a part is a list of token ids, or (picture seed, grid)."""
    token_ids: list[int] = []
    features = []
    for part in parts:
        if isinstance(part, tuple):
            seed, grid = part
            features.append(picture_feature(seed, grid, len(token_ids)))
            token_ids += [IMAGE_TOKEN] * features[-1].mm_position.length
        else:
            token_ids += part
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=features,
        sampling_params=SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **sampling}),
    )


def packed_engine(*, tensor_parallel_size: int = 1, **settings: Any) -> EngineCore:
    """Start an engine over the tiny packed model."""
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 4} | settings
    config = replace(
        engine_config(**settings),
        parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size),
        max_embeds_per_item={"image": MAX_SIDE**2 // MERGE**2},
    )
    return EngineCore(config, model_class=PackedForConditionalGeneration, params=packed_params()[1])


def embed_alone(seed: int, grid: Grid) -> np.ndarray:
    """Return a picture's embeddings by dense attention over it alone: no pack, no padding."""
    graphdef, params = packed_params()
    units = PackedHostInputs(tiny_config()).units(picture(seed, grid))
    is_near = units["window_ids"][:, None] == units["window_ids"][None]

    def attend(mask: Any, query: Array, key: Array, value: Array) -> Array:
        scale = query.shape[-1] ** -0.5
        return dense_attention(query[None], key[None], value[None], mask=mask, scale=scale)[0]

    attends = (partial(attend, jnp.asarray(is_near)[None]), partial(attend, None))
    tower = bind(graphdef, params).visual
    places = jnp.asarray(units["places"], jnp.int32)
    return np.asarray(tower(jnp.asarray(units["pixel_values"]), places, attends))
