"""What an engine's steps take on this machine's accelerator, beside what its memory allows.

`python -m benchmarks.accelerator [--batches 1 8 64] [--prompt 2048] [--layers 34] [--peer-hf]
[--profile DIR]` prints the device's own limits (a copy, a product of matrices), then decoding and
prompts of a decoder of Gemma 3's 4B shape with random weights in bfloat16. `--peer-hf`: afterwards
the same shape in HF transformers, in a process of its own.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

CONTEXT = 600
"""Tokens of each request's prompt before it decodes."""
NUM_STEPS = 64


def shape_of_4b(num_layers: int, vocab_size: int) -> dict[str, Any]:
    """Return google/gemma-3-4b's decoder (config.json's `text_config`)."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
    }


def median_seconds(call: Callable[[], Any], rounds: int = 20) -> float:
    """Return the median time of a call, after three that do not count."""
    times = []
    for number in range(rounds + 3):
        start = time.perf_counter()
        call()
        if number >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_limits(num_bytes: int) -> float:
    """Print what a copy and a product take; return the bytes a second that are read or written."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {device.memory_stats()}")
    words = jnp.arange(num_bytes // 4, dtype=jnp.int32)
    add = jax.jit(lambda x: x + 1)
    seconds = median_seconds(lambda: add(words).block_until_ready())
    bandwidth = 2 * words.nbytes / seconds
    side = 8192 if num_bytes > 2**28 else 512
    matrix = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    square = jax.jit(lambda x: x @ x)
    seconds = median_seconds(lambda: square(matrix).block_until_ready())
    print(f"copy {bandwidth / 1e9:.0f} GB/s, product {2 * side**3 / seconds / 1e12:.0f} TFLOP/s")
    return bandwidth


def make_engine(shape: dict[str, Any], max_num_seqs: int, max_num_batched_tokens: int) -> Any:
    """Start an engine with random weights; its tower is never used."""
    from transformers import Gemma3TextConfig

    from benchmarks.step_model import model_config
    from mmjax.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
    from mmjax.engine.core import EngineCore

    config = EngineConfig(
        model=ModelConfig(
            model="benchmark",
            path=Path("."),
            hf_config=model_config(Gemma3TextConfig(**shape)),
            architecture="Gemma3ForConditionalGeneration",
            max_model_len=4096,
            dtype="bfloat16",
            load_format="dummy",
        ),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
        precompile="none",
        use_tqdm=False,
    )
    return EngineCore(config)


def add(core: Any, name: str, num_prompt_tokens: int, num_tokens: int) -> None:
    """Give the engine a request that ends by length alone."""
    from benchmarks.step_model import make_request

    request = make_request(sum(name.encode()), num_prompt_tokens, num_tokens)
    core.add_request(msgspec.structs.replace(request, request_id=name))


def drain(core: Any) -> None:
    """Step until nothing is left."""
    while core.has_unfinished():
        core.step()


def decode_seconds(core: Any, batch: int, name: str) -> float:
    """Return a step's time while `batch` requests decode."""
    for number in range(batch):
        add(core, f"{name}-{number}", CONTEXT, 3 * NUM_STEPS + 40)
    while core.stats().num_waiting:
        core.step()
    for _ in range(20):
        core.step()
    times = []
    for _ in range(2 * NUM_STEPS):
        start = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - start)
    drain(core)
    return statistics.mean(times)


def measure_decode(
    core: Any, batches: Sequence[int], *, weight_bytes: int, bandwidth: float, profile: Path | None
) -> None:
    """Print a step's time for numbers of requests, and the time to read the weights once."""
    floor = weight_bytes / bandwidth
    print(
        f"weights that a step reads: {weight_bytes / 1e9:.2f} GB, {1e3 * floor:.2f} ms of copying"
    )
    for batch in batches:
        start = time.perf_counter()
        decode_seconds(core, batch, f"first-{batch}")
        first = time.perf_counter() - start
        with profiling(profile, f"decode{batch}"):
            seconds = decode_seconds(core, batch, f"second-{batch}")
        print(
            f"decode {batch}: {1e3 * seconds:.2f} ms a step, {batch / seconds:.0f} tokens/s, "
            f"{100 * floor / seconds:.0f}% of memory's speed (first run {first:.0f} s)",
            flush=True,
        )


def measure_prompts(core: Any, length: int, num_weights: int, profile: Path | None) -> None:
    """Print the time to the first token of one prompt."""
    times = []
    for number in range(6):
        with profiling(profile if number == 5 else None, "prompt"):
            start = time.perf_counter()
            add(core, f"prompt-{'x' * number}", length - number, 1)
            drain(core)
            times.append(time.perf_counter() - start)
    seconds = statistics.median(times[1:])
    rate = 2 * num_weights * length / seconds / 1e12
    print(
        f"prompt of {length}: {1e3 * seconds:.1f} ms, {length / seconds:.0f} tokens/s, "
        f"{rate:.0f} TFLOP/s",
        flush=True,
    )


@contextmanager
def profiling(folder: Path | None, name: str) -> Iterator[None]:
    """Write JAX's profile of the block to `folder/name`; None: none."""
    import jax

    with nullcontext() if folder is None else jax.profiler.trace(str(folder / name)):
        yield


def measure_hf(shape: dict[str, Any], batches: Sequence[int], length: int) -> None:
    """Print the same of HF transformers, with its default cache and attention."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Gemma3TextConfig(**shape)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model: Any = Gemma3ForCausalLM(config).eval()
    for batch in batches:
        ids = torch.randint(3, 1000, (batch, CONTEXT), device=device)
        seconds = {}
        for num_tokens in (1, 33, 1, 33):
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
                )
            seconds[num_tokens] = time.perf_counter() - start
        step = (seconds[33] - seconds[1]) / 32
        print(f"HF decode {batch}: {1e3 * step:.2f} ms a step, {batch / step:.0f} tokens/s")
    ids = torch.randint(3, 1000, (1, length), device=device)
    with torch.inference_mode():
        seconds = median_seconds(
            lambda: model.generate(ids, max_new_tokens=1, do_sample=False), rounds=5
        )
    print(f"HF prompt of {length}: {1e3 * seconds:.1f} ms", flush=True)


def measure_ours(flags: argparse.Namespace, shape: dict[str, Any]) -> None:
    """Print the limits and the engine's times."""
    import jax

    from mmjax.layers.module import flatten_params

    bandwidth = measure_limits(flags.copy_bytes)
    start = time.perf_counter()
    core = make_engine(shape, max(flags.batches), flags.max_num_batched_tokens)
    print(f"started in {time.perf_counter() - start:.1f} s: {core.startup_seconds}")
    leaves = flatten_params(core._runner.params)
    text = [leaf for name, leaf in leaves.items() if name.startswith("language_model")]
    options = {"weight_bytes": sum(leaf.nbytes for leaf in text), "bandwidth": bandwidth}
    measure_decode(core, flags.batches, **options, profile=flags.profile)
    in_layers = sum(leaf.size for leaf in text) - shape["vocab_size"] * shape["hidden_size"]
    measure_prompts(core, flags.prompt, in_layers, flags.profile)
    print(jax.devices()[0].memory_stats())


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--vocab", type=int, default=262208)
    parser.add_argument("--copy-bytes", type=int, default=2**32)
    parser.add_argument("--profile", type=Path, default=None)
    parser.add_argument("--peer-hf", action="store_true")
    parser.add_argument("--only-hf", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    shape = shape_of_4b(flags.layers, flags.vocab)
    if flags.only_hf:
        measure_hf(shape, flags.batches, flags.prompt)
        return
    measure_ours(flags, shape)
    if flags.peer_hf:
        # JAX keeps the memory that it took until its process ends.
        subprocess.run([sys.executable, "-m", "benchmarks.accelerator", *sys.argv[1:], "--only-hf"])


if __name__ == "__main__":
    main()
