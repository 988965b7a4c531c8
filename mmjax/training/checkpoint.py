"""`save_checkpoint`: trained weights as a directory that is served as any model."""

import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.layers.module import Params
from mmjax.models.model_source import CONFIG_FILES, WEIGHT_FILES, load_model_config
from mmjax.models.registry import load_model_class
from mmjax.weights.save import save_params


def save_checkpoint(params: Params, source: Any, out: str | Path) -> None:
    """Write weights, configuration, tokenizer and processor into the directory `out`.

    The files' layout, names and dtypes are the source's, so that transformers loads them, too.

    Args:
        params: The model's tree (`LLM.params`), of float arrays.
        source: The `LLM`, or the directory (or hub id), that the weights came from.
        out: A directory, which is made.

    Raises:
        CheckpointError: If `params` or the source are quantised, or the source is a snapshot, or
            `out` itself, or has tensors in other directories.
    """
    given = source if isinstance(source, str | Path) else source.config.model.path
    config, out = load_model_config(str(given), needs_weights=True), Path(out)
    if out.resolve() == config.path.resolve():
        raise CheckpointError(f"`{out}` is what the weights came from; name another directory")
    if config.parts:
        raise CheckpointError(
            f"`{given}` has tensors in other checkpoints, which its config.json names; weights are "
            "written back to a directory that has all of them"
        )
    out.mkdir(parents=True, exist_ok=True)
    model_class: Any = load_model_class(config.architecture)
    save_params(params, config.path, out, model_class.rules(config.hf_config))
    for file in sorted(config.path.iterdir()):
        names = [
            any(fnmatch(file.name, one) for one in many) for many in (CONFIG_FILES, WEIGHT_FILES)
        ]
        if file.is_file() and names == [True, False]:
            shutil.copyfile(file, out / file.name)
