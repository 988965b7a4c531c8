"""Rollouts of a trainer: tokens a second, and the time of an update, beside HF's `generate`.

`python -m benchmarks.rollout [--model DIR] [--prompts 64] [--answers 8] [--tokens 16] [--rounds 3]`
samples so many answers of so many tokens to each prompt, a question about a picture of its own, in
turns with HF's model of the same weights, in one process; it prints medians. Each round has new
pictures, as a trainer's have: a cache holds nothing but a prompt's own for its other answers. Both
begin at the pictures and end at token ids. An update is of all weights, and then of the decoder
alone, each time by other arrays.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import jax
from PIL import Image

from benchmarks.offline import draw
from mmjax import LLM, SamplingParams
from mmjax.models.registry import create_processor
from mmjax.parity.reference import (
    import_torch,
    load_reference,
    load_reference_processor,
    with_float_pixels,
)

QUESTION = "How many objects are there?"


class Engine:
    """mmjax."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.llm = LLM(
            flags.model,
            dtype=flags.dtype,
            max_num_seqs=flags.max_num_seqs,
            max_model_len=flags.max_model_len,
            precompile="all",
            use_tqdm_on_load=False,
        )
        self.params = SamplingParams(
            temperature=1.0, n=flags.answers, max_tokens=flags.tokens, ignore_eos=True, seed=0
        )

    def sample(self, pictures: Sequence[Image.Image]) -> int:
        """Answer about each picture; return the number of tokens."""
        chats = [
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_pil", "image_pil": picture},
                        {"type": "text", "text": QUESTION},
                    ],
                }
            ]
            for picture in pictures
        ]
        outputs = self.llm.chat(chats, self.params, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    def update(self, names: Sequence[str]) -> None:
        """Give the engine other arrays for these parts of the model."""
        new = {name: jax.tree.map(lambda leaf: leaf + 0, self.llm.params[name]) for name in names}
        jax.block_until_ready(new)
        start = time.perf_counter()
        self.llm.update_weights(new)
        jax.block_until_ready(self.llm.params)
        self.update_s = time.perf_counter() - start


class Reference:
    """HF's model, on torch."""

    def __init__(self, flags: argparse.Namespace, engine: Engine) -> None:
        self.torch = import_torch()
        config = engine.llm.config.model
        ours = create_processor(config).info.get_hf_processor()
        processor = load_reference_processor(config.path, config.hf_config.model_type, ours)
        self.processor = with_float_pixels(processor)
        self.model = load_reference(config.path, config.architecture, dtype=flags.dtype)
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        self.prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        self.flags = flags

    def sample(self, pictures: Sequence[Image.Image]) -> int:
        """Answer about each picture; return the number of tokens."""
        inputs = self.processor(
            text=[self.prompt] * len(pictures),
            images=[[picture] for picture in pictures],
            return_tensors="pt",
            add_special_tokens=False,
        )
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        with self.torch.inference_mode():
            ids = self.model.generate(
                **inputs,
                do_sample=True,
                top_k=0,
                num_return_sequences=self.flags.answers,
                max_new_tokens=self.flags.tokens,
            )
        return ids[:, inputs["input_ids"].shape[1] :].numel()


def measure(
    sample: Callable[[Sequence[Image.Image]], int], pictures: Sequence[Image.Image]
) -> float:
    """Return tokens a second."""
    start = time.perf_counter()
    num_tokens = sample(pictures)
    return num_tokens / (time.perf_counter() - start)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=None, help="a directory or hub id; default: tiny_scenes")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=512)
    flags = parser.parse_args()
    engine = Engine(flags)
    sides = {"mmjax": engine.sample, "HF generate": Reference(flags, engine).sample}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    # The first round is a warm-up of both.
    for number in range(flags.rounds + 1):
        first = number * flags.prompts
        pictures = [draw(seed) for seed in range(first, first + flags.prompts)]
        for name, sample in sides.items():
            rate = measure(sample, pictures)
            if number:
                rates[name].append(rate)
    for name, found in rates.items():
        runs = " ".join(f"{rate:.0f}" for rate in found)
        print(f"{name:12} {statistics.median(found):8.0f} tok/s  ({runs})")
    for parts in (list(engine.llm.params), ["language_model"]):
        times = []
        for _ in range(flags.rounds + 1):
            engine.update(parts)
            times.append(engine.update_s)
        print(f"update of {', '.join(parts)}: {1000 * statistics.median(times[1:]):.1f} ms")
    print(f"compiled since the start: {engine.llm.engine.stats().num_compilations}")
    engine.llm.close()


if __name__ == "__main__":
    main()
