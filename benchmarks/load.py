"""How long a checkpoint's arrays take to load: from safetensors, and from a snapshot of them.

`python -m benchmarks.load MODEL [--rounds 5] [--dtype float32]`: makes the snapshot in a temporary
directory, and reads both in turn, files in the page cache; prints medians.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.convert import convert
from mmjax.layers.module import build_abstract
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import load_model_class
from mmjax.weights.load import load_params
from mmjax.weights.snapshot import load_snapshot


def _seconds(read: Callable[[], Any]) -> tuple[float, int]:
    start = time.perf_counter()
    arrays = jax.tree.leaves(jax.block_until_ready(read()))
    return time.perf_counter() - start, sum(array.nbytes for array in arrays)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", help="that the engine asks for")
    flags = parser.parse_args()
    config = load_model_config(flags.model)
    model_class: Any = load_model_class(config.architecture)
    _, abstract = build_abstract(model_class, config.hf_config, dtype=jnp.dtype(flags.dtype))
    with tempfile.TemporaryDirectory() as folder:
        snapshots = {}
        for dtype in dict.fromkeys(("auto", flags.dtype)):
            snapshots[dtype] = Path(folder) / dtype
            convert(load_model_config(flags.model, dtype=dtype), snapshots[dtype], use_tqdm=False)
        reads: dict[str, Callable[[], Any]] = {
            "safetensors": lambda: load_params(
                config.path, abstract, model_class.RULES, use_tqdm=False
            ),
            **{
                f"snapshot, dtype {dtype}": lambda path=path: load_snapshot(path, abstract)
                for dtype, path in snapshots.items()
            },
        }
        seconds: dict[str, list[float]] = {name: [] for name in reads}
        num_bytes = 0
        for number in range(flags.rounds + 1):
            for name, read in reads.items():
                took, num_bytes = _seconds(read)
                if number:  # the first round fills the page cache
                    seconds[name].append(took)
    print("| from | median | GB/s |\n|---|---|---|")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"| {name} | {median:.2f} s | {num_bytes / median / 1e9:.2f} |")


if __name__ == "__main__":
    main()
