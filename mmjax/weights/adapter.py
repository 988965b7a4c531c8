"""Read an adapter's directory, as PEFT writes it, into arrays by names in the model's tree.

All of it is checked before any of it is used: an adapter is taken whole or not at all.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from mmjax.errors import CheckpointError
from mmjax.rounding import quantize_rows
from mmjax.weights.files.safetensors import StoredTensor, open_file, tag_of
from mmjax.weights.rules import Change, Part, Place, RuleTypes, Turn, map_tensor

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_MAX_CONFIG_BYTES = 2**20
_MAX_PATTERNS, _MAX_WILDCARDS = 1000, 2
_MAX_ALPHA = 1e30
"""What float32 holds; NaN is not below it, and a longer integer would be no float at all."""
_PATTERN = re.compile(r"\^?(?:[\w.]|\\\.|\\d\+|\.\*)*")
_TENSOR = re.compile(
    r"^base_model\.model\.(?P<layer>.{1,500}?)\.(?:base_layer\.)?(?P<kind>lora_A\.weight|lora_B\.weight"
    r"|lora_B\.bias|lora_embedding_A|lora_embedding_B|bias|weight)$"
)
_KINDS = {
    "lora_A.weight": "a",
    "lora_embedding_A": "a",
    "lora_B.weight": "b",
    "lora_embedding_B": "b",
    "lora_B.bias": "added_bias",
    "bias": "bias",
    "weight": "weight",
}
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's weights as they are; by the others (PiSSA,
OLoRA, LoftQ, ...) PEFT changes them as it loads the adapter."""
_UNSERVED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules beside the adapter",
    "trainable_token_indices": "single tokens' embeddings",
    "target_parameters": "parameters that are no layer's weight",
    "layer_replication": "layers that run several times",
    "alora_invocation_tokens": "an adapter from a token on",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal adapters",
    "arrow_config": "a router among adapters",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "megatron_config": "Megatron's layers",
}
"""Keys of adapter_config.json that may not be set, and what they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The keys of adapter_config.json that arrays depend on."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool

    def rank_of(self, layer: str) -> int:
        """Return the rank at a layer, by its published name."""
        return _find(self.rank_pattern, layer, self.rank)

    @property
    def max_rank(self) -> int:
        """The largest rank that a layer may have."""
        return max(self.rank, *self.rank_pattern.values(), 1)

    def scale_of(self, layer: str) -> float:
        """Return what the product of a layer's two matrices is multiplied by."""
        rank, alpha = self.rank_of(layer), _find(self.alpha_pattern, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _find(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """Return the first matching pattern's value (PEFT's get_pattern_key)."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter's arrays, on the host."""

    arrays: Mapping[str, np.ndarray]
    """Name in the tree -> its values without the axis of slots, of the adapter's own rank."""
    digest: bytes
    """The digest of its files."""
    reads_base: bool = False
    """Whether the arrays depend on the model's own weights, or were compared with them."""
    read_again: "Callable[[], Adapter] | None" = None
    """Makes such arrays anew, where no file has them; None: none are, or a file has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReader:
    """What adapters are read for: one model, and the room that it has for them."""

    rules: Sequence[RuleTypes]
    """From names in the checkpoint's files to names in the tree."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the tree's arrays for adapters, with the axis of slots (`layers/lora.py`)."""
    dtype: Any
    max_rank: int
    read_base: Callable[[str], np.ndarray | None]
    """Returns a parameter of the model itself; None: there is none of the name."""
    has_towers: bool = True
    """Whether towers and connectors have room for adapters."""
    left_out: Sequence[str] = ()
    """Attributes of the model that this engine does not compute: nothing of them is read."""
    unadapted: Sequence[str] = ()
    """Attributes of the model that no adapter may change (`MultiModalModel.unadapted`)."""

    def read(self, path: Path) -> Adapter:
        """Return a directory's adapter; CheckpointError, which names no path, for a bad one."""
        config, raw = read_adapter_config(path)
        if not (path / WEIGHTS_FILE).is_file():
            raise CheckpointError(f"the adapter's directory has no {WEIGHTS_FILE}")
        with ExitStack() as stack:
            tensors = _open(stack, path / WEIGHTS_FILE)
            digest = blake3(raw).update_mmap(path / WEIGHTS_FILE).digest()
            return self._read_tensors(tensors, config, digest)

    def read_arrays(self, path: Path, arrays: Mapping[str, Any]) -> Adapter:
        """Return the adapter of a directory's configuration with other arrays, by PEFT's names.

        CheckpointError for what does not fit.
        """
        config, _ = read_adapter_config(path)
        tensors = [
            StoredTensor(name, WEIGHTS_FILE, tuple(one.shape), tag_of(one.dtype), np.asarray(one))
            for name, one in arrays.items()
        ]
        adapter = self._read_tensors(tensors, config, b"")
        if not adapter.reads_base:
            return adapter
        # Copies, since a caller's arrays may change, or be donated.
        kept = {name: np.array(one) for name, one in arrays.items()}
        return replace(adapter, read_again=partial(self.read_arrays, path, kept))

    def _read_tensors(
        self, tensors: Sequence[StoredTensor], config: AdapterConfig, digest: bytes
    ) -> Adapter:
        arrays: dict[str, np.ndarray] = {}
        layers = _group(tensors)
        # What overflows is not finite, and is refused as such.
        with np.errstate(all="ignore"):
            for layer, parts in layers.items():
                arrays |= self._read_layer(layer, parts, config)
        if not arrays:
            raise CheckpointError(f"{WEIGHTS_FILE} holds nothing that this model computes with")
        reads_base = any({"bias", "weight"} & parts.keys() for parts in layers.values())
        return Adapter(arrays=arrays, digest=digest, reads_base=reads_base)

    def _read_layer(
        self, layer: str, tensors: Mapping[str, StoredTensor], config: AdapterConfig
    ) -> dict[str, np.ndarray]:
        """Return a layer's arrays by names in the tree, where a fused layer is several."""
        factors = self._read_factors(layer, tensors, config)
        arrays: dict[str, np.ndarray] = {}
        for mapped, part in map_tensor(f"{layer}.weight", self.rules):
            name = mapped.removesuffix(".weight")
            if name.partition(".")[0] in self.left_out:
                continue
            target = self._find_target(layer, name, part)
            if "weight" in tensors:
                self._check_unchanged(layer, mapped, tensors["weight"])
            found = {
                kind: value if kind == "a" else _cut(layer, part, value)
                for kind, value in factors.items()
            }
            if "bias" in tensors:
                found["bias"] = found.get("bias", 0) + self._read_bias_change(
                    layer, f"{name}.bias", part, tensors["bias"]
                )
            for kind, value in found.items():
                arrays[f"{target}.{kind}"] = self._fit(layer, f"{target}.{kind}", value)
        return arrays

    def _read_factors(
        self, layer: str, tensors: Mapping[str, StoredTensor], config: AdapterConfig
    ) -> dict[str, np.ndarray]:
        """Return `a` [rank, in], `b` [out, rank] with its factor, and what `bias` PEFT adds."""
        a, b = tensors.get("a"), tensors.get("b")
        if a is None and b is None:
            return {}
        rank = config.rank_of(layer)
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
            raise CheckpointError(
                f"`{layer}` must have two matrices in {WEIGHTS_FILE}, its A and its B; is the file "
                "complete, and is that a linear layer?"
            )
        if (a.shape[0], b.shape[1]) != (rank, rank):
            raise CheckpointError(
                f"the matrices of `{layer}` have shapes {a.shape} and {b.shape}, but by "
                f"{CONFIG_FILE} their rank is {rank}"
            )
        if rank > self.max_rank:
            raise CheckpointError(
                f"the adapter has rank {rank} at `{layer}`; this engine takes {self.max_rank}: "
                "raise `--max-lora-rank`"
            )
        scale = np.float32(config.scale_of(layer))
        factors = {"a": _read(a), "b": _read(b) * scale}
        if "added_bias" in tensors:
            added = tensors["added_bias"]
            if added.shape != b.shape[:1]:
                raise CheckpointError(
                    f"`{added.name}` of {WEIGHTS_FILE} has shape {added.shape}; expected "
                    f"{b.shape[:1]}, a number for each row of B"
                )
            factors["bias"] = _read(added) * scale
        return factors

    def _find_target(self, layer: str, name: str, part: Change | Place | None) -> str:
        """Return what the names of a layer's arrays in the tree begin with."""
        parent, _, last = name.rpartition(".")
        # The head may be the table of embeddings: its adapter is the decoder's own.
        target = f"{parent}.lora" if last == "lm_head" else f"{name}.lora"
        if last == "embed_tokens" and isinstance(part, Part):
            raise CheckpointError(
                f"the adapter has weights of `{layer}`, which is several tables in this model; "
                "mmjax serves adapters of it that leave `embed_tokens` out"
            )
        has_rows = part is None or isinstance(part, Part) or _orders_rows(part)
        if f"{target}.a" in self.shapes and has_rows:
            return target
        if not self.has_towers and not name.startswith("language_model."):
            raise CheckpointError(
                f"the adapter has weights of `{layer}`, which is of a tower or a connector; give "
                "`--enable-tower-connector-lora`"
            )
        if name.partition(".")[0] in self.unadapted:
            raise CheckpointError(
                f"the adapter has weights of `{layer}`, which learned embeddings go through that "
                "all requests share; mmjax serves adapters that leave it out of `target_modules`"
            )
        raise CheckpointError(
            f"the adapter has weights of `{layer}`, which is no linear layer or table of "
            "embeddings of this model; is it an adapter of another one?"
        )

    def _check_unchanged(self, layer: str, mapped: str, saved: StoredTensor) -> None:
        """Raise unless a whole weight, which PEFT saves beside some adapters, is the model's."""
        base = self.read_base(mapped)
        if mapped.endswith("lm_head.weight") and base is None:  # tied
            base = self.read_base(mapped.replace("lm_head", "embed_tokens"))
        given = _read(saved)
        if base is not None and base.dtype == np.int8:
            given, _ = quantize_rows(given)
        if base is None or not np.array_equal(given.astype(base.dtype), base):
            raise CheckpointError(
                f"the adapter brings a whole weight of `{layer}`, which is not the model's; mmjax "
                "serves adapters that leave the model's weights as they are"
            )

    def _read_bias_change(
        self,
        layer: str,
        name: str,
        part: Change | Place | None,
        saved: StoredTensor,
    ) -> np.ndarray:
        """Return what a bias that stands in place of the model's adds to it."""
        given, base = _cut(layer, part, _read(saved)), self.read_base(name)
        if base is None or base.shape != given.shape:
            raise CheckpointError(
                f"the adapter has a bias of shape {saved.shape} for `{layer}`, and the model has "
                f"{'none' if base is None else base.shape} there"
            )
        return given - base.astype(np.float32)

    def _fit(self, layer: str, name: str, value: np.ndarray) -> np.ndarray:
        """Return an array as it lies in a slot, but for its rank."""
        shape = self.shapes.get(name)
        if shape is None:
            raise CheckpointError(f"the adapter has a bias for `{layer}`, which takes none")
        # Not every table of this name is one of tokens: Fuyu's `vision_embed_tokens` is linear.
        is_table = name.endswith(".embed_tokens.lora.a")
        if is_table:
            value = value.T
        # The axis of slots, and that of ranks, which may be shorter.
        expected = {
            "a": (shape[1], value.shape[-1]) if is_table else (value.shape[0], shape[-1]),
            "b": (shape[0], value.shape[-1]),
            "bias": shape[:1],
        }[name.rpartition(".")[2]]
        if value.shape != expected:
            raise CheckpointError(
                f"the adapter's array for `{layer}` has shape {value.shape}; expected {expected}: "
                "is it an adapter of another model?"
            )
        cast = np.ascontiguousarray(value, np.float32).astype(self.dtype)
        if not np.isfinite(cast.astype(np.float32)).all():
            # Rows of a batch that have other adapters multiply them by zero, which gives NaN.
            raise CheckpointError(
                f"the adapter's array for `{layer}` holds numbers that are not finite in "
                f"{np.dtype(self.dtype).name}"
            )
        return cast


def slot_axis(name: str) -> int:
    """Return the axis of slots of an array, by its name (`layers/lora.py`)."""
    return 0 if name.endswith(".a") else 1


def fill_slot(name: str, array: np.ndarray | None, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an adapter's array as its slot holds it: with zeros up to its rank, or zeros alone.

    `shape`: of the array of all slots.
    """
    axis = slot_axis(name)
    filled = np.zeros((*shape[:axis], *shape[axis + 1 :]), dtype)
    if array is not None:
        filled[tuple(map(slice, array.shape))] = array
    return filled


def read_adapter_config(path: Path) -> tuple[AdapterConfig, bytes]:
    """Return what adapter_config.json says, and its bytes; CheckpointError for the unserved."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise CheckpointError(f"the adapter's directory has no {CONFIG_FILE}; is it one of PEFT's?")
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise CheckpointError(f"{CONFIG_FILE} has more than {_MAX_CONFIG_BYTES} bytes")
    raw = file.read_bytes()
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{CONFIG_FILE} is not valid JSON") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{CONFIG_FILE} holds a {type(values).__name__}, not an object")
    kind = values.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"`peft_type` of {CONFIG_FILE} is {str(kind)[:80]!r}; mmjax serves LORA alone"
        )
    for key, meaning in _UNSERVED.items():
        if values.get(key):
            raise CheckpointError(
                f"`{key}` of {CONFIG_FILE} is set ({meaning}), which mmjax does not serve"
            )
    init = values.get("init_lora_weights", True)
    if init not in _INITS:
        raise CheckpointError(
            f"`init_lora_weights` of {CONFIG_FILE} is {str(init)[:80]!r}, by which PEFT changes "
            "the model's own weights; save the adapter with "
            "`path_initial_model_for_weight_conversion`"
        )
    return _parse_config(values), raw


def _parse_config(values: Mapping[str, Any]) -> AdapterConfig:
    ranks: dict[str, Any] = {"r": values.get("r"), **_read_pattern(values, "rank_pattern")}
    alphas: dict[str, Any] = {
        "lora_alpha": values.get("lora_alpha"),
        **_read_pattern(values, "alpha_pattern"),
    }
    for key, rank in ranks.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise CheckpointError(
                f"`{key[:80]}` in `r` or `rank_pattern` is {str(rank)[:80]}; expected 1 on"
            )
    for key, alpha in alphas.items():
        is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not is_number or not abs(alpha) <= _MAX_ALPHA:
            raise CheckpointError(
                f"`{key[:80]}` in `lora_alpha` or `alpha_pattern` is {str(alpha)[:80]}; expected "
                "a number"
            )
    factors = {key: float(alpha) for key, alpha in alphas.items()}
    return AdapterConfig(
        rank=ranks.pop("r"),
        alpha=factors.pop("lora_alpha"),
        rank_pattern=ranks,
        alpha_pattern=factors,
        use_rslora=values.get("use_rslora") is True,
    )


def _read_pattern(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    pattern = values.get(key) or {}
    if not isinstance(pattern, dict) or len(pattern) > _MAX_PATTERNS:
        raise CheckpointError(f"`{key}` of {CONFIG_FILE} must map at most {_MAX_PATTERNS} layers")
    for name in pattern:
        # A layer's name or its end, with wildcards for layers: a general expression could take
        # exponential time.
        if not _PATTERN.fullmatch(name) or name.count(".*") > _MAX_WILDCARDS:
            raise CheckpointError(
                f"`{key}` of {CONFIG_FILE} has the pattern {name[:80]!r}; mmjax reads names of "
                rf"layers, with `\d+` and at most {_MAX_WILDCARDS} `.*` in them"
            )
    return pattern


def _open(stack: ExitStack, file: Path) -> list[StoredTensor]:
    try:
        return open_file(stack, file)
    except CheckpointError as error:  # its text has the path
        raise CheckpointError(
            f"{WEIGHTS_FILE} is not a readable safetensors file; is the download complete?"
        ) from error


def _group(tensors: Sequence[StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors of each layer, by what they are there."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        found = _TENSOR.match(tensor.name)
        if found is None or not tensor.is_floating:
            raise CheckpointError(
                f"{WEIGHTS_FILE} holds `{tensor.name[:200]}` ({tensor.dtype}), which is no part of "
                "an adapter that mmjax serves"
            )
        kind = _KINDS[found["kind"]]
        layer = layers.setdefault(found["layer"], {})
        if kind in layer:
            raise CheckpointError(f"{WEIGHTS_FILE} holds `{found['layer']}` twice")
        layer[kind] = tensor
    return layers


def _orders_rows(part: Change | Place | None) -> bool:
    return isinstance(part, Turn) and part.of_rows


def _cut(layer: str, part: Change | Place | None, value: np.ndarray) -> np.ndarray:
    """Return the rows that a part of a fused layer has, in the tree's order.

    CheckpointError where there are others.
    """
    if isinstance(part, Turn):
        try:
            return part.apply(value)
        except ValueError:
            raise CheckpointError(
                f"the adapter's array for `{layer}` has {len(value)} rows, which are not those of "
                "its heads: is it an adapter of another model?"
            ) from None
    if not isinstance(part, Part):
        return value
    if len(value) % part.group_size:
        raise CheckpointError(
            f"the adapter's array for `{layer}` has {len(value)} rows; expected a multiple of "
            f"{part.group_size}: is it an adapter of another model?"
        )
    return part.apply(value)


def _read(tensor: StoredTensor) -> np.ndarray:
    return tensor.read().astype(np.float32)
