"""`python -m mmjax.convert MODEL OUT`: convert a checkpoint to a snapshot.

OUT contains the arrays, the configuration, the tokenizer and the processor; it is served like any
model directory, on one device or a mesh. With `--maxtext` the arrays are those of a checkpoint that
MaxText wrote, and MODEL gives the rest.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from mmjax.config.engine_config import DtypeName, ModelConfig, Quantization
from mmjax.errors import CheckpointError, MMJaxError
from mmjax.layers.module import Params, build_abstract
from mmjax.layers.quantization import Layouts
from mmjax.models.interface import build_model
from mmjax.models.model_source import (
    CHECKPOINT_FILES,
    WEIGHT_FILES,
    check_quantization,
    load_model_config,
    stored_dtype,
)
from mmjax.models.registry import load_model_class
from mmjax.system.logger import configure_logging, get_logger
from mmjax.weights.files.method import read_method
from mmjax.weights.files.safetensors import is_snapshot
from mmjax.weights.layouts import read_layouts
from mmjax.weights.load import load_params
from mmjax.weights.maxtext import is_maxtext
from mmjax.weights.snapshot import save_snapshot

logger = get_logger("mmjax.convert")  # __name__ is `__main__` here


def main(arguments: Sequence[str] | None = None, *, prog: str = "python -m mmjax.convert") -> int:
    """Write the snapshot; return 0, or 1 with a message on stderr."""
    options = _parse(arguments, prog)
    configure_logging()
    try:
        config = load_model_config(
            options.model,
            revision=options.revision,
            dtype=options.dtype,
            quantization=options.quantization,
            needs_weights=options.maxtext is None,
        )
        convert(config, options.out, maxtext=options.maxtext)
    except MMJaxError as error:
        print(f"mmjax.convert: {error}", file=sys.stderr)
        return 1
    return 0


def convert(
    config: ModelConfig, out: Path, *, maxtext: Path | None = None, use_tqdm: bool = True
) -> None:
    """Write a checkpoint's arrays as a snapshot, and its other files, into `out`.

    `maxtext`: the directory of a checkpoint that MaxText wrote, whose arrays are taken instead.

    `config.dtype`: of the arrays; "auto": config.json's, if it is float32 or bfloat16, else
    float32. On loading they are cast to the dtype that is configured then.

    Raises:
        CheckpointError: If `out` is in use, or the checkpoint does not match its model.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"`{out}` exists already; remove it, or name another directory")
    if is_snapshot(config.path):
        raise CheckpointError(f"`{config.path}` is a snapshot already; convert what it was made of")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"`{out}` cannot be made ({error.strerror})") from error
    start = time.perf_counter()
    if maxtext is None:
        layouts = _find_layouts(config)
        params = _load(config, layouts, use_tqdm=use_tqdm)
    else:
        layouts = None
        params = _load_maxtext(config, maxtext, use_tqdm=use_tqdm)
    _copy_files(config.path, out)
    save_snapshot(
        out,
        params,
        source=config.model,
        architecture=config.architecture,
        revision=config.revision,
        layouts=layouts,
    )
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    seconds = time.perf_counter() - start
    logger.info("wrote %.2f GB to %s in %.1f s", num_bytes / 1e9, out, seconds)


def _find_layouts(config: ModelConfig) -> Layouts | None:
    model_class: Any = load_model_class(config.architecture)
    return read_layouts(config.path, config.hf_config, model_class.rules(config.hf_config))


def _load(config: ModelConfig, layouts: Layouts | None, *, use_tqdm: bool) -> Params:
    model_class: Any = load_model_class(config.architecture)
    check_quantization(config)
    return load_params(
        config.path,
        _build(config, config.quantization or layouts),
        model_class.rules(config.hf_config),
        method=read_method(config.hf_config),
        parts=config.parts,
        use_tqdm=use_tqdm,
    )


def _load_maxtext(config: ModelConfig, path: Path, *, use_tqdm: bool) -> Params:
    if not is_maxtext(path):
        raise CheckpointError(
            f"`{path}` is no checkpoint of MaxText's; give the directory of a step, which has "
            "`items` in it"
        )
    model_class: Any = load_model_class(config.architecture)
    rules = model_class.maxtext_rules(config.hf_config)
    return load_params(path, _build(config, config.quantization), rules, use_tqdm=use_tqdm)


def _build(config: ModelConfig, quantization: Quantization | Layouts | None) -> Params:
    model_class: Any = load_model_class(config.architecture)
    parts = (config.hf_config, None, quantization)
    return build_abstract(build_model, model_class, *parts, dtype=_resolve_dtype(config))[1]


def _resolve_dtype(config: ModelConfig) -> Any:
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    name = stored_dtype(config.hf_config)
    return jnp.dtype(name if name in get_args(DtypeName) else "float32")


def _copy_files(source: Path, out: Path) -> None:
    """Copy the files that are read besides weights; no code, no pickles."""
    for file in sorted(source.iterdir()):
        is_wanted = any(fnmatch(file.name, pattern) for pattern in CHECKPOINT_FILES)
        if file.is_file() and is_wanted:
            is_weights = any(fnmatch(file.name, pattern) for pattern in WEIGHT_FILES)
            if not is_weights:
                shutil.copyfile(file, out / file.name)


def _parse(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add: Any = parser.add_argument
    add("model", help="a directory or a hub id")
    add("out", type=Path, help="a directory that does not exist, or is empty")
    add("--revision", help="of a hub id")
    add("--dtype", choices=get_args(DtypeName), default="auto", help="auto: as config.json says")
    add("--maxtext", type=Path, help="the directory of a step that MaxText saved, for its arrays")
    add("--quantization", choices=get_args(Quantization), help="as the server's flag")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
