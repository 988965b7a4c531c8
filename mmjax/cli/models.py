"""`mmjax models`: what is served, and whether a checkpoint can be served on this machine."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmjax.errors import MMJaxError

_FORMS: Mapping[str, tuple[str, str | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
"""How weights may be held -> `--dtype` and `--quantization`."""


class Need(NamedTuple):
    """What a checkpoint needs in one form of its weights; bytes on all devices together."""

    weights: int
    kv_cache_token: int
    """What the KV cache stores for one token, without padding."""
    kv_cache_request: int
    """For the longest request."""
    states: int = 0
    """What recurrent layers keep of the requests and snapshots that there may be by default."""

    @property
    def total(self) -> int:
        """The least with which it starts; activations and encoder outputs come on top."""
        return self.weights + self.kv_cache_request + self.states


class Machine(NamedTuple):
    """What there is to hold it."""

    platform: str
    num_devices: int
    total: int
    free: int
    """Bytes on all devices together, within the default `--gpu-memory-utilization`."""


class Fit(NamedTuple):
    """What `mmjax models MODEL` found."""

    model: str
    architecture: str
    media: Sequence[str]
    parts: Mapping[str, int]
    """Parameters by part: towers, connectors and the language model."""
    max_model_len: int
    needs: Mapping[str, Need]
    machine: Machine
    auto: str
    """The form that `--dtype auto` chooses."""

    @property
    def held(self) -> list[str]:
        """The forms of weights that the machine can hold."""
        return [form for form, need in self.needs.items() if need.total <= self.machine.free]


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print what is served, or whether a checkpoint can be; return 0, or 1 if it cannot."""
    options = _parse(argv, prog)
    if options.model is None:
        rows = list_models()
        print(json.dumps(rows, indent=1) if options.json else _show_list(rows))
        return 0
    try:
        fit = examine(options.model, options.revision, options.max_model_len)
    except MMJaxError as error:
        print(f"{options.model} cannot be served: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_to_dict(fit), indent=1) if options.json else _show_fit(fit))
    return 0 if fit.held else 1


def list_models() -> list[dict[str, Any]]:
    """Return a row for each of mmjax's own architectures: its media, and a checkpoint of it."""
    # Imported here: transformers is slow.
    from mmjax.models.registry import MODELS

    return [
        {"architecture": name, "media": _list_media(name), "example": row.example}
        for name, row in MODELS.items()
    ]


def _list_media(architecture: str) -> list[str]:
    from mmjax.models.registry import get_processor_factories

    info = get_processor_factories(architecture).info
    return [*getattr(info, "limits", ()), *getattr(info, "sound_limits", ())]


def examine(model: str, revision: str | None = None, max_model_len: int | None = None) -> Fit:
    """Read a checkpoint's configuration, and of a directory the names in its weights' files.

    Downloads no weights. Raises MMJaxError with the reason why it cannot be served.
    """
    # Imported here: jax and transformers are slow.
    from mmjax.models.model_source import check_quantization, load_model_config
    from mmjax.models.registry import MULTIMODAL_REGISTRY, load_model_class

    is_local = Path(model).expanduser().is_dir()
    config = load_model_config(
        model, revision=revision, max_model_len=max_model_len, needs_weights=is_local
    )
    model_class: Any = load_model_class(config.architecture)
    check_quantization(config)
    info = MULTIMODAL_REGISTRY.create_processor(config).info
    info.get_hf_processor()  # refuses files that contradict each other
    published = _find_published(config, model_class, is_local=is_local)
    forms = [form for form, (_, own) in _FORMS.items() if own is None or published is None]
    needs = {form: _find_need(config, model_class, form, published) for form in forms}
    if is_local:
        _check_weights(config, model_class, published)
    return Fit(
        model=model,
        architecture=config.architecture,
        media=list(info.get_supported_mm_limits()),
        parts=_count_parts(config, model_class),
        max_model_len=config.max_model_len,
        needs=needs,
        machine=_find_machine(),
        auto=_choose_dtype(config.hf_config),
    )


def _find_published(config: Any, model_class: Any, *, is_local: bool) -> Any:
    """Return how the checkpoint has its weights quantised, of a hub id about; None: it has not."""
    from mmjax.weights.files.method import read_method
    from mmjax.weights.layouts import read_layouts

    if is_local:
        return read_layouts(config.path, config.hf_config, model_class.rules(config.hf_config))
    method = read_method(config.hf_config)
    if method is None:
        return None
    return "int4" if method.bits == 4 else "int8-weights"


def _build(
    config: Any, model_class: Any, form: str = "float32", published: Any = None
) -> tuple[Any, Any]:
    from mmjax.layers.module import build_abstract
    from mmjax.models.interface import build_model

    dtype, quantization = _FORMS[form]
    return build_abstract(
        build_model, model_class, config.hf_config, None, quantization or published, dtype=dtype
    )


def _find_need(config: Any, model_class: Any, form: str, published: Any) -> Need:
    import jax
    import jax.numpy as jnp

    from mmjax.config.engine_config import CacheConfig, SchedulerConfig
    from mmjax.layers.module import bind

    graphdef, params = _build(config, model_class, form, published)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    model = bind(graphdef, params)
    token = model.kv_cache_spec.width * jnp.dtype(_FORMS[form][0]).itemsize
    longest = token * (config.max_model_len + model.max_encoder_len)
    num_slots = SchedulerConfig().max_num_seqs + CacheConfig().num_state_snapshots
    return Need(weights, token, longest, 4 * num_slots * model.kv_cache_spec.num_state_floats)


def _count_parts(config: Any, model_class: Any) -> dict[str, int]:
    import jax

    _, params = _build(config, model_class)
    return {name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in params.items()}


def _check_weights(config: Any, model_class: Any, published: Any) -> None:
    """Raise CheckpointError where names or shapes in the files' headers are not the model's."""
    from mmjax.layers.module import flatten_params
    from mmjax.weights.files.method import read_method
    from mmjax.weights.files.packed import find_packed
    from mmjax.weights.files.safetensors import is_snapshot
    from mmjax.weights.load import match_tensors
    from mmjax.weights.parts import open_with_parts

    if is_snapshot(config.path):
        return
    _, params = _build(config, model_class, published=published)
    rules = model_class.rules(config.hf_config)
    with open_with_parts(config.path, config.parts, rules) as tensors:
        plain, packed = find_packed(tensors, read_method(config.hf_config))
        found, expected = [*plain, *packed], flatten_params(params)
        match_tensors(found, expected, rules, source=str(config.path))


def _choose_dtype(hf_config: Any) -> str:
    import jax

    from mmjax.engine.model import resolve_dtype
    from mmjax.layers.cpu.product import prefers_bfloat16
    from mmjax.models.model_source import stored_dtype

    platform, stored = jax.local_devices()[0].platform, stored_dtype(hf_config)
    return resolve_dtype("auto", platform, stored, prefers_bfloat16=prefers_bfloat16()).name


def _find_machine() -> Machine:
    import jax

    from mmjax.config.engine_config import CacheConfig
    from mmjax.engine.device.memory import device_memory

    devices = jax.local_devices()
    memory = device_memory(devices, CacheConfig().gpu_memory_utilization)
    count = 1 if memory.is_shared else len(devices)
    return Machine(devices[0].platform, count, memory.total * count, memory.free * count)


# ---- text ----------------------------------------------------------------------------------------


def _show_list(rows: Sequence[Mapping[str, Any]]) -> str:
    width = max(len(row["architecture"]) for row in rows)
    lines = [
        f"  {row['architecture']:<{width}}  {', '.join(row['media']):<12}  {row['example']}"
        for row in rows
    ]
    head = "Served are these classes (`architectures` in a checkpoint's config.json):"
    tail = "`mmjax models MODEL`, of a directory or a hub id, says whether this machine holds it."
    return "\n".join([head, "", *lines, "", tail])


def _show_fit(fit: Fit) -> str:
    from mmjax.engine.device.memory import format_bytes

    total = sum(fit.parts.values())
    parts = ", ".join(f"{name} {_show_count(size)}" for name, size in fit.parts.items())
    machine = fit.machine
    lines = [
        f"{fit.model}: {fit.architecture}, takes {' and '.join(fit.media)}",
        f"parameters: {_show_count(total)} ({parts})",
        f"this machine: {machine.num_devices} x {machine.platform}, "
        f"{format_bytes(machine.free)} free of {format_bytes(machine.total)}",
        "",
        f"{'':<10}{'weights':>12}{'KV a token':>12}{f'KV of {fit.max_model_len}':>14}  held here",
    ]
    states = max(need.states for need in fit.needs.values())
    if states:
        lines.insert(3, f"recurrent layers: {format_bytes(states)} of states")
    for form, need in fit.needs.items():
        sizes = (need.weights, need.kv_cache_token, need.kv_cache_request)
        weights, token, request = map(format_bytes, sizes)
        lines.append(
            f"{form:<10}{weights:>12}{token:>12}{request:>14}  "
            f"{'yes' if form in fit.held else 'no'}"
        )
    return "\n".join([*lines, "", _advise(fit)])


def _advise(fit: Fit) -> str:
    if not fit.held:
        return (
            "This machine cannot hold it. Lower `--max-model-len`, take a smaller checkpoint, or "
            "a machine with more memory."
        )
    form = next(form for form in (fit.auto, "bfloat16", "int8", "int4") if form in fit.held)
    dtype, quantization = _FORMS[form]
    devices = fit.machine.num_devices
    flags = [
        *([f"--dtype {dtype}"] if form != fit.auto else []),
        *([f"--quantization {quantization}"] if quantization else []),
        *([f"--tensor-parallel-size {devices}"] if devices > 1 else []),
    ]
    return f"Serve it: {' '.join(['mmjax serve', fit.model, *flags])}"


def _show_count(size: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return str(size)


def _to_dict(fit: Fit) -> dict[str, Any]:
    needs = {
        form: {**need._asdict(), "is_held": form in fit.held} for form, need in fit.needs.items()
    }
    return {**fit._asdict(), "needs": needs, "machine": fit.machine._asdict()}


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add: Any = parser.add_argument
    add("model", nargs="?", help="a directory or a hub id; default: list what is served")
    add("--revision", help="of a hub id")
    add("--max-model-len", type=int, help="tokens of the longest request")
    add("--json", action="store_true", help="sizes in bytes")
    return parser.parse_args(argv)
