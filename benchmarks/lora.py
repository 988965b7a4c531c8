"""What adapters cost: steps with none, one, four and eight of them, and the products themselves.

`python -m benchmarks.lora [--rounds 9] [--steps 24] [--rank 16] [--dtype bfloat16] [--only steps]`
prints two tables. Steps are of a Gemma 3 decoder of 121M parameters (18 layers of width 640), with
every linear layer adapted: an engine without adapters and one with room for eight take turns in one
run. The products are those beside one layer: for every row with all slots, as mmjax computes them
(`layers/lora.py`), or for each slot's own rows, sorted, by `jax.lax.ragged_dot`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors.numpy import save_file

from benchmarks.step_model import make_engine, make_request, text_config
from mmjax.config.engine_config import LoRAConfig
from mmjax.engine.core import EngineCore
from mmjax.layers.lora import LoRA
from mmjax.layers.module import bind, build_abstract

NUM_SLOTS = 8
NUM_REQUESTS = 8
PROMPT, WARM_UP = 250, 4
VOCAB_SIZE = 32768
"""Fewer than Gemma 3's: its head, which has no adapter here, would be half of a step."""
ROWS = (1, 8, 64, 256)


class Case(NamedTuple):
    """One row of the table of steps."""

    core: EngineCore
    num_active: int

    def adapter_of(self, number: int) -> str | None:
        """Return the adapter of a request."""
        return f"{number % self.num_active}" if self.num_active else None


def write_adapter(path: Path, text: Any, rank: int, seed: int) -> None:
    """Write a random adapter of every linear layer, as PEFT does."""
    rng = np.random.default_rng(seed)
    heads, kv = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    width, inner = text.hidden_size, text.intermediate_size
    shapes = {
        **{"self_attn.q_proj": (heads, width), "self_attn.o_proj": (width, heads)},
        **{"self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width)},
        **{"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)},
        "mlp.down_proj": (width, inner),
    }
    tensors = {}
    for number in range(text.num_hidden_layers):
        for name, (rows, columns) in shapes.items():
            layer = f"base_model.model.model.language_model.layers.{number}.{name}"
            for factor, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = 0.02 * rng.standard_normal(shape, np.float32)
                tensors[f"{layer}.lora_{factor}.weight"] = values
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (path / "adapter_config.json").write_text(json.dumps(config))


def make_cases(rank: int, dtype: Any) -> dict[str, Case]:
    """Start both engines; return the rows of the table."""
    text = text_config(vocab_size=VOCAB_SIZE)
    settings: dict[str, Any] = {"max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": 256}
    plain = make_engine(text, dtype=dtype, **settings)
    lora = LoRAConfig(enable_lora=True, max_loras=NUM_SLOTS, max_lora_rank=rank)
    adapted = make_engine(text, dtype=dtype, lora=lora, **settings)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_SLOTS):
            write_adapter(Path(folder, f"{number}"), text, rank, number)
            adapted.load_adapter(f"{number}", Path(folder, f"{number}"))
        adapted.wait_loaded()
    active = {f"{number} active": Case(adapted, number) for number in (0, 1, 4, NUM_SLOTS)}
    return {"without adapters": Case(plain, 0), **active}


def measure_case(case: Case, numbers: Iterator[int], num_steps: int) -> tuple[float, list[float]]:
    """Return the seconds of one prompt, and those of each decoding step of all requests."""
    core = case.core
    number = next(numbers)
    request = make_request(number, PROMPT, 1)
    core.add_request(msgspec.structs.replace(request, lora_name=case.adapter_of(number)))
    start = time.perf_counter()
    while core.has_unfinished():
        core.step()
    first_s = time.perf_counter() - start
    for place in range(NUM_REQUESTS):
        request = make_request(next(numbers), 8, num_steps + 3 * WARM_UP)
        core.add_request(msgspec.structs.replace(request, lora_name=case.adapter_of(place)))
    while core.stats().num_waiting:
        core.step()
    for _ in range(WARM_UP):
        core.step()
    steps = []
    for _ in range(num_steps):
        start = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - start)
    while core.has_unfinished():
        core.step()
    return first_s, steps


def measure_steps(cases: Mapping[str, Case], rounds: int, num_steps: int) -> None:
    """Print the medians of a prompt's time and of a step's; the cases take turns."""
    firsts: dict[str, list[float]] = defaultdict(list)
    steps: dict[str, list[float]] = defaultdict(list)
    numbers = iter(range(10**9))  # no prompt is asked twice, and found in the prefix cache
    for turn in range(rounds + 1):
        for name, case in cases.items():
            first_s, step_s = measure_case(case, numbers, num_steps)
            if turn:  # the first one loads slots
                firsts[name].append(first_s)
                steps[name] += step_s
    print(f"ms, medians of {rounds} rounds of {num_steps} steps of {NUM_REQUESTS} requests")
    print(f"adapters | a prompt of {PROMPT} | a step | of without")
    plain = statistics.median(steps["without adapters"])
    for name in cases:
        first, step = statistics.median(firsts[name]), statistics.median(steps[name])
        print(f"{name} | {1e3 * first:.1f} | {1e3 * step:.2f} | {step / plain:.3f}x", flush=True)


# ---- the products of one layer ------------------------------------------------------------------


def by_ragged_dot(
    x: Float[Array, "T D"],
    a: Float[Array, "S D R"],
    b: Float[Array, "S R F"],
    slots: Int[Array, " T"],
) -> Float[Array, "T F"]:
    """Return what the adapters add: rows are sorted by slot; those of none are behind the last."""
    place = jnp.where(slots < 0, len(a), slots)
    order = jnp.argsort(place)
    sizes = (place[:, None] == jnp.arange(len(a))[None, :]).sum(0, dtype=jnp.int32)
    shrunk = jax.lax.ragged_dot(x[order], a, sizes)
    out = jax.lax.ragged_dot(shrunk, b, sizes)
    return out[jnp.argsort(order)]


def make_products(num_rows: int, rank: int, dtype: Any) -> dict[str, Callable[[], Any]]:
    """Return calls that compute the same: the layer alone, and the two ways."""
    rng = np.random.default_rng(0)
    inner, width = 2048, 640

    def draw(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    x, weight = draw(num_rows, width), draw(inner, width)
    a, b = draw(NUM_SLOTS, rank, width), draw(inner, NUM_SLOTS, rank)
    slots = jnp.asarray(rng.integers(-1, NUM_SLOTS, num_rows), jnp.int32)
    sizes = {"num_slots": NUM_SLOTS, "rank": rank, "dtype": dtype}
    graphdef, _ = build_abstract(LoRA, width, inner, **sizes)
    bias = jnp.zeros((inner, NUM_SLOTS), dtype)

    @jax.jit
    def layer(x: Array, weight: Array) -> Array:
        return jnp.einsum("TD,FD->TF", x, weight)

    @jax.jit
    def masked(x: Array, a: Array, b: Array, bias: Array, slots: Array) -> Array:
        values = {"a": a, "b": b, "bias": bias, "slots": slots}
        return bind(graphdef, values)(x)

    ragged = jax.jit(by_ragged_dot)
    a_by_slot, b_by_slot = a.transpose(0, 2, 1), b.transpose(1, 2, 0)
    return {
        "layer": lambda: jax.block_until_ready(layer(x, weight)),
        "masked": lambda: jax.block_until_ready(masked(x, a, b, bias, slots)),
        "ragged": lambda: jax.block_until_ready(ragged(x, a_by_slot, b_by_slot, slots)),
    }


def measure_products(rank: int, dtype: Any, repeats: int) -> None:
    """Print the median of each way, which take turns; they must agree."""
    print(f"us, medians of {repeats}: 640 x 2,048, {NUM_SLOTS} slots of rank {rank}")
    print("rows | the layer | all slots, masked | ragged_dot | ragged / masked")
    for num_rows in ROWS:
        calls = make_products(num_rows, rank, dtype)
        results = {name: np.asarray(call(), np.float32) for name, call in calls.items()}
        largest = np.abs(results["masked"]).max()
        difference = np.abs(results["masked"] - results["ragged"]).max()
        limit = 1e-4 if dtype == jnp.float32 else 5e-2
        assert difference <= limit * largest, f"{difference=} {largest=}"
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(1e6 * (time.perf_counter() - start))
        layer, masked, ragged = (statistics.median(values) for values in times.values())
        print(f"{num_rows} | {layer:.0f} | {masked:.0f} | {ragged:.0f} | {ragged / masked:.1f}x")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24, help="timed in a round")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", choices=("steps", "products"), default=None)
    flags = parser.parse_args()
    if flags.only != "steps":
        measure_products(flags.rank, jnp.dtype(flags.dtype), repeats=51)
    if flags.only != "products":
        measure_steps(make_cases(flags.rank, flags.dtype), flags.rounds, flags.steps)


if __name__ == "__main__":
    main()
