"""What config.json says of a checkpoint that is published quantised. No jax."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmjax.errors import CheckpointError

_SERVED = (
    "compressed-tensors (W4A16, W8A16, W8A8 and FP8), AWQ, GPTQ of 4 or 8 bits, and FP8 with "
    "scales of blocks"
)
_INSTEAD = MappingProxyType(
    {
        "bitsandbytes": "take the checkpoint that this one was made of, and `--quantization int4`",
        "gguf": "take the model's own repository, and `--quantization int4`",
        "mxfp4": "take a checkpoint in bfloat16, and `--quantization int4`",
    }
)
"""What works in place of methods that many checkpoints have."""
_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json; the second was that of compressed-tensors until the middle of 2024."""
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_NUMBERS = ((4, "int"), (8, "int"), (8, "float"))
_MIXED = "mixed-precision"
"""Formats and numbers of compressed-tensors; of mixed ones each group of layers names its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the tensors of a quantised checkpoint are read, as far as they do not say it."""

    name: str
    """`quant_method`."""
    bits: int
    """Of a weight; the least where there are several."""
    zero_offset: int = 0
    """What is added to the zeros in the files: GPTQ's first format has them less one."""
    rounds_inputs: bool = False
    """Whether layers of 8-bit integers have inputs in 8 bits, too."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale of FP8, where they are blocks."""


def read_method(hf_config: Any) -> Method | None:
    """Return how weights are quantised; None: they are not. CheckpointError for the unserved."""
    values = _find_settings(hf_config)
    return None if values is None else _read_settings(values)


def read_method_of(path: Path, hf_config: Any) -> Method | None:
    """Return how a directory's weights are quantised, by its own config.json.

    `hf_config`: whose method it is where the directory says none.
    """
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raw = None
    found = (raw.get(key) for key in _KEYS) if isinstance(raw, dict) else ()
    values = next((one for one in found if isinstance(one, dict)), None)
    return read_method(hf_config) if values is None else _read_settings(values)


def _read_settings(values: Mapping[str, Any]) -> Method:
    name = values.get("quant_method")
    readers = {
        "compressed-tensors": _read_compressed_tensors,
        "awq": _read_awq,
        "gptq": _read_gptq,
        "fp8": _read_fp8,
    }
    if not isinstance(name, str) or name not in readers:
        instead = _INSTEAD.get(str(name), "take the checkpoint that this one was made of")
        raise _refuse("quant_method", name, _SERVED, instead)
    return readers[name](values)


def _find_settings(hf_config: Any) -> Mapping[str, Any] | None:
    parts = (hf_config, hf_config.get_text_config())
    found = (getattr(part, key, None) for key in _KEYS for part in parts)
    settings = next((one for one in found if one is not None), None)
    if settings is None or isinstance(settings, Mapping):
        return settings
    return settings.to_dict()


def _refuse(
    key: str, value: Any, served: str, instead: str = "take another checkpoint"
) -> CheckpointError:
    return CheckpointError(
        f"`quantization_config.{key}` of config.json is `{str(value)[:80]}`; mmjax reads {served}: "
        f"{instead}"
    )


def _read_compressed_tensors(values: Mapping[str, Any]) -> Method:
    sparsity = _read_object(values, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise _refuse("sparsity_config.format", sparsity, "dense weights")
    if _read_object(values, "transform_config").get("config_groups"):
        raise _refuse("transform_config", "set", "weights without rotations")
    block, rounds_inputs, least = None, False, 8
    groups = _read_object(values, "config_groups")
    for name in groups:
        group = _read_object(groups, name, "config_groups.")
        kind = group.get("format") or values.get("format")
        if kind not in _FORMATS and not (kind == _MIXED and group.get("format") is None):
            raise _refuse(f"config_groups.{name}.format", kind, ", ".join(_FORMATS))
        weights = _read_object(group, "weights", f"config_groups.{name}.")
        bits, type_ = weights.get("num_bits"), weights.get("type")
        if not isinstance(bits, int) or (bits, type_) not in _NUMBERS:
            served = "integers of 4 or 8 bits, and floats of 8"
            raise _refuse(f"config_groups.{name}.weights", f"{bits} bits, {type_}", served)
        if weights.get("strategy") == "block":
            place = f"config_groups.{name}.weights.block_structure"
            block = _read_block(weights.get("block_structure"), place)
        least = min(least, bits)
        rounds_inputs |= type_ == "int" and group.get("input_activations") is not None
    return Method(name="compressed-tensors", bits=least, rounds_inputs=rounds_inputs, block=block)


def _read_object(values: Mapping[str, Any], key: str, place: str = "") -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise _refuse(f"{place}{key}", value, "objects there")
    return value


def _read_awq(values: Mapping[str, Any]) -> Method:
    version = str(values.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refuse("version", version, "AWQ's `gemm`")
    _check_bits(values, (4,))
    return Method(name="awq", bits=4)


def _read_gptq(values: Mapping[str, Any]) -> Method:
    _check_bits(values, (4, 8))
    kind = values.get("checkpoint_format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise _refuse("checkpoint_format", kind, "GPTQ's `gptq` and `gptq_v2`")
    return Method(name="gptq", bits=values["bits"], zero_offset=int(kind == "gptq"))


def _read_fp8(values: Mapping[str, Any]) -> Method:
    kind = values.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise _refuse("fmt", kind, "FP8 as `e4m3`")
    size = values.get("weight_block_size")
    block = None if size is None else _read_block(size, "weight_block_size")
    return Method(name="fp8", bits=8, block=block)


def _check_bits(values: Mapping[str, Any], served: tuple[int, ...]) -> None:
    bits = values.get("bits", values.get("w_bit"))
    if bits not in served:
        raise _refuse("bits", bits, " and ".join(map(str, served)))


def _read_block(size: Any, key: str) -> tuple[int, int]:
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(_is_size(n) for n in size):
        raise _refuse(key, size, "two sizes")
    return int(size[0]), int(size[1])


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
