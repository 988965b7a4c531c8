"""Time to first token of a second turn about a picture, beside a text of the same new length.

`python -m benchmarks.second_turn [--hidden-size 2560] [--layers 4] [--repeats 15]` makes a random
Gemma 3 whose pictures take 1,024 tokens (torch writes it once), asks a first question about a
picture, and then measures, in turn: the second turn (picture, first question, answer, new
question), a text-only prompt as long as the new question, and the first turn about a new picture.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from mmjax import LLM, SamplingParams
from tests.kit import IMAGE_START, draw, tiny_gemma3_checkpoint

NEW_WORDS = "what color is the circle in the picture and how many are there of it left".split()
FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
TURN = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def make_checkpoint(path: Path, *, hidden_size: int, layers: int) -> Path:
    """Write the model: 1,024 soft tokens for a picture of 448 pixels a side."""
    return tiny_gemma3_checkpoint(
        path,
        text={
            "hidden_size": hidden_size,
            "intermediate_size": 3 * hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": max(1, hidden_size // 160),
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 512,
        },
        vision={"image_size": 448, "hidden_size": 64, "intermediate_size": 128},
        tokens_per_image=1024,
    )


def question(number: int, length: int) -> str:
    """Return about `length` tokens of text that differs with `number`."""
    words = [NEW_WORDS[(number + i) % len(NEW_WORDS)] for i in range(length - 2)]
    return f" {number} " + " ".join(words)


def first_token_s(llm: LLM, prompt: dict[str, object]) -> float:
    """Return the seconds from the prompt to its first token."""
    start = time.perf_counter()
    llm.generate(prompt, FIRST_TOKEN, use_tqdm=False)
    return time.perf_counter() - start


def measure(llm: LLM, repeats: int, new_tokens: int) -> dict[str, list[float]]:
    """Return the times of the three kinds of request, interleaved."""
    times: dict[str, list[float]] = {"second turn": [], "text alone": [], "first turn": []}
    for number in range(repeats + 2):
        media = {"image": draw(640, 480, seed=number)}
        begin = f"{IMAGE_START} what is it ?"
        first = {"prompt": begin, "multi_modal_data": media}
        (answer,) = llm.generate(first, TURN, use_tqdm=False)
        turn = begin + answer.outputs[0].text + question(number, new_tokens)
        times["second turn"].append(first_token_s(llm, {"prompt": turn, "multi_modal_data": media}))
        text = question(1000 + number, new_tokens)
        times["text alone"].append(first_token_s(llm, {"prompt": text}))
        other = {"image": draw(640, 480, seed=1000 + number)}
        times["first turn"].append(first_token_s(llm, {"prompt": begin, "multi_modal_data": other}))
    return {name: values[2:] for name, values in times.items()}


def main() -> None:
    """Print the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden-size", type=int, default=2560)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder), hidden_size=flags.hidden_size, layers=flags.layers)
        settings = {"max_model_len": 2048, "max_num_seqs": 4, "use_tqdm_on_load": False}
        with LLM(str(model), **settings) as llm:
            times = measure(llm, flags.repeats, flags.new_tokens)
            compiled = llm.engine.compilations
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        print(f"{name}: {seconds * 1e3:.1f} ms to the first token")
    ratio = medians["second turn"] / medians["text alone"]
    print(f"second turn / text alone: {ratio:.2f} (ceiling 1.2); compilations: {compiled}")


if __name__ == "__main__":
    main()
