"""The model of an engine: which class, on which devices, and which of its weights are read."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mmjax.config.engine_config import EngineConfig, ModelConfig
from mmjax.engine.device.functions import AdaptedModel
from mmjax.engine.device.mesh import Placement, make_placement
from mmjax.errors import CheckpointError, ConfigError, SnapshotDamagedError
from mmjax.layers.cpu.library import report_kernels
from mmjax.layers.cpu.product import prefers_bfloat16
from mmjax.layers.module import Params, bind, build_abstract, flatten_params, unflatten_params
from mmjax.layers.quantization import Layouts, quantize_params
from mmjax.models.eagle3.model import is_eagle3, read_tapped_layers
from mmjax.models.interface import AdapterSizes, build_model, left_out_names
from mmjax.models.model_source import resolve_model, stored_dtype
from mmjax.models.registry import load_model_class
from mmjax.system.allocator import use_large_pages
from mmjax.system.logger import get_logger
from mmjax.weights.dummy import make_dummy_params
from mmjax.weights.files.method import read_method_of
from mmjax.weights.files.safetensors import is_snapshot
from mmjax.weights.layouts import read_layouts
from mmjax.weights.load import iter_params
from mmjax.weights.sharding import Device
from mmjax.weights.snapshot import load_snapshot

logger = get_logger(__name__)


class LoadedModel(NamedTuple):
    """A model that is loaded."""

    model_class: Any
    graphdef: Any
    params: dict[Any, Any]
    placement: Placement
    adapted: AdaptedModel | None
    """None without `enable_lora`."""
    left_out: tuple[str, ...]
    """Attributes that are not loaded, since no media are allowed."""


def describe_model(
    config: EngineConfig, model_class: Any, devices: Sequence[Device] | None
) -> LoadedModel:
    """Return the model with shapes and dtypes in place of its parameters."""
    model_class = model_class or load_model_class(
        config.model.architecture, config.model.model_class
    )
    platform = (devices or jax.local_devices())[0].platform
    if platform == "cpu":
        report_kernels()
    dtype = resolve_dtype(
        config.model.dtype,
        platform,
        stored_dtype(config.model.hf_config),
        prefers_bfloat16=prefers_bfloat16(),
    )
    quantization = config.model.quantization or _find_layouts(config.model, model_class)
    parts = (model_class, config.model.hf_config, config.model.mm, quantization)
    cache = config.cache
    has_towers = not cache.encoder_workers or cache.keep_encoder
    options: dict[str, Any] = {"dtype": dtype, "has_towers": has_towers}
    if config.draft is not None and is_eagle3(config.draft):
        text_config = config.model.hf_config.get_text_config()
        options["tapped_layers"] = read_tapped_layers(config.draft.hf_config, text_config)
    graphdef, abstract = build_abstract(build_model, *parts, **options)
    model = bind(graphdef, abstract)
    adapted = _make_room(config, model, parts, options)
    left_out = left_out_names(model, config.model.mm, has_towers=has_towers)
    if not has_towers and not left_out:
        raise ConfigError(
            f"`encoder_workers` is set, but `{model_class.__name__}` marks no module as a tower "
            "(`_mark_tower_model`), so that all of it would be loaded here; leave it out"
        )
    placement = make_placement(
        config.parallel, num_kv_heads=model.kv_cache_spec.num_kv_heads, devices=devices
    )
    return LoadedModel(model_class, graphdef, abstract, placement, adapted, left_out)


def load_model(
    config: EngineConfig,
    model_class: Any,
    params: Params | None,
    devices: Sequence[Device] | None,
) -> LoadedModel:
    """Return the model with its sharded parameters; `params` None: those of the checkpoint."""
    return load_params(config, describe_model(config, model_class, devices), params)


def load_params(config: EngineConfig, model: LoadedModel, params: Params | None) -> LoadedModel:
    """Return a model with arrays in place of its parameters' descriptions."""
    model_class, _, abstract, placement, _, left_out = model
    if left_out:
        why = "workers encode" if config.cache.encoder_workers else "no media are allowed"
        logger.info("%s: left out are %s", why, ", ".join(left_out))
    if params is None and config.model.load_format == "dummy":
        params = make_dummy_params(abstract, mesh=placement.home, left_out=left_out)
    elif params is None:
        params = _read(config, model_class, abstract, placement, left_out)
    elif config.model.quantization is not None:
        params = quantize_params(params, abstract)
    given = {name: part for name, part in params.items() if name not in left_out}
    placed = placement.place_params(given)
    if placement.platform == "cpu":
        _use_large_pages(placed)
    return model._replace(params=placed)


def _use_large_pages(params: Params) -> None:
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            use_large_pages(shard.data.unsafe_buffer_pointer(), shard.data.nbytes)


def _find_layouts(config: ModelConfig, model_class: Any) -> Layouts | None:
    """Return how the checkpoint has its weights quantised; None: it has not."""
    return read_layouts(config.path, config.hf_config, model_class.rules(config.hf_config))


def _make_room(
    config: EngineConfig, model: Any, parts: Any, options: Mapping[str, Any]
) -> AdaptedModel | None:
    """Return the model with room for adapters; None without `enable_lora`."""
    lora, model_class = config.lora, parts[0]
    if not lora.enable_lora:
        return None
    if model.max_encoder_len:
        raise ConfigError(
            f"`enable_lora` is set, but `{model_class.__name__}` is an encoder-decoder, or one "
            "with cross-attention to pictures, whose adapters mmjax does not serve; leave it out"
        )
    own = options["dtype"] if lora.lora_dtype == "auto" else jnp.dtype(lora.lora_dtype)
    has_towers = lora.enable_tower_connector_lora
    sizes = AdapterSizes(lora.max_loras, lora.max_lora_rank, own, has_towers)
    graphdef, abstract = build_abstract(build_model, *parts, sizes, **options)
    return AdaptedModel.of(graphdef, abstract, has_towers=has_towers)


def _read(
    config: EngineConfig,
    model_class: Any,
    abstract: Params,
    placement: Placement,
    left_out: Collection[str],
) -> Params:
    """Read the checkpoint's weights."""
    path, mesh = config.model.path, placement.home
    if is_snapshot(path):
        try:
            return load_snapshot(
                path, abstract, mesh=mesh, left_out=left_out, agree=placement.agree
            )
        except SnapshotDamagedError as error:
            path = _find_source(error, config.model.download_dir)
    leaves = iter_own_params(config, model_class, left_out, mesh, abstract, path)
    return unflatten_params(dict(leaves))


def iter_own_params(
    config: EngineConfig,
    model_class: Any,
    left_out: Collection[str],
    mesh: Mesh | Device,
    abstract: Params,
    path: Path,
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the parameters of a directory as HF has them."""
    return iter_params(
        path,
        abstract,
        model_class.rules(config.model.hf_config),
        mesh=mesh,
        left_out=left_out,
        method=read_method_of(path, config.model.hf_config),
        parts=config.model.parts,
        use_tqdm=config.use_tqdm,
    )


def _find_source(damage: SnapshotDamagedError, download_dir: Path | None) -> Path:
    """Return the directory that a damaged snapshot was made of; raise `damage` if it is gone."""
    try:
        source = resolve_model(damage.source, revision=damage.revision, download_dir=download_dir)
    except CheckpointError as error:
        raise damage from error
    logger.error("%s; until then the weights of `%s` are loaded", damage, damage.source)
    return source


def resolve_dtype(name: str, platform: str, stored: str | None, *, prefers_bfloat16: bool) -> Any:
    """Return the dtype of weights and caches.

    "auto" is bfloat16 on accelerators. On a CPU it is bfloat16 where the weights are stored in 16
    bits and serve better so (`prefers_bfloat16`); else float32. `stored`: as `stored_dtype` returns
    it.
    """
    if name == "auto":
        is_half = stored in ("bfloat16", "float16")
        name = "bfloat16" if platform != "cpu" or (is_half and prefers_bfloat16) else "float32"
        logger.info(
            "dtype auto: %s, on %s%s with weights stored in %s",
            name,
            platform,
            "" if platform != "cpu" or prefers_bfloat16 else " without kernels or bfloat16",
            stored or "no named dtype",
        )
    return jnp.dtype(name)


def iter_encoder(
    config: EngineConfig, model: LoadedModel, params: Params | None, read: Collection[str]
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the parameters that are `read` to encode; no others are loaded."""
    whole, mesh = flatten_params(model.params), model.placement.home
    wanted = unflatten_params({name: leaf for name, leaf in whole.items() if name in read})
    others = whole.keys() - read
    # A whole attribute by its own name: the files may have more of it than the tree.
    attributes = {name.partition(".")[0] for name in others} - set(wanted)
    left_out = frozenset([*others, *attributes])
    if params is not None:
        if config.model.quantization is not None:
            params = quantize_params(params, model.params)
        given = {name: leaf for name, leaf in flatten_params(params).items() if name in read}
        yield from flatten_params(model.placement.place_params(unflatten_params(given))).items()
    elif config.model.load_format == "dummy":
        yield from flatten_params(make_dummy_params(wanted, mesh=mesh)).items()
    elif is_snapshot(config.model.path):
        yield from flatten_params(
            _read(config, model.model_class, wanted, model.placement, left_out)
        ).items()
    else:
        path = config.model.path
        yield from iter_own_params(config, model.model_class, left_out, mesh, wanted, path)
