"""Throughput of `mmjax.LLM` in one process, over a fixed set of pictures.

`python -m benchmarks.offline [--model DIR] [--num-requests 200] [--max-num-seqs 1 16]`
prints one table row for each concurrency: start-up, requests and tokens a second, compilations
after warm-up, first with pictures that were never seen, then with the same ones again.
"""

import argparse
import random
import time

from PIL import Image, ImageDraw

from mmjax import LLM, SamplingParams

QUESTIONS = (
    "What color is the circle?",
    "How many objects are there?",
    "Is there a star?",
    "Describe the picture.",
)
COLORS = ("red", "green", "blue", "orange")


def draw(seed: int) -> Image.Image:
    """Return a picture of one to three circles, decided by `seed`."""
    chooser = random.Random(seed)
    picture = Image.new("RGB", (chooser.randint(96, 480), chooser.randint(96, 480)), "white")
    for _ in range(chooser.randint(1, 3)):
        left, top = (chooser.uniform(0, 0.7) * side for side in picture.size)
        box = (left, top, left + 0.25 * min(picture.size), top + 0.25 * min(picture.size))
        ImageDraw.Draw(picture).ellipse(box, fill=chooser.choice(COLORS))
    return picture


def conversations(num_requests: int) -> list[list[dict[str, object]]]:
    """Return one question about one picture for each request."""
    return [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_pil", "image_pil": draw(seed)},
                    {"type": "text", "text": QUESTIONS[seed % len(QUESTIONS)]},
                ],
            }
        ]
        for seed in range(num_requests)
    ]


def measure(llm: LLM, num_requests: int) -> str:
    """Answer all requests; return requests and generated tokens a second."""
    chats = conversations(num_requests)
    start = time.perf_counter()
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return f"{num_requests / seconds:8.1f} {tokens / seconds:9.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=None, help="a directory or hub id; default: tiny_scenes")
    parser.add_argument("--num-requests", type=int, default=200)
    parser.add_argument("--max-num-seqs", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--max-model-len", type=int, default=1024)
    flags = parser.parse_args()
    print("seqs | start s | new pictures: req/s  tok/s | again: req/s  tok/s | compiled since")
    for max_num_seqs in flags.max_num_seqs:
        start = time.perf_counter()
        with LLM(
            flags.model,
            max_num_seqs=max_num_seqs,
            max_model_len=flags.max_model_len,
            precompile="all",
            use_tqdm_on_load=False,
        ) as llm:
            seconds = time.perf_counter() - start
            rows = [measure(llm, flags.num_requests) for _ in range(2)]
            compiled = llm.engine.stats().num_compilations
        print(f"{max_num_seqs:4} | {seconds:7.1f} |     {rows[0]} |   {rows[1]} | {compiled:8}")


if __name__ == "__main__":
    main()
