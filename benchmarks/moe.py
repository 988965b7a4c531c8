"""What a decode step's experts cost: as much as those that are chosen, not as all that there are.

`python -m benchmarks.moe [--repeats 21]` prints the time of one layer's experts for 6 rows (one
token) to 48 (8 tokens) that are spread over more and more experts, beside the time of as many rows
where there are twice as many experts to choose from, and where all are computed.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.layers.moe import Experts

WIDTH, INNER, NUM_EXPERTS = 512, 352, 64
"""A quarter of the widths of DeepSeek-VL2-small's layers, and as many experts: 138 MB."""
ACTIVE = (1, 3, 6, 12, 24, 48)


def make_experts(num_experts: int) -> Experts:
    """Return random experts."""
    experts = Experts(num_experts, WIDTH, INNER, activation="silu", dtype=jnp.float32)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)), nnx.state(experts)
    )
    nnx.update(experts, state)
    return experts


def make_call(experts: Experts, num_rows: int, num_active: int, *, dense: bool) -> Any:
    """Return a call that computes rows spread evenly over some of the experts."""
    num_experts = len(experts.up_proj[...])
    counts = np.zeros(num_experts, np.int32)
    chosen = np.linspace(0, num_experts - 1, num_active).astype(int)
    for row in range(num_rows):
        counts[chosen[row % num_active]] += 1
    x = jnp.asarray(np.random.default_rng(1).standard_normal((num_rows, WIDTH), np.float32))
    weights = [p[...] for p in (experts.gate_proj, experts.up_proj, experts.down_proj)]
    compute = jax.jit(experts._by_ragged_dot if dense else experts._by_tiles)
    sizes = jnp.asarray(counts)
    return lambda: jax.block_until_ready(compute(x, sizes, *weights))


def measure(calls: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Return each call's median in ms; they take turns, so that all meet the same neighbours."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=21)
    repeats = parser.parse_args().repeats
    few, many = make_experts(NUM_EXPERTS), make_experts(2 * NUM_EXPERTS)
    calls: dict[Any, Callable[[], Any]] = {}
    for num_active in ACTIVE:
        num_rows = max(num_active, 6)
        calls[num_active, "chosen"] = make_call(few, num_rows, num_active, dense=False)
        calls[num_active, "of twice as many"] = make_call(many, num_rows, num_active, dense=False)
    calls[6, "all"] = make_call(few, 6, 6, dense=True)
    times = measure(calls, repeats)
    print(f"{NUM_EXPERTS} experts of {WIDTH} x {INNER}, float32; medians of {repeats}")
    print("active experts | ms | to 6 active | of twice as many experts")
    for num_active in ACTIVE:
        own, twice = (times[num_active, kind] for kind in ("chosen", "of twice as many"))
        ratio = own / times[6, "chosen"]
        print(f"{num_active:3} | {own:.2f} | {ratio:.2f}x | {twice / own:.2f}x")
    whole = times[6, "all"]
    ratio = whole / times[6, "chosen"]
    print(f"6 active, all computed (`ragged_dot` on the CPU): {whole:.2f} ms, {ratio:.1f}x")


if __name__ == "__main__":
    main()
